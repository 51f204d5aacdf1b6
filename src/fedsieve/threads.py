"""How many threads PyTorch may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import torch

Given = TypeVar("Given")
Made = TypeVar("Made")

_counting = Lock()
_inside = 0
_threads_outside = 1


@contextmanager
def single_thread() -> Iterator[None]:
    """Inside, PyTorch uses one thread: small models are faster so, and results don't depend on the number of cores.

    PyTorch's setting is global: of several runs in one process, the last one to leave puts it back.
    """
    global _inside, _threads_outside
    with _counting:
        if _inside == 0:
            _threads_outside = torch.get_num_threads()
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            _inside -= 1
            if _inside == 0:
                torch.set_num_threads(_threads_outside)


def in_threads(work: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
    """What `work` makes of each item, in order, in as many threads as PyTorch may use outside `single_thread`."""
    with single_thread(), ThreadPoolExecutor(_threads_outside) as pool:
        yield from pool.map(work, items)
