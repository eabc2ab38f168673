"""Run code in a process of the site: a JSON string in each line of input, what it prints as one in each
line of output.
"""

import contextlib
import io
import json
import sys

import django

django.setup()

from django.db import transaction  # noqa: E402

from penstock.django.models import TaskRecord  # noqa: E402
from tests.django.shop import tasks  # noqa: E402

names = {**vars(tasks), "TaskRecord": TaskRecord, "transaction": transaction}
for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(json.loads(line), dict(names))
    print(json.dumps(printed.getvalue().strip()), flush=True)
