"""Writing down a GPU's work as a CUDA graph, while other threads may use the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import torch

T = TypeVar("T")

_counting = Lock()
_captures = 0  # that go on now, in all threads


class CannotCapture(Exception):
    """Why a model's work can't be replayed."""


def record(work: Callable[[], T], beside: torch.cuda.CUDAGraph | None = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """`work` on the current stream, not done but written down, and what it will have put out after each replay.

    Graphs that are never replayed at once may share the memory they work in: the one `beside`.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    with _no_garbage_collection():
        graph.capture_begin(pool=beside.pool() if beside else None, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result


def free_unused_memory() -> None:
    """Give back to the GPU what graphs that are gone worked in: PyTorch keeps it, and other processes can't have it."""
    gc.collect()
    with _counting:
        if not _captures:  # of another run; what is left then goes with the next
            torch.cuda.empty_cache()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside, nothing is freed by chance: letting go of another run's graph or event would break a capture."""
    global _captures
    with _counting:
        _captures += 1
        gc.disable()
    try:
        yield
    finally:
        with _counting:
            _captures -= 1
            if not _captures:
                gc.enable()
