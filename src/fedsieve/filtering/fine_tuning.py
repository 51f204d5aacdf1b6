"""Average, then train on the validation data: a baseline for those who ask what filters are for, and a filter's aid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsieve.averaging import Coefficients, combine
from fedsieve.filtering.base import Candidates, KeepAll, ModelFilter, Selection
from fedsieve.filtering.steps import Stepping


class FineTuning(Stepping):
    """Averages as `filter` says, and from there takes steps of SGD with momentum 0.9 on the validation set.

    The steps get smaller as those of the clients do: `rate` times what their schedule has left. Without a `filter` all
    models are kept. It sees as many examples a round as averaging that learns its weights.
    With `augment` it crops and flips images; without a word it does so where clients do.
    """

    def __init__(
        self,
        filter: ModelFilter | None = None,
        steps: int = 40,
        batch: int = 200,
        rate: float = 0.01,
        augment: bool | None = None,
    ) -> None:
        super().__init__(steps, batch, rate)
        self.augment = augment
        self.filter = filter or KeepAll()
        self.formula = f"{self.filter.formula or 'as FedPdp'}, then SGD on validation data"
        self.chooses, self.needs_logits = self.filter.chooses, self.filter.needs_logits
        self.least_models, self.most_models = self.filter.least_models, self.filter.most_models

    def select(self, candidates: Candidates) -> Selection:
        """Whom the filter keeps, and the model after the last step."""
        selection = self.filter.select(candidates)
        augment = candidates.augments if self.augment is None else self.augment
        model = self.train(candidates, _average(candidates, selection), candidates.pace, augment)
        return replace(_with_weights(candidates, selection), model=model)


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
