"""One pass over a parameter for the whole of SGD's step, as a Triton kernel.

A step of SGD reads and writes every weight and its velocity once, whatever the size of the batch; at small batches
that traffic is much of a step. Here gradient, objective, decay, momentum, the step itself and the rounded copy of the
weights that the next forward pass reads are one read and one write of each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    gradient_at,
    weights_at,
    velocity_at,
    rounded_at,
    received_at,
    rate_at,
    size,
    momentum,
    decay,
    mu,
    HAS_MOMENTUM: tl.constexpr,
    HAS_ROUNDED: tl.constexpr,
    IS_PROXIMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    weights = tl.load(weights_at + places, mask=inside)
    gradient = tl.load(gradient_at + places, mask=inside).to(tl.float32)
    if IS_PROXIMAL:
        gradient += mu * (weights - tl.load(received_at + places, mask=inside))
    gradient += decay * weights
    if HAS_MOMENTUM:
        gradient += momentum * tl.load(velocity_at + places, mask=inside)
        tl.store(velocity_at + places, gradient, mask=inside)
    weights -= tl.load(rate_at) * gradient
    tl.store(weights_at + places, weights, mask=inside)
    if HAS_ROUNDED:
        tl.store(rounded_at + places, weights.to(rounded_at.dtype.element_ty), mask=inside)


def fused_sgd(
    gradient: Tensor,
    weights: Tensor,
    velocity: Tensor,
    rounded: Tensor | None,
    received: Tensor,
    rate: Tensor,
    momentum: float,
    decay: float,
    mu: float,
) -> None:
    """One step, in place, on one parameter's storage: all tensors [size], `rate` [1].

    v ← momentum · v + g + decay · w + mu · (w - received), then w ← w - rate · v; `rounded` becomes w in its own type.
    """
    size = weights.numel()
    _kernel[(triton.cdiv(size, BLOCK),)](
        gradient,
        weights,
        velocity,
        weights if rounded is None else rounded,
        received,
        rate,
        size,
        momentum,
        decay,
        mu,
        HAS_MOMENTUM=momentum != 0,
        HAS_ROUNDED=rounded is not None,
        IS_PROXIMAL=mu != 0,
        BLOCK=BLOCK,
        num_warps=8,
    )
