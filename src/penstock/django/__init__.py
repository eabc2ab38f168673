"""A backend for Django's tasks: `django.tasks` of Django 6, or the package `django-tasks` before.

    INSTALLED_APPS = [..., "penstock.django"]
    TASKS = {"default": {"BACKEND": "penstock.django.Backend"}}

- `framework` is whichever of the two packages there is.
- `backend` enqueues: in the transaction of the application if its database is the broker's.
- `models` has a row per task: what became of it.
- `worker` runs tasks; `manage.py penstock_worker` starts it.
"""

from typing import Any

__all__ = ["Backend"]


def __getattr__(name: str) -> Any:
    if name == "Backend":  # not imported before Django's settings can be read
        from penstock.django.backend import Backend

        return Backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
