import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_pgqueue", "0002_topics_and_events"),
    ]

    operations = [
        migrations.CreateModel(
            name="ReaperRun",
            fields=[
                ("id", models.IntegerField(default=1, primary_key=True, serialize=False)),
                ("finished_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("seconds", models.FloatField(help_text="The duration of the run.")),
                (
                    "report",
                    models.JSONField(
                        help_text="What the run did, as in reap_queues --format json, with the number of queues."
                    ),
                ),
            ],
            options={
                "db_table": "django_pgqueue_reaperrun",
                "constraints": [
                    models.CheckConstraint(condition=models.Q(("id", 1)), name="django_pgqueue_reaperrun_one_row")
                ],
            },
        ),
    ]
