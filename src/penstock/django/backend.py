"""The backend: `enqueue` stores a row and sends a message, both or neither.

If the database has the broker's tables, the message goes through the outbox in the application's
transaction. Nothing is sent if the transaction rolls back, and nothing is lost if the process dies
after the commit. With another database the message is pushed after the commit.
"""

import os
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, transaction
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

from penstock.blocking import BlockingBrokers, Line
from penstock.django import framework
from penstock.django.framework import TaskResult, TaskResultStatus
from penstock.errors import PenstockError
from penstock.outbox.sync import SyncOutbox

DEFAULTS = {
    "URL": None,  # of the broker, or several separated by commas; default: PENSTOCK_URL
    "TOKEN": None,  # default: PENSTOCK_TOKEN
    "DATABASE": "default",  # the alias of the database with the rows
    "SCHEMA": "penstock",  # of the broker's tables
    "OUTBOX": None,  # None: use it if the database has the broker's tables
    "PREFIX": "django.",  # of the queues' names
}
DEFAULT_URL = "http://127.0.0.1:6632"
PRIORITY_STEPS = (-100, -50, 0, 1, 51)  # the lowest priority of each queue
PUSH_PATIENCE_SECONDS = 5.0
HAS_OUTBOX = """SELECT EXISTS (SELECT 1 FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
                WHERE n.nspname = %s AND p.proname = 'outbox_push')"""


class Backend(framework.BaseTaskBackend):  # type: ignore[misc]
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.settings: dict[str, Any] = DEFAULTS | self.options
        self.database: str = self.settings["DATABASE"]
        self._outbox = SyncOutbox(self.settings["SCHEMA"])
        self._found_outbox = False
        self._local = threading.local()

    # Enqueue

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store the task, and send it when the transaction commits."""
        from penstock.django.models import TaskRecord

        self.validate_task(task)
        now = timezone.now()
        result = TaskResult(
            task=task,
            id=get_random_string(32),
            status=TaskResultStatus.READY,
            enqueued_at=now,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        with transaction.atomic(using=self.database):
            record = TaskRecord.objects.using(self.database).create(
                id=result.id,
                task_path=task.module_path,
                backend=self.alias,
                queue_name=task.queue_name,
                priority=task.priority,
                run_after=task.run_after,
                args=result.args,
                kwargs=result.kwargs,
                status=result.status,
                enqueued_at=now,
            )
            self._send(record, task)
        framework.task_enqueued.send(type(self), task_result=result)
        return result

    def _send(self, record: Any, task: Any) -> None:
        queue = self.step_name(task.queue_name, _step(task.priority))
        payload = {
            "id": record.id,
            "task": task.module_path,
            "args": record.args,
            "kwargs": record.kwargs,
        }
        later = _aware(task.run_after)
        if self.uses_outbox():
            connection = connections[self.database].connection
            self._outbox.push(
                connection, queue, payload, transaction_id=record.id, deliver_at=later
            )
            return
        item: dict[str, Any] = {
            "queue": queue,
            "payload": payload,
            "transactionId": record.id,
        }
        if later is not None:
            item["deliverAt"] = later.isoformat()
        transaction.on_commit(lambda: self._push(item, record), using=self.database)

    def _push(self, item: dict[str, Any], record: Any) -> None:
        """Push a task whose row is committed. If that fails, record the task as failed."""
        try:
            (result,) = self.line().json(
                "POST", "/api/v1/push", body={"items": [item]}, retry_for=PUSH_PATIENCE_SECONDS
            )
            if result["status"] == "failed":
                raise PenstockError(f"the task was not sent: {result.get('error')}")
        except PenstockError as error:
            record.fail(error)
            raise

    def uses_outbox(self) -> bool:
        """Return whether tasks go through the outbox: OUTBOX, or whether there is one."""
        if self.settings["OUTBOX"] is None:
            self._found_outbox = self._found_outbox or self._has_outbox()
            return self._found_outbox
        return bool(self.settings["OUTBOX"])

    def _has_outbox(self) -> bool:
        """Return whether the database has the broker's tables."""
        connection = connections[self.database]
        if connection.vendor != "postgresql":
            return False
        with connection.cursor() as cursor:
            cursor.execute(HAS_OUTBOX, [self.settings["SCHEMA"]])
            return bool(cursor.fetchone()[0])

    # Queues of the broker

    def step_name(self, queue: str, step: int) -> str:
        name = f"{self.settings['PREFIX']}{queue}"
        return f"{name}.priority{step:+d}" if step else name

    def namespace(self, queue: str) -> str:
        """Return the namespace of a queue's priority steps."""
        return f"{self.settings['PREFIX']}{queue}"

    def brokers(self) -> BlockingBrokers:
        urls = self.settings["URL"] or os.environ.get("PENSTOCK_URL") or DEFAULT_URL
        listed = [url.strip() for url in urls.split(",") if url.strip()]
        return BlockingBrokers(listed, token=self.settings["TOKEN"])

    def line(self) -> Line:
        """Return this thread's connection to a broker."""
        if not hasattr(self._local, "line"):
            self._local.line = Line(self.brokers())
        line: Line = self._local.line
        return line

    # Results

    def get_result(self, result_id: str) -> Any:
        from penstock.django.models import TaskRecord

        try:
            record = TaskRecord.objects.using(self.database).get(id=result_id)
            return self.result_of(record)
        except (TaskRecord.DoesNotExist, ImportError) as error:
            raise framework.TaskResultDoesNotExist(result_id) from error

    def result_of(self, record: Any) -> Any:
        """Return the result in a row. Raises `ImportError` if the task does not exist any more."""
        task = import_string(record.task_path)
        if not isinstance(task, framework.Task):
            raise ImportError(f"{record.task_path} is not a task")
        task = task.using(
            priority=record.priority,
            queue_name=record.queue_name,
            run_after=record.run_after,
            backend=record.backend,
        )
        result = TaskResult(
            task=task,
            id=record.id,
            status=TaskResultStatus(record.status),
            enqueued_at=record.enqueued_at,
            started_at=record.started_at,
            last_attempted_at=record.last_attempted_at,
            finished_at=record.finished_at,
            args=record.args,
            kwargs=record.kwargs,
            backend=record.backend,
            errors=[framework.TaskError(**error) for error in record.errors],
            worker_ids=list(record.worker_ids),
        )
        object.__setattr__(result, "_return_value", record.return_value)
        return result

    # Checks

    def check(self, **_: Any) -> Iterable[Any]:
        """Report wrong settings."""
        where = f"TASKS[{self.alias!r}]"
        unknown = sorted(set(self.options) - set(DEFAULTS))
        if unknown:
            text = f"{where} has unknown OPTIONS: {', '.join(unknown)}"
            yield checks.Error(text, hint=f"Known: {', '.join(DEFAULTS)}", id="penstock.E001")
        if not apps.is_installed("penstock.django"):
            text = f"{where} needs 'penstock.django' in INSTALLED_APPS"
            yield checks.Error(text, id="penstock.E002")
        try:
            self.brokers()
        except PenstockError as error:
            yield checks.Error(f"{where}: {error}", id="penstock.E003")
        if self.database not in connections:
            text = f"{where}: DATABASES has no {self.database!r}"
            yield checks.Error(text, id="penstock.E004")
        elif self.settings["OUTBOX"]:
            yield from self._check_outbox(where)

    def _check_outbox(self, where: str) -> Iterable[Any]:
        try:
            has_outbox = self._has_outbox()
        except (DatabaseError, ImproperlyConfigured) as error:
            text = f"{where}: cannot query the database: {error}"
            yield checks.Warning(text, id="penstock.W001")
            return
        if not has_outbox:
            text = (
                f"{where}: OUTBOX is set, but the database {self.database!r} has no broker "
                f"tables in the schema {self.settings['SCHEMA']!r}"
            )
            hint = "Name this database in the broker's database.url, or remove OUTBOX."
            yield checks.Error(text, hint=hint, id="penstock.E005")


def _step(priority: int) -> int:
    return max(step for step in PRIORITY_STEPS if step <= priority)


def _aware(moment: datetime | None) -> datetime | None:
    if moment is None or moment.tzinfo is not None:
        return moment
    aware: datetime = timezone.make_aware(moment)
    return aware.astimezone(UTC)
