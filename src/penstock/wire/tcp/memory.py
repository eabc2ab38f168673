"""Keeping freed memory in the process, for buffers of a megabyte that come and go with every FETCH.

glibc returns large freed blocks to the kernel at once and takes them back page by page. At 1 MiB an
answer that was 1200 to 2400 page faults and 6 to 10 ms of system time each, against none and 0.7 ms
with these thresholds.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 128 << 20  # at the top of the heap
FROM_HEAP = 32 << 20  # blocks up to this size come from the heap


def keep_freed_memory() -> bool:
    """Ask the C library for it; False where it has no such setting (then all works, but slower)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, FROM_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
