from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_pgqueue", "0005_queue_minute_published"),
    ]

    operations = [
        migrations.CreateModel(
            name="TaskRun",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("queue", models.TextField()),
                ("task", models.TextField(help_text="The dotted path of its function.")),
                ("backend", models.TextField(help_text="The alias in TASKS.")),
                ("key", models.TextField(help_text="The random second half of the result's id.")),
                (
                    "status",
                    models.TextField(
                        choices=[
                            ("READY", "Ready"),
                            ("RUNNING", "Running"),
                            ("FAILED", "Failed"),
                            ("SUCCESSFUL", "Successful"),
                        ]
                    ),
                ),
                ("run_after", models.DateTimeField(null=True)),
                ("enqueued_at", models.DateTimeField(null=True)),
                ("started_at", models.DateTimeField()),
                ("last_attempted_at", models.DateTimeField()),
                ("finished_at", models.DateTimeField(null=True)),
                (
                    "worker_ids",
                    models.JSONField(default=list, help_text="The consumers that started it, one for each attempt."),
                ),
                (
                    "errors",
                    models.JSONField(
                        db_default=models.Value([], output_field=models.JSONField()),
                        default=list,
                        help_text="The last failures, oldest first: exception_class_path, traceback.",
                    ),
                ),
                (
                    "arguments",
                    models.JSONField(
                        help_text="The args and kwargs of the message, once an attempt has ended.", null=True
                    ),
                ),
                ("return_value", models.JSONField(null=True)),
                ("lease_token", models.UUIDField(help_text="The token of the last attempt's lease.")),
            ],
            options={
                "db_table": "django_pgqueue_taskrun",
                "indexes": [models.Index(fields=["last_attempted_at"], name="django_pgqueue_run_attempt_idx")],
            },
        ),
    ]
