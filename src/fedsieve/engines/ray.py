"""The clients of a round on a Ray cluster.

Each of a few actors holds the local engine of its resources. Data goes to every node once, the model to every actor
once a round, and what clients return stays with the actor that trained them: only losses, validation logits and
weighted sums travel back. A client's computation is the same whoever does it, so when an actor is lost, others train
its clients again and nothing changes but the time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor, nn

from fedsieve.averaging import Coefficients, rounded, share_of
from fedsieve.clients import LocalTraining
from fedsieve.data import Dataset, Partition
from fedsieve.engines import ray_cluster
from fedsieve.engines.base import Engine, Models
from fedsieve.engines.precision import Precision
from fedsieve.engines.ray_cluster import connect, in_memory, nodes, reason
from fedsieve.engines.ray_worker import RayWorker, Trained, Work
from fedsieve.errors import ClusterLost, InvalidSetting
from fedsieve.randomness import torch_draws
from fedsieve.vector import Layout

LOST_TOGETHER, LOST_ALONE = 2, 2  # so often a client may go down with its actor among others, then by itself

log = logging.getLogger("fedsieve")


@dataclass(frozen=True)
class Place:
    """Where an actor goes: a node (or any), with so many cores or a GPU."""

    node: str | None
    number: int
    cores: int
    on_gpu: bool

    def start(self, work: ray.ObjectRef[Work]) -> Any:
        """The actor, which is there once it answers."""
        strategy: Any = "SPREAD" if self.node is None else NodeAffinitySchedulingStrategy(self.node, soft=False)
        resources = {"num_gpus": 1, "num_cpus": 1} if self.on_gpu else {"num_cpus": self.cores, "num_gpus": 0}
        kind = ray.remote(RayWorker).options(scheduling_strategy=strategy, max_restarts=0, **resources)
        return kind.remote(work, self.cores, self.on_gpu)


@dataclass(eq=False)
class Actor:
    """A RayWorker on the cluster, and how many seconds a step takes there."""

    place: Place
    handle: Any
    answer: ray.ObjectRef[bool]
    ready: bool = False
    pace: float | None = None


@dataclass(frozen=True)
class Elsewhere:
    """An update whose model lies with the actor that trained it, and is fetched when it is asked for."""

    client: int
    loss: float
    error: str | None
    fetch: Callable[[int], Tensor] = field(repr=False)

    @property
    def model(self) -> Tensor | None:
        """The model [size]."""
        return None if self.error is not None else self.fetch(self.client)

    def problem(self, like: Tensor) -> str | None:
        """Why the model can't be averaged: the actor has looked."""
        return self.error


class RayEngine(Engine):
    """Trains and evaluates on a Ray cluster.

    Without `actors` there is one per GPU, or, where there are no GPUs or `device` is cpu, one per node with all its
    cores; nodes that join later get theirs. With `actors`, so many share what is there.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        partition: Partition,
        validation: NDArray[np.int64],
        settings: LocalTraining,
        seed: int,
        device: str = "auto",
        precision: Precision = "fp32",
        actors: int | None = None,
        address: str | None = None,
    ) -> None:
        connect(address)
        self.dataset, self.partition, self.validation, self.settings = dataset, partition, validation, settings
        self.augments = settings.augment
        self.device, self.precision, self.wanted = device, precision, actors
        with torch_draws(seed, "initial model"):
            self.module = build()
        self.layout = Layout.of(self.module)
        self._initial = self.layout.read(self.module)
        self._work = ray.put(Work(build, in_memory(dataset), partition, validation, settings, seed, precision))
        there = nodes()
        if device.startswith("cuda") and not self._on_gpu(there):
            raise InvalidSetting("device", device, "auto or cpu: the cluster has no GPU")
        if precision == "tf32" and not self._on_gpu(there):
            raise InvalidSetting("precision", precision, "fp32 or bf16 where no GPU of the cluster is used")
        self._cores = self._cores_each(there) if actors else 0
        self._actors: list[Actor] = []
        self._call = 0
        self._round = 0
        self._model: ray.ObjectRef[NDArray[Any]] | None = None
        self._holder: dict[int, Actor] = {}
        self._start_missing()

    def initial_model(self) -> Tensor:
        """The freshly built module's state."""
        return self._initial

    def train(self, model: Tensor, clients: Sequence[int], round: int) -> list[Elsewhere]:
        """All clients, spread over the actors so that these end at about the same time."""
        self._start_missing()
        self._call, self._round = self._call + 1, round
        self._model = ray.put(model.numpy())
        self._holder = {}
        trained = self._train(clients)
        return [
            Elsewhere(client, done.loss, done.error, self._fetch)
            for client, done in ((client, trained[client]) for client in clients)
        ]

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """Of clients' models where they lie; of any other model, each actor takes a share of the data."""
        clients = _elsewhere(models)
        if not clients:
            return torch.stack([self._logits_of(model, data) for model in models])
        outputs: dict[int, NDArray[Any]] = {}
        for group, found in self._where_they_lie(clients, lambda actor, group: actor.logits.remote(group, data)):
            outputs.update(zip(group, found, strict=True))
        return torch.from_numpy(np.stack([outputs[client] for client in clients]))

    def combine(self, previous: Tensor, models: Sequence[Tensor], coefficients: Coefficients) -> Tensor:
        """Each actor adds up the models it has; their sums are added here."""
        clients = _elsewhere(models)
        if not clients:
            return super().combine(previous, models, coefficients)
        shares = dict(zip(clients, coefficients.clients.tolist(), strict=True))
        total = share_of(previous, coefficients.previous)
        for _, part in self._where_they_lie(
            clients, lambda actor, group: actor.weighted_sum.remote(group, [shares[client] for client in group])
        ):
            total += _tensor(part)
        return rounded(total, previous.dtype)

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """The labels of the test set or of the validation examples."""
        labels = self.dataset.test_labels if data == "test" else self.dataset.train_labels[self.validation]
        return torch.from_numpy(np.asarray(labels).astype(np.int64))

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One actor does it."""
        flat, chosen = ray.put(model.numpy()), None if examples is None else examples.numpy()
        [(score, gradient)] = self._by_anyone([lambda actor: actor.score_and_gradient.remote(flat, chosen, crops)])
        return torch.tensor(score), _tensor(gradient)

    def local_losses(
        self, model: Tensor, clients: Sequence[int], round: int, examples: int | None = None
    ) -> NDArray[np.float64]:
        """Each actor takes some of the clients."""
        flat, count = ray.put(model.numpy()), len(self._living())
        shares = [list(clients[first::count]) for first in range(min(count, len(clients)))]
        losses = np.empty(len(clients))
        found = self._by_anyone([partial(_ask_for_losses, flat, share, round, examples) for share in shares])
        for first, part in enumerate(found):
            losses[first::count] = part
        return losses

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor.handle)
        self._actors.clear()
        self._holder.clear()
        self._model = None

    def _logits_of(self, model: Tensor, data: Literal["validation", "test"]) -> Tensor:
        flat, shares = ray.put(model.numpy()), len(self._living())
        calls = [partial(_ask_for_logits, flat, data, share, shares) for share in range(shares)]
        return torch.from_numpy(np.concatenate(self._by_anyone(calls)))

    def _fetch(self, client: int) -> Tensor:
        [(_, model)] = self._where_they_lie([client], lambda actor, group: actor.model.remote(group[0]))
        return _tensor(model)

    def _train(self, clients: Sequence[int]) -> dict[int, Trained]:
        """How it went with each; from now on `_holder` says who has the model.

        Clients that went down with their actors more than once are sent one by one, so that the one to blame, if it is
        one of them, is found and the others are not blamed for it.
        """
        trained: dict[int, Trained] = {}
        lost: Counter[int] = Counter()
        no_room: set[tuple[int, Actor]] = set()
        while left := [client for client in clients if client not in trained]:
            shares = self._share_out([client for client in left if lost[client] < LOST_TOGETHER], no_room)
            if not shares:
                shares = self._one_each(left, no_room)
            calls = {
                actor: actor.handle.train.remote(self._model, share, self._round, self._call)
                for actor, share in shares.items()
            }
            for actor, (done, seconds) in self._collect(calls):
                steps = sum(map(self._steps, shares[actor]))
                actor.pace = seconds / steps if actor.pace is None else (actor.pace + seconds / steps) / 2
                for one in done:
                    if one.out_of_memory and lost[one.client] + 1 < LOST_TOGETHER + LOST_ALONE:
                        no_room.add((one.client, actor))  # elsewhere, or by itself, there may be enough
                    else:
                        trained[one.client] = one
                        self._holder[one.client] = actor
            for client in (client for share in shares.values() for client in share if client not in trained):
                lost[client] += 1
                if lost[client] == LOST_TOGETHER + LOST_ALONE:
                    trained[client] = Trained(client, float("nan"), f"lost its Ray actor {lost[client]} times")
        return trained

    def _share_out(self, clients: Sequence[int], no_room: Collection[tuple[int, Actor]]) -> dict[Actor, list[int]]:
        """The client with most to do first, each to the actor that would be done with it first."""
        living = self._living()
        known = [actor.pace for actor in living if actor.pace is not None]
        usual = sum(known) / len(known) if known else 1.0
        busy = dict.fromkeys(living, 0.0)
        shares: dict[Actor, list[int]] = defaultdict(list)
        for client in sorted(clients, key=lambda client: (-self._steps(client), client)):
            able = [actor for actor in living if (client, actor) not in no_room] or living
            done = {actor: busy[actor] + self._steps(client) * (actor.pace or usual) for actor in able}
            first = min(able, key=lambda actor: done[actor])
            busy[first] = done[first]
            shares[first].append(client)
        return dict(shares)

    def _one_each(self, clients: Sequence[int], no_room: Collection[tuple[int, Actor]]) -> dict[Actor, list[int]]:
        """At most one client for every actor."""
        shares: dict[Actor, list[int]] = {}
        for client in clients:
            free = [actor for actor in self._living() if actor not in shares]
            able = [actor for actor in free if (client, actor) not in no_room] or free
            if able:
                shares[able[0]] = [client]
        return shares

    def _steps(self, client: int) -> int:
        return max(1, self.settings.step_count(len(self.partition[client])))

    def _where_they_lie(
        self, clients: Sequence[int], ask: Callable[[Any, list[int]], Any]
    ) -> list[tuple[list[int], Any]]:
        """What actors say about the clients' models that they keep; what was lost is trained again first."""
        found: list[tuple[list[int], Any]] = []
        left = set(clients)
        while left:
            groups: dict[Actor, list[int]] = defaultdict(list)
            for client in sorted(left):
                groups[self._holder[client]].append(client)
            for actor, answer in self._collect({actor: ask(actor.handle, group) for actor, group in groups.items()}):
                found.append((groups[actor], answer))
                left.difference_update(groups[actor])
            for one in self._train(sorted(left)).values():
                if one.error is not None:
                    raise ClusterLost(f"client {one.client}, trained again after its model was lost: {one.error}")
        return found

    def _by_anyone(self, calls: Sequence[Callable[[Any], Any]]) -> list[Any]:
        """The answers to calls that every actor can take."""
        answers: dict[int, Any] = {}
        while left := [number for number in range(len(calls)) if number not in answers]:
            pairs = dict(zip(self._living(), left, strict=False))
            for actor, answer in self._collect({actor: calls[number](actor.handle) for actor, number in pairs.items()}):
                answers[pairs[actor]] = answer
        return [answers[number] for number in range(len(calls))]

    def _collect(self, calls: Mapping[Actor, Any]) -> list[tuple[Actor, Any]]:
        """The answers of all actors that give one, in the order of the calls; the others are lost."""
        answers = []
        for actor, call in calls.items():
            try:
                answers.append((actor, ray.get(call)))
            except RayTaskError:  # what an actor did failed, as it would have failed here
                raise
            except RayError as error:
                self._lose(actor, error)
        return answers

    def _lose(self, actor: Actor, error: RayError) -> None:
        if actor in self._actors:
            self._actors.remove(actor)
            ray.kill(actor.handle)
            log.warning("a Ray actor is lost (%s); others take its clients", reason(error))
        self._start_missing()

    def _living(self) -> list[Actor]:
        """The actors that can be asked; waits a while for one if there is none."""
        patience = time.monotonic() + ray_cluster.PATIENCE
        while True:
            waiting = [actor for actor in self._actors if not actor.ready]
            first = not any(actor.pace for actor in self._actors)
            ready = [actor for actor in self._actors if actor.ready]
            left = patience - time.monotonic()
            if waiting:
                # At first all are waited for, later only one if there is none.
                wait = 0.0 if ready and not first else max(0.0, min(left, 1.0))
                ray.wait([actor.answer for actor in waiting], num_returns=len(waiting), timeout=wait)
                for actor in waiting:
                    self._see_if_ready(actor)
                ready = [actor for actor in self._actors if actor.ready]
            if ready and (not first or len(ready) == len(self._actors) or left <= 0):
                return ready
            if left <= 0:
                raise ClusterLost(
                    f"no Ray actor could be had for {ray_cluster.PATIENCE:.0f} s: the cluster has no node left with "
                    "the cores or GPUs it needs; with more nodes, --resume goes on"
                )
            if not waiting:
                time.sleep(0.5)
            self._start_missing()

    def _see_if_ready(self, actor: Actor) -> None:
        if not ray.wait([actor.answer], timeout=0)[0]:
            return
        try:
            actor.ready = ray.get(actor.answer)
        except RayError as error:
            self._actors.remove(actor)
            if "creation task" in str(error):
                raise ClusterLost(f"a Ray actor can't start: {reason(error, -1)}") from None
            log.warning("a Ray actor is lost while it starts (%s); another takes its place", reason(error))

    def _start_missing(self) -> None:
        """An actor in every place that has none; those of lost nodes are dropped."""
        places = self._places()
        self._actors = [actor for actor in self._actors if actor.place in places]
        taken = {actor.place for actor in self._actors}
        for place in places:
            if place not in taken:
                handle = place.start(self._work)
                self._actors.append(Actor(place, handle, handle.ready.remote()))

    def _places(self) -> list[Place]:
        """Where actors belong, on the nodes that are there now."""
        there = nodes()
        on_gpu = self._on_gpu(there)
        if self.wanted is not None:
            return [Place(None, number, self._cores, on_gpu) for number in range(self.wanted)]
        if on_gpu:
            return [Place(node, number, 1, True) for node, has in there.items() for number in range(has["GPU"])]
        return [Place(node, 0, has["CPU"], False) for node, has in there.items() if has["CPU"]]

    def _on_gpu(self, there: Mapping[str, Mapping[str, int]]) -> bool:
        return self.device != "cpu" and any(has["GPU"] for has in there.values())

    def _cores_each(self, there: Mapping[str, Mapping[str, int]]) -> int:
        """Of so many actors as are wanted, each on one node."""
        assert self.wanted is not None
        kind = "GPU" if self._on_gpu(there) else "CPU"
        counts = [has[kind] for has in there.values()]
        if self.wanted > sum(counts):
            raise InvalidSetting("actors", self.wanted, f"1 to {sum(counts)}, the {kind}s of the cluster")
        each = 1 if kind == "GPU" else sum(counts) // self.wanted
        while sum(count // each for count in counts) < self.wanted:
            each -= 1
        return each


def _elsewhere(models: Sequence[Tensor]) -> list[int]:
    """Whose models these are, if they lie with actors."""
    updates = models.updates if isinstance(models, Models) else []
    return [update.client for update in updates if isinstance(update, Elsewhere)]


def _ask_for_logits(model: Any, data: str, share: int, shares: int, actor: Any) -> Any:
    return actor.logits_of.remote(model, data, share, shares)


def _ask_for_losses(model: Any, clients: list[int], round: int, examples: int | None, actor: Any) -> Any:
    return actor.local_losses.remote(model, clients, round, examples)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.copy())  # what Ray hands out can't be written to
