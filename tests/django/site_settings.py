"""The settings of the site in these tests, from the environment."""

import os
from importlib.util import find_spec
from urllib.parse import parse_qs, unquote, urlsplit

database = urlsplit(os.environ["SITE_DATABASE"])
query = parse_qs(database.query)
if database.scheme == "sqlite":
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database.path}}
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database.path[1:],
            "USER": unquote(database.username or query.get("user", [""])[0]),
            "PASSWORD": unquote(database.password or ""),
            "HOST": query.get("host", [database.hostname or ""])[0],
            "PORT": str(database.port or query.get("port", [""])[0]),
        }
    }
SECRET_KEY = "of the tests"
USE_TZ = True
INSTALLED_APPS = ["penstock.django", "tests.django.shop"]
if find_spec("django_tasks"):  # the backport; not with Django 6
    INSTALLED_APPS.insert(0, "django_tasks")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TASKS = {
    "default": {
        "BACKEND": "penstock.django.Backend",
        "QUEUES": ["default", "mails"],
        "OPTIONS": {"URL": os.environ["SITE_BROKER"], "PREFIX": os.environ["SITE_PREFIX"]},
    }
}
LOGGING = {
    "version": 1,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "INFO"},
}
