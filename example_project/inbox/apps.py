from django.apps import AppConfig


class InboxConfig(AppConfig):
    name = "example_project.inbox"
    label = "inbox"
    default_auto_field = "django.db.models.BigAutoField"
