"""Algorithm 1: federated learning with knowledgeable sampling and filtered averaging.

sample  →  train  →  score  →  keep  →  average  →  observe
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsieve.averaging import Coefficients, Scheme
from fedsieve.engines import Engine
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import ModelFilter, Selection
from fedsieve.sampling import Beliefs, ClientSampler, Feedback
from fedsieve.sieve import Population, Sieve
from fedsieve.stopwatch import Stopwatch


@dataclass(frozen=True)
class Round:
    """What happened in one round; `kept` and `coefficients.clients` are in the same order."""

    round: int
    sampled: list[int]
    kept: list[int]
    coefficients: Coefficients
    score: float | None
    search: dict[str, int | bool | float | None] | None
    train_loss: float
    excluded: dict[int, str]
    per_class: dict[int, list[float]] | None
    beliefs: Beliefs | None
    seconds: float


class Federation:
    """A model, the clients that train it, and the parts that choose among them.

    `clients` [n] are the ids of the clients that hold data and `weights` [n] their p_k. A round asks
    round(ratio · n) of them and fails, leaving everything as it was, when fewer than `min_updates` usable models
    come back. With `watch_models` a round says how each model does on each class even if no filter looks at that.
    """

    def __init__(
        self,
        *,
        clients: NDArray[np.int64],
        weights: NDArray[np.float64],
        ratio: float,
        sampler: ClientSampler,
        engine: Engine,
        filter: ModelFilter,
        averaging: Scheme,
        seed: int,
        min_updates: int = 1,
        watch_models: bool = False,
    ) -> None:
        order = np.argsort(clients)
        self.clients = clients[order]
        self.weights = weights[order] / weights.sum()
        self.per_round = max(1, math.floor(ratio * len(clients) + 0.5))
        self.sampler = sampler
        self.engine = engine
        self.sieve = Sieve(filter, averaging, engine, min_updates, watch_models)
        self.model = engine.initial_model()
        self.stopwatch = Stopwatch(self.model.device)
        sampler.begin(seed, self.clients, self.weights)

    def play(self, round: int) -> Round:
        """One round of Algorithm 1 (rounds count from 1); afterwards `model` is the new global model."""
        began = time.perf_counter()
        self.stopwatch.next_round()
        phase = self.stopwatch.phase
        with phase("sample"):
            sampled = [int(client) for client in self.sampler.sample(round, self.clients, self.per_round)]
        drawn = Counter(sampled)
        if strangers := set(drawn).difference(self.clients[np.isin(self.clients, sampled)].tolist()):
            raise InvalidSetting("sampled", min(strangers), f"ids of clients, from {type(self.sampler).__name__}")

        with phase("train"):
            updates = self.engine.train(self.model, sorted(drawn), round)
        population = Population(len(self.clients), self._weights)
        sifted = self.sieve.sift(round, self.model, updates, drawn, population, self.stopwatch)
        self.model = sifted.model

        with phase("sample"):
            durations = {update.client: update.seconds for update in updates if update.client in sifted.losses}
            self.sampler.observe(Feedback(round, sampled, sifted.kept, sifted.losses, durations))
        return Round(
            round=round,
            sampled=sampled,
            kept=sifted.kept,
            coefficients=sifted.coefficients,
            score=sifted.selection.score,
            search=_search_record(sifted.selection),
            train_loss=float(np.mean(list(sifted.losses.values()))),
            excluded=sifted.excluded,
            per_class=sifted.per_class,
            beliefs=self.sampler.beliefs(round),
            seconds=time.perf_counter() - began,
        )

    def _weights(self, clients: Sequence[int]) -> NDArray[np.float64]:
        weights: NDArray[np.float64] = self.weights[np.searchsorted(self.clients, clients)]
        return weights


def _search_record(selection: Selection) -> dict[str, int | bool | float | None] | None:
    """How a filter that searched found its subset, and what others score: all together, and the best single model."""
    if selection.looked_at is None:
        return None
    return {name: getattr(selection, name) for name in ("looked_at", "optimal", "bound", "all", "single")}
