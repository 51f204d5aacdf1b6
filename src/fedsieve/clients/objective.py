"""What a client minimises: its loss F_k, and what it adds to keep near the model it was sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsieve.errors import InvalidSetting


@dataclass(frozen=True)
class Plain:
    """F_k(w) alone (Eq. 1)."""

    def add_gradient(self, gradient: Tensor, weights: Tensor, received: Tensor) -> None:
        """Nothing to add."""


@dataclass(frozen=True)
class Proximal:
    """F_k(w) + (μ/2)‖w - w^t‖², FedProx's objective (Li et al. 2020); the paper takes μ = 0.1."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise InvalidSetting("mu", self.mu, "a number that is not negative")

    def add_gradient(self, gradient: Tensor, weights: Tensor, received: Tensor) -> None:
        """`gradient` [parameters] += μ (`weights` - `received`), in place."""
        gradient.add_(weights, alpha=self.mu).add_(received, alpha=-self.mu)


Objective = Plain | Proximal
