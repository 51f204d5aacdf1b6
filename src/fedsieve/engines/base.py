"""Where clients run: the contract of every engine ("in parallel" in Algorithm 1)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.averaging import Coefficients, combine
from fedsieve.errors import InvalidSetting
from fedsieve.vector import Layout


class Returned(Protocol):
    """What came back from one client. Its `model` [size] may be brought anew each time it is asked for."""

    @property
    def client(self) -> int: ...  # noqa: D102
    @property
    def model(self) -> Tensor | None: ...  # noqa: D102
    @property
    def loss(self) -> float: ...  # noqa: D102
    def problem(self, like: Tensor) -> str | None:
        """Why its model can't be averaged with others like `like` [size], if it can't."""


class Trained(Returned, Protocol):
    """What an engine returns of a client: an `Update`, or one whose model lies elsewhere."""

    @property
    def error(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True)
class Update:
    """What came back from one client: a model [size] and how it went, or the reason why there is none."""

    client: int
    model: Tensor | None
    loss: float = float("nan")
    error: str | None = None

    def problem(self, like: Tensor) -> str | None:
        """Why the model can't be averaged with others like `like` [size], if it can't."""
        return self.error if self.error is not None else problem_of(self.model, self.loss, like)


UNUSABLE = "unusable reply: "
"""How a problem begins where something came that can't be taken for a model."""


def is_nonsense(problem: str) -> bool:
    """Whether somebody sent what is no model, as against nothing: such a client lies, or is broken."""
    return problem.startswith(("model ", "validation logits ", UNUSABLE))


def problem_of(model: Tensor | None, loss: float, like: Tensor) -> str | None:
    """Why a model [size] can't be averaged with others like `like` [size], if it can't."""
    if model is None:
        return "returned no model"
    if model.shape != like.shape:
        return f"model of shape {tuple(model.shape)}, expected {tuple(like.shape)}"
    # A sum is quick, and is finite only if all numbers are; it may also be too large.
    if not math.isfinite(float(model.sum())) and not bool(model.isfinite().all()):
        return "model with NaN or infinity"
    return None if math.isfinite(loss) else f"training loss {loss}"


class Models(Sequence[Tensor]):
    """The flat models [size] of some `updates`, each asked for when it is needed and not held."""

    def __init__(self, updates: Sequence[Returned]) -> None:
        self.updates = updates

    def __len__(self) -> int:
        return len(self.updates)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> Models: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Models(self.updates[place])
        model = self.updates[place].model
        assert model is not None  # only usable updates come here
        return model

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(len(self)))


class Judge(ABC):
    """Who knows the server's validation data, and perhaps the `layout` of a flat model; every engine does."""

    layout: Layout | None = None

    augments: bool = False
    """Whether clients crop and flip the images that they train on."""

    @abstractmethod
    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """The outputs [models, examples, classes] of flat models [size] on one of the server's data sets."""

    @abstractmethod
    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """The labels [examples] that belong to `logits`."""

    @abstractmethod
    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean log-likelihood [] of a flat model on the validation set or `examples` of it, and its gradient [size].

        With `crops` [examples, 3], draws of `draw_crops_and_flips`, images are cropped and flipped so.
        """

    def combine(self, previous: Tensor, models: Sequence[Tensor], coefficients: Coefficients) -> Tensor:
        """The weighted sum [size] of the previous model and others."""
        return combine(previous, models, coefficients)


class Engine(Judge):
    """Trains clients and evaluates models on one federation's data.

    Given (seed, round, client), every engine draws the same batches and augmentations and returns the same model up
    to rounding. A client that fails becomes an `Update` with an `error`; it never stops the others.
    """

    layout: Layout

    @abstractmethod
    def initial_model(self) -> Tensor:
        """The model [size] that a run starts from, drawn from the run's seed."""

    @abstractmethod
    def train(self, model: Tensor, clients: Sequence[int], round: int) -> Sequence[Trained]:
        """Train each of the (different) clients, starting from `model` [size]; one update per client, in this order."""

    def local_losses(
        self, model: Tensor, clients: Sequence[int], round: int, examples: int | None = None
    ) -> NDArray[np.float64]:
        """The mean loss of `model` [size] on each client's training data, or on so many `examples` drawn from it."""
        raise InvalidSetting("engine", type(self).__name__, "one that evaluates models on clients' data")

    def close(self) -> None:
        """Let go of processes and memory."""
