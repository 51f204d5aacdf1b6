"""One kernel for the whole of SGD's step on many parameters, in Triton.

A step of SGD reads and writes every weight and its velocity once, whatever the size of the batch; at small batches
that traffic, and a kernel for each parameter, are much of a step. Here gradient, objective, decay, momentum, the step
itself and the rounded copy of the weights that the next forward pass reads are one read and one write of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3):
    raise ImportError("kernels that take tuples need Triton 3.3")

BLOCK = 2048
AT_ONCE = 32  # parameters that one kernel takes


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    gradients,
    firsts,
    starts,
    sizes,
    weights_at,
    velocity_at,
    rounded_at,
    received_at,
    rate_at,
    momentum,
    decay,
    mu,
    HAS_MOMENTUM: tl.constexpr,
    HAS_ROUNDED: tl.constexpr,
    IS_PROXIMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for parameter in tl.static_range(len(gradients)):
        begin = (tl.program_id(0) - firsts[parameter]) * BLOCK
        if (begin >= 0) & (begin < sizes[parameter]):
            inside = begin + tl.arange(0, BLOCK)
            mask = inside < sizes[parameter]
            places = starts[parameter] + inside
            weights = tl.load(weights_at + places, mask=mask)
            gradient = tl.load(gradients[parameter] + inside, mask=mask).to(tl.float32)
            if IS_PROXIMAL:
                gradient += mu * (weights - tl.load(received_at + places, mask=mask))
            gradient += decay * weights
            if HAS_MOMENTUM:
                gradient += momentum * tl.load(velocity_at + places, mask=mask)
                tl.store(velocity_at + places, gradient, mask=mask)
            weights -= tl.load(rate_at) * gradient
            tl.store(weights_at + places, weights, mask=mask)
            if HAS_ROUNDED:
                tl.store(rounded_at + places, weights.to(rounded_at.dtype.element_ty), mask=mask)


def fused_sgd(
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    weights: Tensor,
    velocity: Tensor,
    rounded: Tensor | None,
    received: Tensor,
    rate: Tensor,
    momentum: float,
    decay: float,
    mu: float,
) -> None:
    """One step, in place, on parameters in `weights`: that of gradient [size] is the stretch from its start on.

    v ← momentum · v + g + decay · w + mu · (w - received), then w ← w - rate · v; `rounded` becomes w in its own type.
    Buffers have one length, `rate` is [1].
    """
    for place in range(0, len(gradients), AT_ONCE):
        some = tuple(gradients[place : place + AT_ONCE])
        sizes = tuple(gradient.numel() for gradient in some)
        *firsts, programs = accumulate((triton.cdiv(size, BLOCK) for size in sizes), initial=0)
        _kernel[(programs,)](
            some,
            tuple(firsts),
            tuple(starts[place : place + AT_ONCE]),
            sizes,
            weights,
            velocity,
            weights if rounded is None else rounded,
            received,
            rate,
            momentum,
            decay,
            mu,
            HAS_MOMENTUM=momentum != 0,
            HAS_ROUNDED=rounded is not None,
            IS_PROXIMAL=mu != 0,
            BLOCK=BLOCK,
            num_warps=8,
        )
