"""Memory that a step frees is memory that the next step asks for.

The C library of Linux hands large blocks back to the system as they are freed, and the system clears every page of them
when they are asked for again. On a CPU that takes a tenth of a small convolutional network's training, or more.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's names for them
KEPT, LARGEST = 2**30, 2**25  # bytes: free at the end of a heap, and of one block; larger ones glibc may refuse
SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Keep freed memory, up to a gigabyte a heap, unless the environment says otherwise; whether it is done.

    Threads have heaps of their own. What the process uses at its peak hardly changes, but it doesn't become less after.
    """
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, KEPT))
