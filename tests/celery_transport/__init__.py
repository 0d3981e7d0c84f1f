"""The broker for Celery."""
