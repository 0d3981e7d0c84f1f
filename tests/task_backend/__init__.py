"""Django's Tasks."""
