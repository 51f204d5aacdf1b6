"""CUDA streams that nobody else has.

PyTorch hands out 32 streams in turns, so that the 33rd one asked for is the first again. Work that another thread puts
on a stream while a graph is captured on it would become part of the graph. So these are taken once, and lent.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from threading import RLock
from typing import Any

import torch

LANES = 8  # measured on an H200: 4 to 8 lanes fill it, more bring nothing
RUNS_AT_ONCE = 3  # each with its lanes, a stream of its own and one for gradients: 30 of PyTorch's 32

_lending = RLock()  # a lane may be let go of, and give back, while its thread borrows
_free: dict[torch.device, list[torch.cuda.Stream]] = {}


def borrow(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of one's own, until it is given back; None when all are lent."""
    device = _numbered(device)
    with _lending:
        if device not in _free:
            count = RUNS_AT_ONCE * (LANES + 2)
            _free[device] = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        return _free[device].pop() if _free[device] else None


def give_back(device: torch.device, stream: torch.cuda.Stream, graphs: MutableMapping[int, Any] | None = None) -> None:
    """Let others have a stream that was borrowed, once the graphs captured on it are gone.

    PyTorch clears a stream's workspaces when such a graph goes, whoever has the stream then.
    """
    if graphs is not None:
        graphs.clear()
    with _lending:
        _free[_numbered(device)].append(stream)


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is one of `cuda:0`, `cuda:1`, ..."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
