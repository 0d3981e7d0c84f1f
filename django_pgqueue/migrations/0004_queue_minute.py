from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_pgqueue", "0003_reaper_run"),
    ]

    operations = [
        migrations.CreateModel(
            name="QueueMinute",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.TextField()),
                ("minute", models.DateTimeField()),
                ("handled", models.BigIntegerField(db_default=0, default=0)),
                ("failed", models.BigIntegerField(db_default=0, default=0)),
                ("dead_lettered", models.BigIntegerField(db_default=0, default=0)),
            ],
            options={
                "db_table": "django_pgqueue_queueminute",
                "indexes": [models.Index(fields=["minute"], name="django_pgqueue_minute_idx")],
                "constraints": [
                    models.UniqueConstraint(fields=("queue", "minute"), name="django_pgqueue_minute_unique")
                ],
            },
        ),
    ]
