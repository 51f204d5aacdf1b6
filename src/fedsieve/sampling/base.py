"""Whom to ask: the contract of every client sampler (SampleClients and PriorKnowledge in Algorithm 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedsieve.errors import InvalidSetting

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Feedback:
    """What one round taught us.

    `sampled` are the clients asked, as drawn (a client drawn twice stands there twice); `kept` those whose models went
    into the average. A client that was asked and failed is in `sampled` but has no loss. Of a round that was lost
    `sampled` are those who failed. `durations` are simulated seconds, where there is a system model. The `models`
    are those [size] of the clients in `losses`, in their order, for a sampler that needs them; each is brought when it
    is asked for.
    """

    round: int
    sampled: Sequence[int] | Ids
    kept: Sequence[int] | Ids
    losses: Mapping[int, float] = field(default_factory=dict)
    durations: Mapping[int, float] = field(default_factory=dict)
    models: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Beliefs:
    """What a sampler thinks of `clients` [n]: how useful each is (`mean` [n]), and how far off that may be.

    `width` [n] is the half-width of an interval around the mean, in whatever sense the method has one.
    """

    clients: Ids
    mean: NDArray[np.float64]
    width: NDArray[np.float64]


class ClientSampler(ABC):
    """Chooses the clients of a round.

    The life of a sampler: `begin`, with the run's seed and the client weights p_k, which makes it forget an earlier
    run; then in every round `sample`, if anybody can be reached, and after the round `observe`. Where weights become
    known only as clients answer, `weigh` comes before `sample`. `state_dict` is saved after each round and given to
    `load_state_dict` of a new sampler when a run is resumed. A new method needs `sample` only; one that learns also has
    `observe` and the state.

    Client ids are any integers, and clients may come and go between rounds. A sampler must not depend on the order
    in which clients are listed: draw with `fedsieve.randomness.keys` or sort first.
    """

    notation: ClassVar[str] = ""
    """The scheme in the words of the paper's Table 1."""

    uses_prior_knowledge: ClassVar[bool] = False
    """Whether it learns from the rounds before."""

    needs_models: ClassVar[bool] = False
    """Whether it looks at models: `global_model` and `local_models` have to be set, and `Feedback` to have `models`."""

    needs_losses: bool = False
    """Whether it can't do without `local_losses`."""

    needs_times: ClassVar[bool] = False
    """Whether it can't do without `device_times`, or `durations` in what it observes."""

    seed: int = 0

    local_losses: Callable[[int, Ids, int | None], NDArray[np.float64]] | None = None
    """In a round, the current model's loss on the data of clients, or on so many examples of it: ids [k] -> [k].

    Whoever runs the federation sets it, where clients can be asked for that.
    """

    device_times: Callable[[Ids], tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]] | None = None
    """Seconds for download, training and upload of clients: ids [k] -> [k] each. Set where there is a system model."""

    global_model: Callable[[], Tensor] | None = None
    """The model [size] as it is now. Set where there is one."""

    local_models: Callable[[Ids], Iterator[Sequence[Tensor | None]]] | None = None
    """What clients make of the current model, outside any round: ids [k] -> models [size], some at a time, in order.

    None stands for a client that failed. Set where all clients can be asked for that.
    """

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed and the weights p_k (`weights` [n] of `clients` [n]), before the first round."""
        self.seed = seed

    def weigh(self, clients: Ids, weights: NDArray[np.float64]) -> None:  # noqa: B027 - not every sampler has weights
        """Take the weights p_k as they are known now (`weights` [n] of `clients` [n]) in place of earlier ones."""

    @abstractmethod
    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` of the `clients` [n] that are there in this round (counted from 1): ids [count]."""

    def observe(self, feedback: Feedback) -> None:  # noqa: B027 - not every sampler learns
        """Learn from a finished round."""

    def beliefs(self, round: int) -> Beliefs | None:
        """What it thinks of clients after `round`, for people to look at; None when it has no opinion."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything learnt, as plain data (numbers, strings, lists, dictionaries)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - not every sampler has a state
        """Go on from what `state_dict` gave."""


def sorted_ids(clients: ArrayLike, count: int, *, with_replacement: bool = False) -> Ids:
    """The available clients as sorted ids [n], after checking that `count` of them can be drawn."""
    ids = np.asarray(clients)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InvalidSetting("clients", clients, "a flat list of whole numbers")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
        raise InvalidSetting("clients", int(ids.max()), "ids that fit a signed 64-bit integer")
    ids = ids.astype(np.int64, copy=False)
    if (ids[1:] <= ids[:-1]).any():
        ids = np.sort(ids)
        same = ids[1:] == ids[:-1]
        if same.any():
            raise InvalidSetting("clients", int(ids[1:][same][0]), "each client id once")
    if count < 0 or (count > 0 and ids.size == 0) or (count > ids.size and not with_replacement):
        raise InvalidSetting("count", count, f"0 to {ids.size}, the number of clients available")
    return ids


def whom_to_ask(sampler: ClientSampler, round: int, clients: Ids, count: int) -> list[int]:
    """What the sampler, which may be a user's own, draws from `clients` [n]; checked to be their ids."""
    drawn, allowed = sampler.sample(round, clients, count), f"ids of clients, from {type(sampler).__name__}"
    try:
        ids = [index(client) for client in drawn]
    except TypeError:
        raise InvalidSetting("sampled", drawn, allowed) from None
    if strangers := set(ids).difference(clients[np.isin(clients, ids)].tolist()):
        raise InvalidSetting("sampled", min(strangers), allowed)
    return ids


def highest(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Positions, ascending, of the `count` highest of `values` [n]."""
    return np.sort(np.argpartition(-values, count - 1)[:count]) if count else np.empty(0, dtype=np.intp)
