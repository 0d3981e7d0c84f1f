from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_pgqueue", "0004_queue_minute"),
    ]

    operations = [
        migrations.AddField(
            model_name="queueminute",
            name="published",
            field=models.BigIntegerField(db_default=0, default=0),
        ),
    ]
