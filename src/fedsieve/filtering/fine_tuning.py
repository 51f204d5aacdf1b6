"""A baseline for those who ask what filters are for: average everybody, then train on the validation data."""

from __future__ import annotations

import torch

from fedsieve.errors import InvalidSetting
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.byzantine import count_of

MOMENTUM = 0.9


class FineTuning(ModelFilter):
    """Keeps all models, and from their average takes steps of SGD with momentum 0.9 on the validation set."""

    formula = "as FedPdp, then SGD on validation data"
    needs_logits = False
    needs_models = True
    needs_validation = True

    def __init__(self, steps: int = 20, batch: int = 64, rate: float = 0.01) -> None:
        self.steps = count_of("steps", steps)
        self.batch = count_of("batch", batch, least=1)
        if not rate > 0:
            raise InvalidSetting("rate", rate, "a number above 0")
        self.rate = rate

    def select(self, candidates: Candidates) -> Selection:
        """All, and the model after the last step."""
        assert candidates.average is not None and candidates.score_and_gradient is not None
        assert candidates.random is not None
        everyone = tuple(range(len(candidates.weights)))
        model = candidates.average(everyone).clone()
        velocity = torch.zeros_like(model)
        examples = len(candidates.labels)
        for _ in range(self.steps):
            some = candidates.random.choice(examples, min(self.batch, examples), replace=False)
            _, gradient = candidates.score_and_gradient(model, torch.from_numpy(some))
            velocity.mul_(MOMENTUM).add_(gradient)
            model.add_(velocity, alpha=self.rate)  # up: it is the gradient of the log-likelihood
        return Selection(everyone, model=model)
