"""The numbers that training computes with: on a CPU fp32 or bf16, on a GPU tf32 as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16"]

_switches = RLock()


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Inside, PyTorch computes in `precision`, and repeatably; on a CPU in this thread alone.

    fp32 is full single precision. tf32 rounds what is multiplied to 10 bits of fraction, bf16 to 7; sums stay fp32,
    and so do the weights that a client accumulates. PyTorch's switches are global, so of several runs in one process
    only one is inside at a time; replaying what was captured here needs none of them.
    """
    if device.type != "cuda":
        # Weights change in place inside, which a cache would not notice.
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    with _switches:
        before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic, convolutions.benchmark
        products.allow_tf32 = convolutions.allow_tf32 = precision != "fp32"
        convolutions.deterministic, convolutions.benchmark = True, False
        try:
            # A graph may be captured inside: weights that autocast had cached would be missing when it is replayed.
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
                yield
        finally:
            products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic, convolutions.benchmark = before
