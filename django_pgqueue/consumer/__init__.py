"""The process that claims, handles and settles messages."""
