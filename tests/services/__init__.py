"""The statements, and the functions that run them."""
