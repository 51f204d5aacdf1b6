"""The model that is handed out, which need not be the one that clients go on from.

Where clients differ, what comes of a round is good at what the round's clients know, and accuracy swings from round to
round. An average of the last few models swings less and is better than most of them (Polyak & Juditsky 1992; over the
last part of a federation: Caldarola et al. 2022). It takes no validation data, and nothing of the clients.
"""

from __future__ import annotations

from torch import Tensor


class Smoothing:
    """w̄_t = s_t w̄_{t-1} + (1 - s_t) w_t, with s_t = min(s, (t - 1) / t): an average over some 1 / (1 - s) rounds.

    The first rounds count alike, and the initial model, which knows nothing, not at all. Without a `share` s it is the
    last round's model that is handed out.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.average: Tensor | None = None

    def hand_out(self, model: Tensor, round: int) -> Tensor:
        """What is handed out after a round (rounds count from 1) that ended with `model` [size]."""
        if self.share:
            share = min(self.share, (round - 1) / round)
            self.average = model.clone() if self.average is None else self.average.lerp(model, 1 - share)
        return self.latest(model)

    def latest(self, model: Tensor) -> Tensor:
        """The average as it is, or `model` [size] where there is none."""
        return model if self.average is None else self.average
