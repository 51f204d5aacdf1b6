"""A baseline for those who ask what filters are for: average everybody, then train on the validation data."""

from __future__ import annotations

from fedsieve.filtering.base import Candidates, Selection
from fedsieve.filtering.steps import Stepping


class FineTuning(Stepping):
    """Keeps all models, and from their average takes steps of SGD with momentum 0.9 on the validation set.

    It sees as many examples a round as averaging that learns its weights.
    """

    formula = "as FedPdp, then SGD on validation data"

    def __init__(self, steps: int = 40, batch: int = 200, rate: float = 0.01) -> None:
        super().__init__(steps, batch, rate)

    def select(self, candidates: Candidates) -> Selection:
        """All, and the model after the last step."""
        assert candidates.average is not None
        everyone = tuple(range(len(candidates.weights)))
        return Selection(everyone, model=self.train(candidates, candidates.average(everyone)))
