"""A baseline for those who ask what filters are for: average everybody, then train on the validation data."""

from __future__ import annotations

import torch

from fedsieve.filtering.base import Candidates, Selection
from fedsieve.filtering.steps import Stepping

MOMENTUM = 0.9


class FineTuning(Stepping):
    """Keeps all models, and from their average takes steps of SGD with momentum 0.9 on the validation set.

    It sees as many examples a round as averaging that learns its weights.
    """

    formula = "as FedPdp, then SGD on validation data"

    def __init__(self, steps: int = 40, batch: int = 200, rate: float = 0.01) -> None:
        super().__init__(steps, batch, rate)

    def select(self, candidates: Candidates) -> Selection:
        """All, and the model after the last step."""
        assert candidates.average is not None and candidates.score_and_gradient is not None
        everyone = tuple(range(len(candidates.weights)))
        model = candidates.average(everyone).clone()
        velocity = torch.zeros_like(model)
        for _ in range(self.steps):
            _, gradient = candidates.score_and_gradient(model, self.draw(candidates))
            velocity.mul_(MOMENTUM).add_(gradient)
            model.add_(velocity, alpha=self.rate)  # up: it is the gradient of the log-likelihood
        return Selection(everyone, model=model)
