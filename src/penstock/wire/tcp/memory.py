"""Keep freed memory in the process, for the buffers of a megabyte that every FETCH needs.

glibc returns large freed blocks to the kernel at once, and gets them back page by page. For answers
of 1 MiB, that was 1200 to 2400 page faults and 6 to 10 ms of system time each; with these
thresholds it is none and 0.7 ms.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 128 << 20  # at the top of the heap
FROM_HEAP = 32 << 20  # blocks up to this size come from the heap


def keep_freed_memory() -> bool:
    """Set the thresholds of the C library. Return False if it has none: then all is slower."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, FROM_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
