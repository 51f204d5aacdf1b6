"""Folders that one process at a time works in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Locks `folder` against others; without waiting, says whether that could be done. It ends with the process."""
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_ours = False
    except OSError:  # a disk that knows no locks
        is_ours = True
    try:
        yield is_ours
    finally:
        os.close(descriptor)
