"""`manage.py penstock_worker`: run the tasks of a backend."""

import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from penstock.django import Backend
from penstock.django.framework import task_backends
from penstock.django.worker import TaskWorker
from penstock.errors import PenstockError


class Command(BaseCommand):  # type: ignore[misc]
    help = "Run tasks until SIGTERM or SIGINT. Running tasks finish first."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--backend", default="default", help="alias in TASKS")
        parser.add_argument("--queues", help="queues, with commas (default: those of the backend)")
        parser.add_argument("--threads", type=int, default=4, help="tasks at a time per queue")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            backend = task_backends[options["backend"]]
        except Exception as error:
            raise CommandError(str(error)) from error
        if not isinstance(backend, Backend):
            raise CommandError(f"TASKS[{options['backend']!r}] is not penstock.django.Backend")
        named = options["queues"]
        queues = named.split(",") if named else sorted(backend.queues)
        unknown = set(queues) - set(backend.queues)
        if backend.queues and unknown:
            raise CommandError(f"the backend has no queue {', '.join(sorted(unknown))}")
        if not queues:
            raise CommandError("name queues: --queues, or QUEUES of the backend")
        if options["threads"] < 1:
            raise CommandError("--threads is 1 or more")
        worker = TaskWorker(backend, queues, options["threads"])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        try:
            worker.create_queues()
            self.stdout.write(f"running tasks of {', '.join(queues)}")
            self.stdout.flush()
            worker.run()
        except PenstockError as error:
            raise CommandError(str(error)) from error
