from django.apps import AppConfig


class DemoConfig(AppConfig):
    name = "example_project.demo"
    label = "demo"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """In a process of a run: note what happens, and end with the run."""
        from example_project.demo import lifeline, notes
        from example_project.demo.run import Run

        if run := Run.current():
            notes.open_for(run)
            lifeline.watch()
