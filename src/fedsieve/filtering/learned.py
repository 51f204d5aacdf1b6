"""Averaging that learns its weights: the mixture of models that, as one model, does best on the validation set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import TooFewUpdates
from fedsieve.filtering.base import Candidates, Selection
from fedsieve.filtering.byzantine import count_of
from fedsieve.filtering.geometric_median import shares_of
from fedsieve.filtering.stack import Stack, Vector
from fedsieve.filtering.steps import Stepping
from fedsieve.threads import single_thread

FASTER, SLOWER, TINY = 0.9, 0.999, 1e-8
"""Adam's β1, β2 and ε. It is five lines; to import PyTorch's takes three seconds."""

WILD = 1000
"""Who moved the model as many times as far as others did, by the median, is left out: no mixture could stand it."""

LOUDEST = 100
"""What steps of that size and number can still take back."""

STRETCH = 8192
"""Numbers of each model that one part of a GPU adds up."""


class LearnedAveraging(Stepping):
    """Minimises the validation cross-entropy L of the model Σ c_k w_k over weights c on the simplex.

    The gradient is cheap: ∂L/∂c_k = ⟨∂L/∂w, w_k⟩ takes one backward pass on a batch of the validation set and a product
    with each model. c = softmax(a) starts from the p_k, and `steps` steps of Adam of size `rate` move a. Who ends with
    less than half of an equal share is left out, and the others' weights are made to sum to 1.
    """

    formula = "Σ_{k∈S_opt} c_k w_k, c learned"

    def __init__(self, steps: int = 40, batch: int = 200, rate: float = 0.2) -> None:
        super().__init__(batch, rate)
        self.steps = count_of("steps", steps)

    def select(self, candidates: Candidates) -> Selection:
        """The models worth at least half of an equal share, with their weights."""
        assert candidates.models is not None and candidates.previous is not None
        rows, shares = list(candidates.models), np.zeros(len(candidates.models))
        near = not_wild(rows, candidates.previous, candidates.trained)
        weights = self._learn(candidates, rows, near)
        if not np.isfinite(weights).all():  # somebody's model has no finite likelihood, whatever its size
            near = near[[self._is_finite(candidates, rows[position]) for position in near]]
            weights = self._learn(candidates, rows, near)
        if not (len(near) and np.isfinite(weights).all()):
            raise TooFewUpdates(f"{len(shares)} usable models, no mixture of which has a finite likelihood")
        worth = weights >= 1 / (2 * len(weights))
        shares[near[worth]] = weights[worth] / weights[worth].sum()
        return Selection(tuple(near[worth].tolist()), weights=torch.from_numpy(shares))

    def _learn(self, candidates: Candidates, rows: Sequence[Tensor], near: NDArray[np.int64]) -> Vector:
        """The weights [near] after all steps of the models at these positions; nothing waits for a GPU before the last.

        Nobody starts with more than LOUDEST times the median share: sizes are what clients say they are, and a start
        from too far up is never made up for.
        """
        if not len(near):
            return np.zeros(0)
        models = [rows[position] for position in near]
        shares = shares_of(replace(candidates, weights=candidates.weights[near.tolist()]))
        start = torch.from_numpy(np.minimum(shares, LOUDEST * np.median(shares))).to(models[0].device)
        a = start.clamp(min=torch.finfo(torch.float64).tiny).log()
        mean, square = torch.zeros_like(a), torch.zeros_like(a)
        for step in range(1, self.steps + 1):
            weights = a.softmax(0)
            slope = weights_gradient(candidates, models, weights, self.draw(candidates))
            slope = weights * (slope - weights @ slope)  # by a
            mean = FASTER * mean + (1 - FASTER) * slope
            square = SLOWER * square + (1 - SLOWER) * slope**2
            corrected = (square / (1 - SLOWER**step)).sqrt() + TINY
            a -= self.rate * mean / (1 - FASTER**step) / corrected
        learned: Vector = a.softmax(0).cpu().numpy()
        return learned

    def _is_finite(self, candidates: Candidates, model: Tensor) -> bool:
        assert candidates.score_and_gradient is not None
        score, gradient = candidates.score_and_gradient(model)
        return bool(score.isfinite() and gradient.isfinite().all())


def not_wild(rows: Sequence[Tensor], previous: Tensor, trained: int | None) -> NDArray[np.int64]:
    """The positions of models that moved no more than WILD times as far from `previous` [size] as the median did.

    Those that stayed where they were are not in the median, which of two is the lower. What is trained and what is not
    are looked at apart.
    """
    split = len(previous) if trained is None else trained
    near = np.ones(len(rows), dtype=bool)
    for part in (slice(split), slice(split, None)):
        if previous[part].numel():
            norms, _ = Stack([row[part] for row in rows]).updates(previous[part])
            moved = np.sort(norms[norms > 0])
            if moved.size:
                near &= norms <= WILD * moved[(moved.size - 1) // 2]
    return np.flatnonzero(near)


def weights_gradient(
    candidates: Candidates, models: Sequence[Tensor], weights: Tensor, examples: Tensor | None = None
) -> Tensor:
    """∂L/∂c_k [models] at c = `weights` [models]; L on the whole validation set, or on `examples` of it."""
    assert candidates.score_and_gradient is not None
    _, gradient = candidates.score_and_gradient(mixture(models, weights), examples)
    return -products(models, gradient)


def products(models: Sequence[Tensor], direction: Tensor) -> Tensor:
    """⟨w_k, direction⟩ [models]."""
    if (matrix := one_matrix(models)) is not None:
        return matrix_products(matrix, direction)
    with single_thread():  # or their last bits would depend on the number of cores
        return torch.stack([torch.dot(direction, model) for model in models]).double()


def mixture(models: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Σ c_k w_k [size] in the models' own precision, several times as fast as the average that is kept."""
    if (matrix := one_matrix(models)) is not None:
        return weights.to(matrix) @ matrix
    total = torch.zeros_like(models[0])
    for model, weight in zip(models, weights.to(total.dtype), strict=True):
        total.addcmul_(model, weight)
    return total


def one_matrix(models: Sequence[Tensor]) -> Tensor | None:
    """Models on a GPU that lie one after the other in its memory, as they do after training: [models, size], no copy.

    There a look at all of them at once takes a third of what one look after the other does.
    """
    return laid_out(models) if models[0].is_cuda else None


def laid_out(models: Sequence[Tensor]) -> Tensor | None:
    """Models that are the rows of one tensor, in its order: [models, size], no copy."""
    first, storage = models[0], models[0].untyped_storage().data_ptr()
    apart = len(first) * first.element_size()
    rows = all(
        model.untyped_storage().data_ptr() == storage  # neighbours by chance are no rows
        and model.data_ptr() == first.data_ptr() + place * apart
        and model.is_contiguous()
        for place, model in enumerate(models)
    )
    return first.as_strided((len(models), len(first)), (len(first), 1)) if rows else None


def matrix_products(matrix: Tensor, direction: Tensor) -> Tensor:
    """The products [models] of a matrix's rows [models, size] with `direction` [size], by stretches of STRETCH numbers.

    In one piece a GPU would have no more to do at once than there are models.
    """
    models, size = matrix.shape
    whole = size // STRETCH
    stretches = matrix.as_strided((whole, models, STRETCH), (STRETCH, size, 1))
    found = torch.bmm(stretches, direction[: whole * STRETCH].view(whole, STRETCH, 1))
    rest = matrix[:, whole * STRETCH :] @ direction[whole * STRETCH :]
    return found.double().sum((0, 2)) + rest.double()
