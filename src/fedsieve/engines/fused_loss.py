"""Cross-entropy and its gradient by the logits as one Triton kernel, in place of the dozen that PyTorch launches.

It knows where the step's labels lie, so that nobody has to fetch them, and writes down the loss where it belongs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 2**16  # logits, that one program goes through
AT_ONCE = 2048  # of them


def can_be_fused(logits: Tensor) -> bool:
    """Whether there are few enough for one program."""
    return 0 < logits.numel() <= MOST and triton.next_power_of_2(logits.shape[1]) <= AT_ONCE


def fused_loss(logits: Tensor, labels: Tensor, shares: Tensor, losses: Tensor, cursor: Tensor) -> Tensor:
    """The gradient [n, classes] of the sum of shares · cross-entropy by the logits [n, classes], in their type.

    Labels and shares are the first n of those of the step [steps, batch] that `cursor` [1] is at; the loss goes to its
    place in `losses` [steps], and the cursor to the next step.
    """
    logits = logits.contiguous()
    count, classes = logits.shape
    slope = torch.empty_like(logits)
    wide = triton.next_power_of_2(classes)
    rows = min(triton.next_power_of_2(count), AT_ONCE // wide)
    _kernel[(1,)](
        logits, labels, shares, losses, cursor, slope, count, classes, labels.shape[1], ROWS=rows, CLASSES=wide
    )
    return slope


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits_at,
    labels_at,
    shares_at,
    losses_at,
    cursor_at,
    slope_at,
    count,
    classes,
    batch,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    step = tl.load(cursor_at)
    label_of = tl.arange(0, CLASSES)[None, :]
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        real = row < count
        label = tl.load(labels_at + step * batch + row, mask=real, other=0)
        share = tl.load(shares_at + step * batch + row, mask=real, other=0)
        here = row[:, None] * classes + label_of
        there = real[:, None] & (label_of < classes)
        logits = tl.load(logits_at + here, mask=there, other=0).to(tl.float32)
        logits = tl.where(label_of < classes, logits, float("-inf"))
        largest = tl.max(logits, axis=1)
        raised = tl.exp(logits - largest[:, None])
        whole = tl.sum(raised, axis=1)
        is_right = label_of == label[:, None]
        right = tl.sum(tl.where(is_right, logits, 0), axis=1)
        total += share * (tl.log(whole) + (largest - right))
        slope = share[:, None] * (raised / whole[:, None] - is_right.to(tl.float32))
        tl.store(slope_at + here, slope.to(slope_at.dtype.element_ty), mask=there)
    tl.store(losses_at + step, tl.sum(total, axis=0))
    tl.debug_barrier()  # all have read the cursor
    tl.store(cursor_at, step + 1)
