import os

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    name = "tests.testapp"
    label = "testapp"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        if "TESTAPP_SPANS" in os.environ:
            from tests.support import spans

            spans.write_to(os.environ["TESTAPP_SPANS"])
