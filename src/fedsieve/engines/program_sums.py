"""Sums over many programs of a Triton kernel, in an order that is always the same: each writes its own, then these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # that share what is summed, at most
SUMMED = 32  # sums that a program adds up


def add_up(sums: Tensor, kind: torch.dtype) -> Tensor:
    """The total [size] of the `sums` [programs, size] of at most `PROGRAMS` programs, in another type."""
    programs, size = sums.shape
    total = torch.empty(size, dtype=kind, device=sums.device)
    _add_up[(triton.cdiv(size, SUMMED),)](sums, total, programs, size, PROGRAMS=PROGRAMS, SUMMED=SUMMED)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    sums_at, result_at, programs, size, PROGRAMS: tl.constexpr, SUMMED: tl.constexpr
):
    program = tl.arange(0, PROGRAMS)[:, None]
    place = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    there = (program < programs) & (place < size)[None, :]
    sums = tl.load(sums_at + program * size + place[None, :], mask=there, other=0)
    tl.store(result_at + place, tl.sum(sums, axis=0).to(result_at.dtype.element_ty), mask=place < size)
