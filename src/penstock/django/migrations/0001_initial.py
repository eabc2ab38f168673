from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]
    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="TaskRecord",
            fields=[
                ("id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("task_path", models.TextField()),
                ("backend", models.CharField(max_length=100)),
                ("queue_name", models.CharField(max_length=200)),
                ("priority", models.SmallIntegerField(default=0)),
                ("run_after", models.DateTimeField(null=True)),
                ("args", models.JSONField(default=list)),
                ("kwargs", models.JSONField(default=dict)),
                ("status", models.CharField(max_length=20)),
                ("enqueued_at", models.DateTimeField()),
                ("started_at", models.DateTimeField(null=True)),
                ("last_attempted_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(db_index=True, null=True)),
                ("errors", models.JSONField(default=list)),
                ("worker_ids", models.JSONField(default=list)),
                ("return_value", models.JSONField(null=True)),
            ],
        ),
    ]
