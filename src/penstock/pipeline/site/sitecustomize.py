"""Python runs this at its start in the processes Spark starts on the driver's host: `session.build`
sees to it.

Spark gives a Python process 10 seconds to come up and call back, which a busy machine may not keep
when PySpark has to be compiled from its zip each time (0.9 s of CPU). The installed one is compiled
already (0.2 s). The processes that plan a read or a write come from Spark's own daemon whatever is
configured: it is replaced by ours.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_module = ""
if "-m" in sys.orig_argv:
    _module, *_arguments = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
if _module.startswith("pyspark."):
    from penstock.pipeline.daemon import PLAIN, prefer_installed

    prefer_installed()
    if _module == "pyspark.daemon" and PLAIN not in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", "penstock.pipeline.daemon", *_arguments])

_here = str(Path(__file__).parent)
_other = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != _here])
if (
    _other is not None and _other.loader is not None
):  # one of the user's own, which ours stands in front of
    _other.loader.exec_module(importlib.util.module_from_spec(_other))
