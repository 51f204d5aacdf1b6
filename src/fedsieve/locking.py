"""Folders of several processes: one at a time works in one, and what was made for nothing is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsieve.errors import InvalidSetting


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Makes `folder`, the setting `out`; of what had to be made for it, what is empty in the end is removed again."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        with suppress(FileNotFoundError):  # another process has just removed a parent
            folder.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be written to ({error.strerror})"
        raise InvalidSetting("out", str(folder), allowed) from None
    try:
        yield
    finally:
        for one in new:
            with suppress(OSError):  # not empty, as it should be, or gone
                one.rmdir()


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
