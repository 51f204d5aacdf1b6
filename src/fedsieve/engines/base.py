"""Where clients run: the contract of every engine ("in parallel" in Algorithm 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedsieve.vector import Layout


@dataclass(frozen=True)
class Update:
    """What came back from one client: a model [size] and how it went, or the reason why there is none."""

    client: int
    model: Tensor | None
    loss: float = float("nan")
    seconds: float = 0.0
    error: str | None = None


class Engine(ABC):
    """Trains clients and evaluates models on one federation's data.

    Given (seed, round, client), every engine draws the same batches and augmentations and returns the same model up
    to rounding. A client that fails becomes an `Update` with an `error`; it never stops the others.
    """

    layout: Layout

    @abstractmethod
    def initial_model(self) -> Tensor:
        """The model [size] that a run starts from, drawn from the run's seed."""

    @abstractmethod
    def train(self, model: Tensor, clients: Sequence[int], round: int) -> Sequence[Update]:
        """Train each of the (different) clients, starting from `model` [size]; one update per client, in this order."""

    @abstractmethod
    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """The outputs [models, examples, classes] of flat models [size] on one of the server's data sets."""

    @abstractmethod
    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """The labels [examples] that belong to `logits`."""

    @abstractmethod
    def score_and_gradient(self, model: Tensor, examples: Tensor | None = None) -> tuple[float, Tensor]:
        """Mean log-likelihood of a flat model on the validation set (or `examples` of it), and its gradient [size]."""

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Let go of processes and memory."""
