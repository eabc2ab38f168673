"""The application of `bench/celery.py`: a task that does nothing but note when it began."""

import os
import struct
import time

from celery import Celery

import penstock.celery  # noqa: F401  registers penstock://

NOTE = struct.Struct("dd")  # when delay() was called, when the task began

app = Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_ignore_result=True,
    task_default_queue=os.environ["BENCH_QUEUE"],
    task_create_missing_queues=True,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    broker_transport_options=(
        {"confirm_publish": True} if os.environ["BENCH_BROKER"].startswith("amqp") else {}
    ),
)


@app.task  # type: ignore[untyped-decorator]
def empty(sent: float) -> None:
    note = NOTE.pack(sent, time.time())
    notes = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(notes, note)
    os.close(notes)


def send(count: int, pause: float) -> None:
    for _ in range(count):
        empty.delay(time.time())
        if pause:
            time.sleep(pause)
