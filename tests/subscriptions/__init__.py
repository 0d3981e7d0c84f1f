"""Live subscribers of topics."""
