"""Momentum at the server: what earlier rounds changed goes on, for a while."""

from __future__ import annotations

from torch import Tensor


class ServerMomentum:
    """w_{t+1} = w_t + v_t with v_t = (a_t - w_t) + β v_{t-1}, a_t the round's average (FedAvgM, Hsu et al. 2019).

    Only the first `trained` numbers of a model move so; batch norm's running statistics, which come after, are those of
    the average: carried on, a variance could fall below 0. Without `beta` the average is the new model.
    """

    def __init__(self, beta: float, trained: int) -> None:
        self.beta, self.trained = beta, trained
        self.velocity: Tensor | None = None

    def step(self, previous: Tensor, average: Tensor) -> Tensor:
        """The model [size] that follows `previous` [size] after a round whose models average to `average` [size]."""
        if not self.beta:
            return average
        model = average.clone()
        if self.velocity is not None:
            model[: self.trained].add_(self.velocity, alpha=self.beta)
        self.velocity = model[: self.trained] - previous[: self.trained]
        return model
