"""
A broker for Celery: ``broker_transport = "django_pgqueue.celery_transport:Transport"``.
"""

from django_pgqueue.celery_transport.transport import Transport

__all__ = ["Transport"]
