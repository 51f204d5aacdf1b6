"""Average, then train on the validation data: a baseline for those who ask what filters are for, and a filter's aid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from fedsieve.averaging import Coefficients, combine
from fedsieve.filtering.base import Candidates, KeepAll, ModelFilter, Selection
from fedsieve.filtering.steps import Stepping


class FineTuning(Stepping):
    """Averages as `filter` says, and from there takes steps of SGD with momentum 0.9 on the validation set.

    The steps get smaller as those of the clients do: `rate` times what their schedule has left. Without a `filter` all
    models are kept. It sees as many examples a round as averaging that learns its weights.
    """

    def __init__(
        self, filter: ModelFilter | None = None, steps: int = 40, batch: int = 200, rate: float = 0.01
    ) -> None:
        super().__init__(steps, batch, rate)
        self.filter = filter or KeepAll()
        self.formula = f"{self.filter.formula or 'as FedPdp'}, then SGD on validation data"
        self.chooses, self.needs_logits = self.filter.chooses, self.filter.needs_logits

    def select(self, candidates: Candidates) -> Selection:
        """Whom the filter keeps, and the model after the last step."""
        selection = self.filter.select(candidates)
        model = self.train(candidates, _average(candidates, selection), candidates.pace)
        return replace(selection, model=model)


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
