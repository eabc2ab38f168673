"""Detect that the parent process has ended.

A parent starts a child with a pipe as its standard input and never closes it. The pipe ends when
the parent ends, for whatever reason, so a killed parent leaves no child behind.
"""

import os
import sys
import threading
from collections.abc import Callable


def watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end` in a thread when the parent has ended.

    The standard input of this process is empty from now on.
    """
    pipe = os.dup(sys.stdin.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)

    def wait() -> None:
        while os.read(pipe, 4096):
            pass
        on_end()

    threading.Thread(target=wait, name="penstock-parent", daemon=True).start()
