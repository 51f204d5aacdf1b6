"""Average, then train on the validation data: a baseline for those who ask what filters are for, and a filter's aid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsieve.averaging import Coefficients, combine
from fedsieve.clients.schedule import cosine
from fedsieve.filtering.base import Candidates, KeepAll, ModelFilter, Selection
from fedsieve.filtering.byzantine import count_of
from fedsieve.filtering.steps import Stepping


class FineTuning(Stepping):
    """Averages as `filter` says, and from there takes steps of SGD with momentum 0.9 on the validation set.

    In a round it sees as many examples as `passes` over the validation set would, in `least` steps at least. They get
    smaller from `rate` to nothing, which settles the model, and from round to round as those of the clients do: `rate`
    is multiplied by what their schedule has left. Images are cropped and flipped if `augment` says so; by default,
    where clients do it. Without a `filter` all models are kept.
    """

    def __init__(
        self,
        filter: ModelFilter | None = None,
        passes: int = 5,
        batch: int = 200,
        rate: float = 0.1,
        augment: bool | None = None,
        least: int = 12,
    ) -> None:
        super().__init__(batch, rate)
        self.passes, self.least, self.augment = count_of("passes", passes), count_of("least", least), augment
        self.filter = filter or KeepAll()
        self.formula = f"{self.filter.formula or 'as FedPdp'}, then SGD on validation data"
        self.chooses, self.needs_logits = self.filter.chooses, self.filter.needs_logits
        self.least_models, self.most_models = self.filter.least_models, self.filter.most_models

    def select(self, candidates: Candidates) -> Selection:
        """Whom the filter keeps, and the model after the last step."""
        selection = self.filter.select(candidates)
        steps = self.step_count(len(candidates.labels))
        rates = [self.rate * candidates.pace * cosine(step, steps) for step in range(1, steps + 1)]
        augment = candidates.augments if self.augment is None else self.augment
        model = self.train(candidates, _average(candidates, selection), rates, augment)
        return replace(_with_weights(candidates, selection), model=model)

    def step_count(self, examples: int) -> int:
        """How many steps it takes in a round with so many validation examples."""
        return max(self.least, -(-self.passes * examples // min(self.batch, examples)))


def _with_weights(candidates: Candidates, selection: Selection) -> Selection:
    """The weights that the run's scheme gives to those kept, where the filter has none, so that they are on record."""
    given = selection.model is not None or selection.weights is not None
    if given or not selection.kept or candidates.coefficients is None:
        return selection
    coefficients = candidates.coefficients(selection.kept)
    if coefficients.previous:
        return selection
    weights = torch.zeros(len(candidates.weights), dtype=torch.float64)
    weights[list(selection.kept)] = torch.from_numpy(coefficients.clients)
    return replace(selection, weights=weights)


def _average(candidates: Candidates, selection: Selection) -> Tensor:
    """The model [size] that a selection stands for."""
    if selection.model is not None:
        return selection.model
    if selection.weights is None:
        assert candidates.average is not None
        return candidates.average(selection.kept)
    assert candidates.models is not None and candidates.previous is not None
    kept = list(selection.kept)
    shares = np.array([float(selection.weights[position]) for position in kept])
    return combine(candidates.previous, [candidates.models[position] for position in kept], Coefficients(0.0, shares))
