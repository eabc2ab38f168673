"""Run tasks: several threads, each takes a task, runs it and acknowledges it.

A task whose worker dies is delivered again when its lease ends. Leases of running tasks are
renewed. A task that was finished before its acknowledgement arrived is not run again: its row says
so.
"""

import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import DataError, close_old_connections, connections
from django.utils import timezone

from penstock.blocking import Backoff, Line, Settler
from penstock.django import framework
from penstock.django.backend import PRIORITY_STEPS, Backend
from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.types import Received

log = logging.getLogger("penstock.django")

WAIT_SECONDS = 30.0  # that a pop waits at the broker
GLANCE_SECONDS = 0.5  # between checks whether the worker has to stop
ABANDON_SECONDS = 2.0
CLOSE_SECONDS = 10.0
DATABASE_PAUSE_SECONDS = 2.0  # before a task that cannot be recorded is delivered again
OPTIONS = {
    "ordering": "none",
    "leaseTime": 60,
    "retryLimit": 10,
    "retentionEnabled": True,
    "completedRetentionSeconds": 3600,
}


class _Sent(msgspec.Struct):
    """The payload of a message: what `Backend.enqueue` sends."""

    id: str
    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class TaskWorker:
    def __init__(self, backend: Backend, queues: Sequence[str], threads: int) -> None:
        self._backend = backend
        self._queues = list(queues)
        self._threads = threads
        self._brokers = backend.brokers()
        self._settler = Settler(self._brokers)
        self._stopping = threading.Event()
        self._name = f"{socket.gethostname()}-{os.getpid()}"

    def create_queues(self) -> None:
        """Give the queues of all priorities their namespace. The first task may have created some
        without it.
        """
        line = Line(self._brokers)
        for queue in self._queues:
            namespace = self._backend.namespace(queue)
            for step in PRIORITY_STEPS:
                name = self._backend.step_name(queue, step)
                try:
                    about = line.json("GET", "/api/v1/resources/queues", name)
                except NotFound:
                    about = {}
                if about.get("namespace") != namespace:
                    options = OPTIONS | {"priority": step}
                    body = {"queue": name, "namespace": namespace, "options": options}
                    line.json("POST", "/api/v1/configure", body=body)
        line.close()

    def run(self) -> None:
        """Run tasks until `stop` is called."""
        threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"tasks of {queue}")
            for queue in self._queues
            for _ in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._settler.close(CLOSE_SECONDS)

    def stop(self) -> None:
        """Take no more tasks. Running ones finish."""
        self._stopping.set()

    def _work(self, queue: str) -> None:
        line, backoff = Line(self._brokers), Backoff()
        source = {"namespace": self._backend.namespace(queue), "batch": 1}
        while not self._stopping.is_set():
            try:
                messages = self._pop(line, source)
                backoff.reset()
            except Unavailable as error:
                log.warning("tasks of %s wait for a broker: %s", queue, error)
                self._stopping.wait(backoff.delay())
                continue
            except PenstockError:
                log.exception("the broker refuses tasks of %s", queue)
                self._stopping.wait(backoff.delay())
                continue
            for message in messages:
                if self._stopping.is_set():
                    self._settler.settle(message, "retry")
                else:
                    self._settler.settle(message, *self._outcome(message))
        line.close()

    def _pop(self, line: Line, source: dict[str, Any]) -> list[Received]:
        line.send_pop([source], WAIT_SECONDS)
        for _ in range(round(2 * WAIT_SECONDS / GLANCE_SECONDS)):
            answer = line.wait(GLANCE_SECONDS)
            if answer is None and self._stopping.is_set():
                answer = line.abandon(ABANDON_SECONDS)
                return [] if answer is None else self._settler.take(answer).messages
            if answer is not None:
                return self._settler.take(answer).messages
        line.close()
        raise Unavailable("a pop was not answered in time")

    def _outcome(self, message: Received) -> tuple[str, str | None]:
        """Run a task. Returns the status of its message and the reason."""
        close_old_connections()
        try:
            try:
                sent = msgspec.json.decode(message.raw, type=_Sent)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("a message is not a task: %s", error)
                return "dlq", f"not a task: {error}"
            return self._run(sent)
        except DataError as error:
            log.error("a message is not a task: %s", error)
            return "dlq", f"not a task: {error}"
        except Exception as error:  # the database is away: the task comes again
            log.exception("a task cannot be recorded, it is delivered again later")
            self._stopping.wait(DATABASE_PAUSE_SECONDS)
            return "failed", f"{type(error).__name__}: {error}"
        finally:
            for connection in connections.all(initialized_only=True):
                connection.close_if_unusable_or_obsolete()

    def _run(self, sent: _Sent) -> tuple[str, str | None]:
        from penstock.django.models import TaskRecord

        database = self._backend.database
        record = TaskRecord.objects.using(database).filter(id=sent.id).first()
        if record is None:
            log.error("task %s %s has no row, it is not run", sent.task, sent.id)
            return "dlq", "the task has no row in the database"
        if record.finished_at is not None:
            return "completed", None  # the acknowledgement of its first run was lost
        now = timezone.now()
        record.status = framework.TaskResultStatus.RUNNING
        record.started_at = record.started_at or now
        record.last_attempted_at = now
        record.worker_ids = [*record.worker_ids, self._name]
        record.save(using=database)
        try:
            result = self._backend.result_of(record)
        except ImportError as error:
            log.error("task %s cannot be imported: %s", sent.task, error)
            record.fail(error)
            return "dlq", f"task {sent.task} cannot be imported: {error}"
        framework.task_started.send(type(self._backend), task_result=result)
        context = (framework.TaskContext(task_result=result),) if result.task.takes_context else ()
        try:
            value = result.task.call(*context, *result.args, **result.kwargs)
            value = framework.normalize_json(value)
        except BaseException as error:  # noqa: BLE001 whatever it raises is its result, also an exit
            log.warning("task %s %s failed: %r", sent.task, sent.id, error)
            record.fail(error)
        else:
            try:
                record.succeed(value)
            except DataError as error:  # such as NUL, which PostgreSQL refuses in JSON
                log.warning(
                    "the result of task %s %s cannot be stored: %s", sent.task, sent.id, error
                )
                record.fail(error)
        finished = self._backend.result_of(record)
        framework.task_finished.send(type(self._backend), task_result=finished)
        return "completed", None
