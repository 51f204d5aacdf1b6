"""What a Ray actor does: it trains clients with the engine that fits its resources, and keeps their models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve.averaging import add_up
from fedsieve.clients import LocalTraining
from fedsieve.data import Dataset, Partition
from fedsieve.engines.lanes import LanesEngine
from fedsieve.engines.precision import Precision
from fedsieve.engines.sequential import SequentialEngine
from fedsieve.engines.workers import WorkersEngine

OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Work:
    """All that a federation's clients need; put on the cluster once."""

    build: Callable[[], nn.Module]
    dataset: Dataset
    partition: Partition
    validation: NDArray[np.int64]
    settings: LocalTraining
    seed: int
    precision: Precision


@dataclass(frozen=True)
class Trained:
    """How it went with a client; its model stays where it was trained."""

    client: int
    loss: float
    error: str | None

    @property
    def out_of_memory(self) -> bool:
        """Whether it might go better elsewhere."""
        return self.error is not None and any(words in self.error for words in OUT_OF_MEMORY)


class RayWorker:
    """One process on the cluster: GPU lanes where it has a GPU, else `cores` workers on a CPU."""

    def __init__(self, work: Work, cores: int, on_gpu: bool) -> None:
        common = (work.build, work.dataset, work.partition, work.validation, work.settings, work.seed)
        self.engine: SequentialEngine = (
            LanesEngine(*common, "cuda", work.precision) if on_gpu else WorkersEngine(*common, cores, work.precision)
        )
        self.call = 0
        self.held: dict[int, Tensor] = {}
        self.received = torch.empty(0)

    def ready(self) -> bool:
        """Answers once the worker can be asked."""
        return True

    def train(self, model: NDArray[Any], clients: Sequence[int], round: int, call: int) -> tuple[list[Trained], float]:
        """Train clients from `model` [size] and keep what they return until the next `call`; in so many seconds."""
        began = time.perf_counter()
        if call != self.call:
            self.call = call
            self.held.clear()
            self.received = self._tensor(model)
        done = []
        for update in self.engine.train(self.received, clients, round):
            problem = update.problem(self.received)
            if problem is None:
                assert update.model is not None
                self.held[update.client] = update.model
            done.append(Trained(update.client, update.loss, problem))
        return done, time.perf_counter() - began

    def logits(self, clients: Sequence[int], data: Literal["validation", "test"]) -> NDArray[Any]:
        """The outputs [clients, examples, classes] of models that are kept here."""
        return _array(self.engine.logits([self.held[client] for client in clients], data))

    def weighted_sum(self, clients: Sequence[int], coefficients: Sequence[float]) -> NDArray[Any]:
        """The sum [size] of models that are kept here, each times its coefficient, in double precision."""
        total = torch.zeros_like(self.received, dtype=torch.float64)
        return _array(add_up(total, (self.held[client] for client in clients), coefficients))

    def model(self, client: int) -> NDArray[Any]:
        """A model [size] that is kept here."""
        return _array(self.held[client])

    def logits_of(
        self, model: NDArray[Any], data: Literal["validation", "test"], share: int, shares: int
    ) -> NDArray[Any]:
        """The outputs [examples, classes] of a model [size] on a share of a data set, which ends where a batch ends."""
        places, batch = self.engine.places(data), self.engine.evaluation_batch
        batches = -(-len(places) // batch)
        start, stop = (batch * (batches * number // shares) for number in (share, share + 1))
        if start == stop:  # more shares than batches
            return np.empty((0, self.engine.dataset.classes), dtype=np.float32)
        return _array(self.engine.logits_at([self._tensor(model)], data, places[start:stop])[0])

    def score_and_gradient(
        self, model: NDArray[Any], examples: NDArray[np.int64] | None, crops: NDArray[np.int64] | None
    ) -> tuple[float, NDArray[Any]]:
        """Mean log-likelihood of a model [size] on validation examples, and its gradient [size]."""
        chosen = None if examples is None else torch.from_numpy(examples.copy())
        moved = None if crops is None else crops.copy()
        score, gradient = self.engine.score_and_gradient(self._tensor(model), chosen, moved)
        return float(score), _array(gradient)

    def local_losses(
        self, model: NDArray[Any], clients: Sequence[int], round: int, examples: int | None
    ) -> NDArray[np.float64]:
        """The mean loss of a model [size] on each client's training data, or on some of it."""
        return self.engine.local_losses(self._tensor(model), clients, round, examples)

    def _tensor(self, model: NDArray[Any]) -> Tensor:
        return torch.from_numpy(model.copy()).to(self.engine.device)  # what Ray hands out can't be written to


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
