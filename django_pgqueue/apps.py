"""The app configuration: what happens when Django starts and after it has migrated."""

from typing import Any

from django.apps import AppConfig
from django.core import checks as django_checks
from django.core.exceptions import ImproperlyConfigured
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules


class DjangoPGQueueConfig(AppConfig):
    name = "django_pgqueue"
    label = "django_pgqueue"
    verbose_name = "Message queues"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_pgqueue import checks

        if self.label != "django_pgqueue":
            raise ImproperlyConfigured(
                f"The label of django_pgqueue cannot be changed to {self.label!r}: its migrations refer to it."
            )
        autodiscover_modules("queues")
        django_checks.register(checks.check_settings)
        django_checks.register(checks.check_engine)
        django_checks.register(checks.check_foreign_key, django_checks.Tags.database)
        django_checks.register(checks.check_schema, django_checks.Tags.database)
        post_migrate.connect(declare_standing_queues, sender=self)


def declare_standing_queues(using: str, plan: Any = (), **kwargs: Any) -> None:
    """Create the standing queues of queues.py modules, and their dead-letter queues, after migrating."""
    from django_pgqueue import registry
    from django_pgqueue.queue_internals import declaration_of
    from django_pgqueue.services.beliefs import beliefs
    from django_pgqueue.task_backend import queues

    beliefs.forget()
    is_reversed = any(migration.app_label == "django_pgqueue" and backwards for migration, backwards in plan)
    if is_reversed:
        return  # The tables may not exist any more.
    # The queues of tasks are standing queues too, unless the project declares otherwise. The variable keeps them alive
    # until they are declared.
    tasks = queues.make_queues(using)
    for queue in dict.fromkeys(
        [*registry.standing_queues(), *(each for each in tasks if not declaration_of(each).auto_deleted)]
    ):
        if queue.using == using:
            queue.declare()
