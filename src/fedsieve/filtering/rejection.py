"""Leave out the models without which the average does best on the validation set (Fang et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.byzantine import count_of, liars_among
from fedsieve.filtering.scores import accuracy, log_likelihood
from fedsieve.filtering.stack import Stack


class _Rejection(ModelFilter):
    """Leaves out, by each of the `scores`, the f = `byzantine` models without which the average scores highest.

    The paper's impact of a model is the loss (or error rate) of the average of all models minus that of all others.
    The first is the same for every model, so the second alone decides. Of equal impacts the higher client id is left
    out. Takes n averages and n passes over the validation set. The run's averaging scheme averages those kept.
    """

    needs_logits = False
    needs_models = True
    needs_validation = True
    scores: ClassVar[tuple[Callable[[Tensor, Tensor], Tensor], ...]]

    def __init__(self, byzantine: int) -> None:
        self.byzantine = count_of("byzantine", byzantine)
        self.least_models = len(self.scores) * self.byzantine + 1

    def select(self, candidates: Candidates) -> Selection:
        """All but those left out."""
        assert candidates.predict is not None
        models = len(candidates.weights)
        liars = liars_among(models, candidates, self.byzantine, len(self.scores), 1)
        everyone = set(range(models))
        if liars == 0:
            return Selection(tuple(everyone))
        without = np.empty((len(self.scores), models))
        for position, logits in enumerate(map(candidates.predict, averages_without_one(candidates))):
            without[:, position] = [float(score(logits, candidates.labels)) for score in self.scores]
        without = np.nan_to_num(without, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        rejected = np.argsort(without, axis=1, kind="stable")[:, models - liars :]
        return Selection(tuple(sorted(everyone.difference(rejected.flatten().tolist()))))


def averages_without_one(candidates: Candidates) -> Iterator[Tensor]:
    """The models [size] that the averaging scheme would make of all but the first, all but the second, and so on."""
    assert candidates.models is not None and candidates.previous is not None and candidates.coefficients is not None
    stack = Stack([*candidates.models, candidates.previous])
    models = len(stack) - 1
    shares = np.zeros((models, models + 1))
    for position in range(models):
        others = [other for other in range(models) if other != position]
        coefficients = candidates.coefficients(others)
        shares[position, others], shares[position, models] = coefficients.clients, coefficients.previous
    for few in np.array_split(shares, 4):  # which take up a quarter of the memory that the models do
        yield from stack.mixtures(few)


class LossRejection(_Rejection):
    """Leaves out the f = `byzantine` models whose removal lowers the validation loss most (the paper's LFR).

    Needs n ≥ f + 1 models. Takes n averages and n passes over the validation set; of equals the higher client id goes.
    """

    scores = (log_likelihood,)


class ErrorRejection(_Rejection):
    """Leaves out the f = `byzantine` models whose removal lowers the validation error rate most (the paper's ERR).

    Needs n ≥ f + 1 models. Takes n averages and n passes over the validation set; of equals the higher client id goes.
    """

    scores = (accuracy,)


class UnionRejection(_Rejection):
    """Leaves out what `LossRejection` or `ErrorRejection` leaves out: up to 2f models (the paper's Union).

    Needs n ≥ 2f + 1 models. Takes n averages and n passes over the validation set; of equals the higher client id goes.
    """

    scores = (log_likelihood, accuracy)
