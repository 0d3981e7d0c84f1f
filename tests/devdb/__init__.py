"""The development server."""
