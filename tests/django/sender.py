"""What a view of the site does: `python -m tests.django.sender COMMAND NAME ...`."""

import os
import sys

import django
from django.db import transaction


def main(command: str, *names: str) -> None:
    django.setup()
    from tests.django.shop import tasks

    for name in names:
        if command == "roll-back":
            try:
                with transaction.atomic():
                    tasks.note.enqueue(name)
                    raise RuntimeError("the order is not valid")
            except RuntimeError:
                continue
        elif command == "die":
            with transaction.atomic():
                tasks.note.enqueue(name)
            os.kill(os.getpid(), 9)  # right after the commit
        else:
            getattr(tasks, command).enqueue(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
