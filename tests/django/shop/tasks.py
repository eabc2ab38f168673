"""The tasks of the site. They write a ledger, a line for every start and end."""

import os
import time
from pathlib import Path

try:
    from django.tasks import TaskContext, task
except ImportError:  # before Django 6
    from django_tasks import TaskContext, task


def write(event: str, name: str) -> None:
    line = f"{event} {name} {os.getpid()} {time.time()}\n"
    descriptor = os.open(os.environ["SITE_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@task
def note(name: str) -> str:
    write("start", name)
    write("end", name)
    return name


@task
def slow(name: str, seconds: float) -> None:
    write("start", name)
    time.sleep(seconds)
    write("end", name)


@task
def broken(name: str) -> None:
    write("start", name)
    raise ValueError(f"{name} is broken")


@task
async def waits(name: str) -> str:
    return name.upper()


@task(takes_context=True, queue_name="mails")
def attempts(context: TaskContext, name: str) -> int:
    write("end", name)
    return context.attempt


@task
def bad_result(name: str) -> Path:
    write("end", name)
    return Path(name)


@task
def exits(name: str) -> None:
    write("end", name)
    raise SystemExit(name)


@task
def nul(name: str) -> str:
    """Return what PostgreSQL cannot store in JSON."""
    write("end", name)
    return "\0"


@task
def nul_in_its_error(name: str) -> None:
    write("end", name)
    raise ValueError("\0 and \udc80")
