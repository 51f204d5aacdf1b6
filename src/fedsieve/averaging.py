"""How to combine: AverageModels. A scheme gives coefficients, one for the previous model and one per kept client.

Each scheme is a row of the paper's Table 1. Your own is any function of a `Kept` to `Coefficients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import InvalidSetting
from fedsieve.threads import in_threads

AT_ONCE = 8
"""Models that are added up together: the sum is read and written once for all of them."""

WORTH_THREADS = 16
"""Stretches of a model, a million weights, from which on threads are worth starting."""


@dataclass(frozen=True)
class Kept:
    """The clients whose models are averaged.

    `weights` [kept] are their p_k, which sum to 1 over all `population` = |S| clients; `counts` [kept] how often each
    was drawn (once, unless sampled with replacement); `losses` [kept] their mean training losses.
    """

    weights: NDArray[np.float64]
    population: int
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    losses: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", np.asarray(self.weights, dtype=np.float64))
        if len(self.counts) == 0:
            object.__setattr__(self, "counts", np.ones(len(self.weights), dtype=np.int64))
        if len(self.counts) != len(self.weights):
            raise InvalidSetting("counts", len(self.counts), f"one count per weight, {len(self.weights)}")


@dataclass(frozen=True)
class Coefficients:
    """w ← previous · w + Σ_k clients[k] · w_k, with `clients` [kept]."""

    previous: float
    clients: NDArray[np.float64]


Scheme = Callable[[Kept], Coefficients]


def fedavg(kept: Kept) -> Coefficients:
    """Σ_{k∉S^t} p_k w^t + Σ_{k∈S^t} p_k w_k: who was not asked counts as having kept the model (Eq. 3)."""
    return Coefficients(max(0.0, 1.0 - float(kept.weights.sum())), kept.weights)


def mean(kept: Kept) -> Coefficients:
    """(1/|S^t|) Σ_{k∈S^t} w_k, a client drawn twice counting twice (Table 1, FedProx)."""
    return Coefficients(0.0, kept.counts / kept.counts.sum())


def fedpdp(kept: Kept, normalise: bool = True) -> Coefficients:
    """Σ_{k∈S^t} p_k (|S|/|S^t|) w_k, divided by the sum of its coefficients (Table 1, FedPdp; Eq. 5 with a filter).

    The formula as printed sums to 1 only when all clients hold equally much; with `normalise=False` it is taken
    literally, and can blow a model up.
    """
    if not normalise:
        return Coefficients(0.0, kept.weights * kept.population / len(kept.weights))
    total = kept.weights.sum()
    if total == 0:
        return Coefficients(0.0, np.full(len(kept.weights), 1 / len(kept.weights)))
    return Coefficients(0.0, kept.weights / total)


def combine(previous: Tensor, models: Iterable[Tensor], coefficients: Coefficients) -> Tensor:
    """The one weighted sum: `previous` [size] and `models` [kept][size] to a new vector [size]."""
    total = share_of(previous, coefficients.previous)
    return rounded(add_up(total, models, coefficients.clients.tolist()), previous.dtype)


def share_of(model: Tensor, coefficient: float) -> Tensor:
    """A model [size] times a coefficient, in double precision; no share of a model has none of its NaNs."""
    return model.double() * coefficient if coefficient else torch.zeros_like(model, dtype=torch.float64)


def add_up(total: Tensor, models: Iterable[Tensor], coefficients: Iterable[float]) -> Tensor:
    """`total` [size], in double precision, plus each of `models` [size] times its coefficient; in place.

    A few models are held at once. Each number is added up in the models' order, in whatever thread.
    """
    pairs, stretches = zip(models, coefficients, strict=True), _stretches(total)
    each = in_threads if len(stretches) >= WORTH_THREADS else map
    while few := list(islice(pairs, AT_ONCE)):

        def add(here: slice, few: list[tuple[Tensor, float]] = few) -> None:
            for model, coefficient in few:
                total[here].add_(model[here], alpha=coefficient)

        for _ in each(add, stretches):
            pass
    return total


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum in double precision as `dtype`, the same in whatever order and parts it was added up.

    The order shows in the last few of 53 bits. Where a sum lies halfway between two numbers of single precision, as
    sums of weights that hardly changed often do, these would decide. So it is rounded to 37 bits first.
    """
    if dtype == torch.float64:
        return total
    result = torch.empty_like(total, dtype=dtype)
    for here in _stretches(total):
        bits = total[here].clone().view(torch.int64)
        bits.add_(1 << 15).bitwise_right_shift_(16).bitwise_left_shift_(16)
        result[here] = bits.view(torch.float64)
    return result


def _stretches(vector: Tensor) -> list[slice]:
    """A vector in stretches that stay in a CPU's cache while they are worked on; on a GPU it is one."""
    size = 2**16 if vector.device.type == "cpu" else max(1, len(vector))
    return [slice(start, start + size) for start in range(0, len(vector), size)]
