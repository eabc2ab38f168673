"""The application of the tests: its tasks write a ledger, a line for every start and end."""

import os
import time
from pathlib import Path

from celery import Celery

import penstock.celery  # noqa: F401

app = Celery(
    "shop",
    broker=os.environ["SHOP_BROKER"],
    backend=os.environ.get("SHOP_RESULTS"),
)
app.conf.update(
    task_acks_late=os.environ.get("SHOP_ACKS_LATE") == "1",
    task_reject_on_worker_lost=True,
    task_default_queue=os.environ.get("SHOP_QUEUE", "celery"),
    task_create_missing_queues=True,
    task_queue_max_priority=int(os.environ["SHOP_PRIORITIES"])
    if "SHOP_PRIORITIES" in os.environ
    else None,
    worker_prefetch_multiplier=int(os.environ.get("SHOP_PREFETCH", "4")),
    broker_transport_options={
        "queue_options": {"leaseTime": int(os.environ.get("SHOP_LEASE", "300"))},
        "patience": float(os.environ.get("SHOP_PATIENCE", "30")),
    },
    broker_connection_retry_on_startup=os.environ.get("SHOP_RETRY") == "1",
    broker_use_ssl={"ca_certs": os.environ["SHOP_CA"]} if "SHOP_CA" in os.environ else None,
    worker_hijack_root_logger=True,
)
LEDGER = Path(os.environ["SHOP_LEDGER"])


def write(event: str, name: str) -> None:
    """Append one line. A short line is written whole, also when several processes append."""
    line = f"{event} {name} {os.getpid()} {time.time()}\n"
    descriptor = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@app.task
def note(name: str) -> str:
    write("start", name)
    write("end", name)
    return name


@app.task
def slow(name: str, seconds: float) -> str:
    write("start", name)
    time.sleep(seconds)
    write("end", name)
    return name


@app.task
def hold(name: str, mark: str) -> None:
    """Run until the file is there."""
    write("start", name)
    while not Path(mark).exists():
        time.sleep(0.05)
    write("end", name)


@app.task(bind=True, max_retries=3)
def flaky(self, name: str, failures: int) -> str:
    write("start", name)
    if self.request.retries < failures:
        raise self.retry(countdown=0.2, exc=RuntimeError("not yet"))
    write("end", name)
    return name


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def double(number: int) -> int:
    return 2 * number


@app.task
def die_once(name: str, mark: str) -> str:
    """Kill its own process at the first attempt."""
    write("start", name)
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), 9)
    write("end", name)
    return name
