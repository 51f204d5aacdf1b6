"""Whom to believe: the contract of every model filter (ModelFilter in Algorithm 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedsieve.averaging import Coefficients


@dataclass(frozen=True)
class Candidates:
    """The models that came back, in ascending order of client id.

    `logits` [models, examples, classes] are their outputs on the validation set, `labels` [examples] the truth,
    `weights` [models] the client weights p_k, `counts` [models] how often each client was drawn (default: once);
    `nonsense` is how many clients sent something that is no model, and are not among them; `random` draws what belongs
    to the run and the round; `pace` is what the clients' schedule has left of their first learning rate.
    The rest is there for filters with `needs_models`: the flat models [models, size]; `average(kept)`, the flat model
    [size] that the run's averaging scheme would make of the models at the positions `kept`, and `coefficients(kept)`,
    those of the previous model and of the models kept that it would make it with; `predict(model)`, logits
    [examples, classes] of any flat model; `score_and_gradient(model, examples, crops)`, the mean log-likelihood [] of
    a flat model on the validation set (or on the examples at these positions, perhaps cropped and flipped) and its
    gradient [size], zero for buffers; `augments`, whether clients crop and flip what they train on;
    `previous` [size], the model w^t that the clients were sent; `trained`, how many numbers at a flat model's beginning
    were trained (default: all), the rest being buffers such as batch norm's.
    """

    logits: Tensor
    labels: Tensor
    weights: Tensor
    counts: Tensor | None = None
    models: Sequence[Tensor] | Tensor | None = None
    average: Callable[[Sequence[int]], Tensor] | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    score_and_gradient: Callable[..., tuple[Tensor, Tensor]] | None = None
    augments: bool = False
    previous: Tensor | None = None
    trained: int | None = None
    coefficients: Callable[[Sequence[int]], Coefficients] | None = None
    nonsense: int = 0
    random: np.random.Generator | None = None
    pace: float = 1.0


@dataclass(frozen=True)
class Selection:
    """What a filter decided: the positions of the `kept` candidates, ascending, and their `score` together.

    `weights` [models], when given, replaces the averaging scheme's coefficients (zero for models left out). `model` is
    the new model [size], where it is not just the weighted sum of those kept. A filter that searched says how:
    `looked_at` subsets were scored, `optimal` if none can score higher, and `bound`, a score that none can exceed; and
    beside it the score of `all` candidates together and of the best `single` one.
    """

    kept: tuple[int, ...]
    score: float | None = None
    weights: Tensor | None = None
    looked_at: int | None = None
    optimal: bool | None = None
    bound: float | None = None
    all: float | None = None
    single: float | None = None
    model: Tensor | None = None


class ModelFilter(ABC):
    """Decides which of a round's models go into the average.

    `needs_logits` and `needs_models` say which parts of the candidates it reads, so that a run computes no others.
    """

    formula: str = ""
    """How it averages, where it has weights of its own."""

    chooses: bool = True
    """Whether it may leave a model out."""

    needs_logits: bool = True
    needs_models: bool = False

    needs_validation: ClassVar[bool] = False
    """Whether it looks at validation data in another way than through logits."""

    least_models: int = 1
    """Fewer than so many models are never enough for it."""

    most_models: int | None = None
    """More than so many are too many for it."""

    @property
    def looks_at_validation(self) -> bool:
        """In whatever way."""
        return self.needs_logits or self.needs_validation

    @abstractmethod
    def select(self, candidates: Candidates) -> Selection:
        """Choose among the candidates; at least one is kept, unless the new model is given.

        Raises `TooFewUpdates` where it can't do with so few.
        """


class KeepAll(ModelFilter):
    """No filter: every model is believed."""

    chooses = False
    needs_logits = False

    def select(self, candidates: Candidates) -> Selection:
        """All of them."""
        return Selection(kept=tuple(range(len(candidates.weights))))
