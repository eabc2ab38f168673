"""pgmq, procrastinate and pgqueuer from the registry, in a virtual environment of their own below
the user's cache directory: they are no requirements of ours.

Only their SQL is used: it is read there once, and run through asyncpg like ours. So all are driven
by the same thin client.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("pgmq", "procrastinate", "pgqueuer")
READ = """
import datetime, importlib.metadata, importlib.resources, json, uuid
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment, QueryQueueBuilder
files = importlib.resources.files
queue = QueryQueueBuilder()
dequeue = queue.build_dequeue_query(
    batch_size=1, entrypoints=["bench"], concurrency_limits=[0], queue_manager_id=uuid.uuid4(),
    global_concurrency_limit=None, heartbeat_timeout=datetime.timedelta(seconds=30))
assert len(dequeue.args) == 4, dequeue.args
print(json.dumps({
    "pgmq": {"schema": (files("pgmq") / "sql" / "pgmq.sql").read_text()},
    "procrastinate": {"schema": (files("procrastinate") / "sql" / "schema.sql").read_text()},
    "pgqueuer": {
        "schema": QueryBuilderEnvironment().build_install_query(),
        "enqueue": queue.build_enqueue_query(),
        "dequeue": dequeue.sql,
        "finish": queue.build_log_job_query(),
    },
    "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
}))
"""


@dataclass(slots=True)
class Package:
    version: str
    sql: dict[str, str]  # its statements, by what they do


def packages() -> dict[str, Package]:
    """Installed if need be; CalledProcessError when that is not possible here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "penstock" / "bench-peers"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(home))
        _run(str(python), "-m", "pip", "install", "--quiet", *PACKAGES)
        (home / "ready").touch()
    texts = json.loads(_run(str(python), "-c", READ.replace("PACKAGES", repr(PACKAGES))))
    return {name: Package(texts["versions"][name], texts[name]) for name in PACKAGES}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
