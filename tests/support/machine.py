"""What makes the suite wait for the machine and proves nothing.

Files are in memory, when there is enough of it: nothing here can cut the power, so what a flush to
the disk promises is tested with the crashable file system, and elsewhere flushing was half of the
suite's time. `make soak` stays on the disk, and so does everything when TMPDIR is set.

Programs that tests start find our modules compiled, also where PYTHONDONTWRITEBYTECODE keeps the
tree clean: that is half of a broker's start.

The system's certificates are read once in a process: httpx reads them for every client, which takes
longer than most requests to a broker, and hardly any of those is encrypted.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path

DIRECTORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30


def cache_bytecode() -> None:
    """Keep compiled modules in the virtual environment when they may not be in the tree."""
    if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = f"{sys.prefix}/pycache"


def share_certificates() -> None:
    """Let all clients of httpx have one TLS context of each kind."""
    from httpx._transports import default

    default.create_ssl_context = functools.cache(default.create_ssl_context)


def wait_longer_for_answers() -> None:
    """Let httpx wait a minute by default instead of 5 seconds: the machine may be very busy."""
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = 60.0


def files_in_memory() -> bool:
    """Whether new files of tests, and of the processes they start, are in memory from now on."""
    if not os.environ.get("TMPDIR"):
        if _free_bytes() < ENOUGH_BYTES:
            return False
        os.environ["TMPDIR"] = tempfile.tempdir = str(DIRECTORY)
    return Path(os.environ["TMPDIR"]).is_relative_to(DIRECTORY)


def _free_bytes() -> int:
    """What may be written there without pushing out programs."""
    try:
        disk = os.statvfs(DIRECTORY)
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not a Linux, or a container without it
        return 0
    if disk.f_flag & os.ST_NOEXEC:  # some tests start programs that they have put there
        return 0
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return min(disk.f_bavail * disk.f_frsize, available << 10)
