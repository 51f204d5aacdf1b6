"""Algorithm 1: federated learning with knowledgeable sampling and filtered averaging.

sample  →  train  →  score  →  keep  →  average  →  observe
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.averaging import Coefficients, Scheme, combine
from fedsieve.engines import Engine, Update
from fedsieve.engines.base import Models, Trained
from fedsieve.errors import TooFewUpdates
from fedsieve.filtering import ModelFilter, Selection
from fedsieve.momentum import ServerMomentum
from fedsieve.sampling import Beliefs, ClientSampler, Feedback
from fedsieve.sampling.base import whom_to_ask
from fedsieve.sieve import Population, Sieve
from fedsieve.stopwatch import Stopwatch
from fedsieve.system import SystemModel
from fedsieve.threads import single_thread

AT_ONCE = 32  # clients that train before the first round, where a sampler wants all of them to


@dataclass(frozen=True)
class Round:
    """What happened in one round; `kept` and `coefficients.clients` are in the same order.

    Of a round that is lost the reason is known, and that the model stayed as it was.
    """

    round: int
    sampled: list[int]
    kept: list[int]
    coefficients: Coefficients
    score: float | None
    search: dict[str, int | bool | float | None] | None
    train_loss: float | None
    excluded: dict[int, str]
    per_class: dict[int, list[float]] | None
    beliefs: Beliefs | None
    simulated: dict[str, float] | None
    seconds: float
    lost: str | None = None


class RoundLost(TooFewUpdates):
    """A round brought too few usable models; `round` is what is to be said of it if the run goes on."""

    def __init__(self, problem: TooFewUpdates, round: Round) -> None:
        super().__init__(str(problem), problem.excluded)
        self.round = round


@dataclass(frozen=True)
class ServerClient:
    """The server's own data as one more client of the engine, whose `weight` is in units of all clients' data."""

    client: int
    weight: float


class Federation:
    """A model, the clients that train it, and the parts that choose among them.

    `clients` [n] are the ids of the clients that hold data and `weights` [n] their p_k. A round asks
    round(ratio · n) of them and is lost, leaving everything as it was, when fewer than `min_updates` usable models
    come back, or fewer than the filter needs. `pace(round)` is what the clients' schedule has left of their first
    learning rate. With `server_momentum` a part of what earlier rounds changed is repeated. With `watch_models` a round
    says how each model does on each class even if no filter looks at that.

    With a `system` only clients that can be reached are asked, some of them drop out, those that would take longer than
    `deadline` seconds are not waited for, and samplers hear of simulated seconds; without one, of none. `examples` [n]
    is how many examples each client trains on in a round. A `model` [size] takes the place of the engine's initial one.
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
        pace: Callable[[int], float] = lambda round: 1.0,
        server_momentum: float = 0.0,
        watch_models: bool = False,
        system: SystemModel | None = None,
        examples: NDArray[np.int64] | None = None,
        deadline: float | None = None,
        model: Tensor | None = None,
        server: ServerClient | None = None,
    ) -> None:
        order = np.argsort(clients)
        self.clients = clients[order]
        self.weights = weights[order] / weights.sum()
        self.per_round = max(1, math.floor(ratio * len(clients) + 0.5))
        self.system, self.deadline, self.server = system, deadline, server
        self.examples = np.zeros(len(clients), dtype=np.int64) if examples is None else examples[order]
        self.sampler = sampler
        self.engine = engine
        self.sieve = Sieve(filter, averaging, engine, min_updates, watch_models, seed, pace)
        self.model = engine.initial_model() if model is None else model
        self.momentum = ServerMomentum(server_momentum, engine.layout.parameters)
        self.stopwatch = Stopwatch(self.model.device)
        self._trained_before = self._evaluated = self.clients[:0]
        sampler.local_losses = self._local_losses
        sampler.global_model = lambda: self.model
        sampler.local_models = self.local_models
        if system is not None:
            sampler.device_times = lambda chosen: system.parts(chosen, self._examples_of(chosen), self._model_bytes)
        sampler.begin(seed, self.clients, self.weights)

    def play(self, round: int) -> Round:
        """One round of Algorithm 1 (rounds count from 1); afterwards `model` is the new global model.

        Raises `RoundLost` where too few models for one came back.
        """
        began = time.perf_counter()
        self.stopwatch.next_round()
        phase = self.stopwatch.phase
        with phase("sample"), single_thread():
            there = self.clients if self.system is None else self.system.available(round, self.clients)
            if not len(there):
                raise self._lost(round, [], TooFewUpdates(f"round {round}: no client can be reached"), {}, 0, began)
            count = min(self.per_round, len(there))
            sampled = whom_to_ask(self.sampler, round, there, count)
        drawn = Counter(sampled)

        asked = np.array(sorted(drawn), dtype=np.int64)
        seconds, failed = self._device_times(round, asked)
        with phase("train"):
            answering = [client for client in asked.tolist() if client not in failed]
            at_server = [] if self.server is None else [self.server.client]
            trained = self.engine.train(self.model, [*answering, *at_server], round)
            failures = (Update(client, None, error=reason) for client, reason in failed.items())
            updates = [*(update for update in trained if update.client not in at_server), *failures]
        population = Population(len(self.clients), self._weights)
        try:
            sifted = self.sieve.sift(round, self.model, updates, drawn, population, self.stopwatch)
        except TooFewUpdates as problem:
            raise self._lost(round, sampled, problem, seconds, len(answering), began) from None
        average = sifted.model
        for own in (update for update in trained if update.client in at_server):
            average = self._with_server(average, own, sifted.kept)
        self.model = self.momentum.step(self.model, average)

        with phase("sample"), single_thread():
            durations = {client: seconds[client] for client in sifted.losses if client in seconds}
            answers = {update.client: update for update in updates}
            models = Models([answers[client] for client in sifted.losses]) if self.sampler.needs_models else ()
            self.sampler.observe(Feedback(round, sampled, sifted.kept, sifted.losses, durations, models))
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
            simulated=self._simulated(seconds, len(answering)),
            seconds=time.perf_counter() - began,
        )

    def _lost(
        self,
        round: int,
        sampled: list[int],
        problem: TooFewUpdates,
        seconds: Mapping[int, float],
        answered: int,
        began: float,
    ) -> RoundLost:
        """Nobody is kept and the time is gone; the sampler learns who failed, or it would ask the same again."""
        failed = [client for client in sampled if client in problem.excluded]
        self.sampler.observe(Feedback(round, failed, kept=[]))
        return RoundLost(
            problem,
            Round(
                round=round,
                sampled=sampled,
                kept=[],
                coefficients=Coefficients(1.0, np.zeros(0)),
                score=None,
                search=None,
                train_loss=None,
                excluded=problem.excluded,
                per_class=None,
                beliefs=self.sampler.beliefs(round),
                simulated=self._simulated(seconds, answered),
                seconds=time.perf_counter() - began,
                lost=str(problem),
            ),
        )

    def _with_server(self, average: Tensor, own: Trained, kept: Sequence[int]) -> Tensor:
        """The `average` of the clients' models and the server's `own`, by how much data each stands for."""
        if self.server is None or own.model is None or own.problem(average) is not None:
            return average
        share = self.server.weight / (self.server.weight + float(self._weights(kept).sum()))
        return combine(average, [own.model], Coefficients(1 - share, np.array([share])))

    def _device_times(self, round: int, asked: NDArray[np.int64]) -> tuple[dict[int, float], dict[int, str]]:
        """How many seconds each device takes, and why some never send a model."""
        if self.system is None:
            return {}, {}
        taken = self.system.seconds(asked, self._examples_of(asked), self._model_bytes)
        seconds = dict(zip(asked.tolist(), taken.tolist(), strict=True))
        failed = dict.fromkeys(self.system.dropped(round, asked).tolist(), "dropped out")
        if self.deadline is not None:
            got = self._downloaded()
            for client, own in seconds.items():
                if (needed := own - got.get(client, 0.0)) > self.deadline and client not in failed:
                    failed[client] = f"too late: {needed:.1f} s of {self.deadline:g}"
        return seconds, failed

    def _downloaded(self) -> dict[int, float]:
        """How long those took to get the model who evaluated it before any was asked."""
        if self.system is None or not len(self._evaluated):
            return {}
        downloads = self.system.parts(self._evaluated, self._examples_of(self._evaluated), self._model_bytes)[0]
        return dict(zip(self._evaluated.tolist(), downloads.tolist(), strict=True))

    def _simulated(self, seconds: Mapping[int, float], answered: int) -> dict[str, float] | None:
        """What a round takes: the server waits for the slowest it asked, but not beyond the deadline.

        Where clients evaluated the model before any was asked, they had to get it first; evaluating takes little beside
        training, and is left out. Where all trained before the first round, that counts too, and nobody was too late.
        """
        if self.system is None:
            return None
        got, self._evaluated = self._downloaded(), self._evaluated[:0]
        longest = max((own - got.get(client, 0.0) for client, own in seconds.items()), default=0.0)
        waited = max(got.values(), default=0.0) + (longest if self.deadline is None else min(longest, self.deadline))
        sent = len(got.keys() | seconds.keys()) + answered
        if len(everyone := self._trained_before):
            waited += float(self.system.seconds(everyone, self._examples_of(everyone), self._model_bytes).max())
            sent += 2 * len(everyone)
            self._trained_before = everyone[:0]
        return {"seconds": waited, "bytes": self._model_bytes * sent}

    def _local_losses(self, round: int, clients: NDArray[np.int64], examples: int | None) -> NDArray[np.float64]:
        """Of the model that this round begins with."""
        self._evaluated = clients
        return self.engine.local_losses(self.model, clients.tolist(), round, examples)

    def local_models(self, clients: NDArray[np.int64]) -> Iterator[list[Tensor | None]]:
        """What `clients` [n] make of the model as it is, some at a time; draws are those of round 0."""
        for start in range(0, len(clients), AT_ONCE):
            some = clients[start : start + AT_ONCE].tolist()
            updates = {update.client: update for update in self.engine.train(self.model, some, 0)}
            yield [None if updates[client].problem(self.model) else updates[client].model for client in some]
        self._trained_before = clients

    def _examples_of(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        examples: NDArray[np.int64] = self.examples[np.searchsorted(self.clients, clients)]
        return examples

    @property
    def _model_bytes(self) -> int:
        return self.model.numel() * self.model.element_size()

    def _weights(self, clients: Sequence[int]) -> NDArray[np.float64]:
        weights: NDArray[np.float64] = self.weights[np.searchsorted(self.clients, clients)]
        return weights


def _search_record(selection: Selection) -> dict[str, int | bool | float | None] | None:
    """How a filter that searched found its subset, and what others score: all together, and the best single model."""
    if selection.looked_at is None:
        return None
    return {name: getattr(selection, name) for name in ("looked_at", "optimal", "bound", "all", "single")}
