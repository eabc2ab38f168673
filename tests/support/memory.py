"""Where the files of tests live: in memory, when there is enough of it.

Nothing here can cut the power, so what a flush to the disk promises is tested with the crashable
file system; elsewhere flushing only makes a test wait (half of the suite's time). `make soak`
stays on the disk, and so does everything when TMPDIR is set.
"""

import os
import tempfile
from pathlib import Path

DIRECTORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30


def use_for_files() -> bool:
    """Whether new files of tests, and of the processes they start, are in memory from now on."""
    if os.environ.get("TMPDIR"):
        return Path(os.environ["TMPDIR"]).is_relative_to(DIRECTORY)
    if _free_bytes() < ENOUGH_BYTES:
        return False
    os.environ["TMPDIR"] = tempfile.tempdir = str(DIRECTORY)
    return True


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
