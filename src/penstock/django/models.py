"""A row per task: its arguments, its status and its result. `get_result` reads it."""

import traceback
from typing import Any

from django.db import models
from django.utils import timezone

from penstock.django.framework import TaskResultStatus


class TaskRecord(models.Model):  # type: ignore[misc]
    id = models.CharField(primary_key=True, max_length=64)
    task_path = models.TextField()
    backend = models.CharField(max_length=100)
    queue_name = models.CharField(max_length=200)
    priority = models.SmallIntegerField(default=0)
    run_after = models.DateTimeField(null=True)
    args = models.JSONField(default=list)
    kwargs = models.JSONField(default=dict)
    status = models.CharField(max_length=20)
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True, db_index=True)
    errors = models.JSONField(default=list)  # exception class and traceback of each
    worker_ids = models.JSONField(default=list)  # one for each attempt
    return_value = models.JSONField(null=True)

    def __str__(self) -> str:
        return f"{self.task_path} {self.id} {self.status}"

    def succeed(self, value: Any) -> None:
        """Store the task's return value."""
        self.return_value = value
        self._finish(TaskResultStatus.SUCCESSFUL)

    def fail(self, error: BaseException) -> None:
        """Store that the task failed, and why."""
        text = "".join(traceback.format_exception(error))
        about: dict[str, Any] = {
            "exception_class_path": f"{type(error).__module__}.{type(error).__qualname__}",
            # PostgreSQL refuses NUL and lone surrogates in JSON.
            "traceback": text.replace("\0", "?").encode(errors="replace").decode(),
        }
        self.errors = [*self.errors, about]
        self.return_value = None
        self._finish(TaskResultStatus.FAILED)

    def _finish(self, status: TaskResultStatus) -> None:
        self.status = status
        self.finished_at = timezone.now()
        self.save(using=self._state.db)
