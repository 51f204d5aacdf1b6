"""What both bandits share: one arm per client, rewarded when the client's model is kept (Algorithms 2 and 3).

Only arms that have been tried are stored. Where an untried arm starts is a function of (seed, client), so that a
million clients cost nothing until they are sampled, and a client that joins late starts as it would have at first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting, unknown_name
from fedsieve.randomness import keys
from fedsieve.sampling.base import Beliefs, ClientSampler, Feedback, Ids, highest, sorted_ids
from fedsieve.sampling.memory import EVERYTHING, Memory

Refresh = Literal["fresh", "stale"]
TIE_WIDTH = 1e-9
"""Indices closer than this count as equal: what rounding made of equal means must not decide who is asked."""


class BanditSampler(ClientSampler):
    """Asks the clients of highest index; a subclass says how an index is made and how a reward is learnt.

    `refresh="fresh"` computes the index of every arm in every round, as CUCB (Chen et al. 2013) and Thompson sampling
    do. `refresh="stale"` follows the paper's text: only arms asked in the round before get a new index.
    Ties are broken at random. A `memory` that fades follows clients that change; it needs the fresh reading, as an
    index kept from an earlier round would not fade.
    """

    uses_prior_knowledge = True
    columns: ClassVar[tuple[str, ...]]
    """What is remembered of an arm; a subclass's own names, each stored as one number per tried arm."""

    def __init__(self, refresh: Refresh = "fresh", seed: int = 0, memory: Memory = EVERYTHING) -> None:
        if refresh not in ("fresh", "stale"):
            raise unknown_name("refresh", refresh, ("fresh", "stale"))
        if refresh == "stale" and not memory.lasting:
            raise InvalidSetting("refresh", refresh, "'fresh' where memory fades")
        self.refresh = refresh
        self.seed = seed
        self.memory = memory
        self._forget_all()

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed."""
        super().begin(seed, clients, weights)
        self._forget_all()

    def _forget_all(self) -> None:
        self._tried: Ids = np.empty(0, dtype=np.int64)
        self._arms = {name: np.empty(0) for name in (*self.columns, "index")}
        self._to_refresh: Ids = np.empty(0, dtype=np.int64)
        self._window: list[tuple[Ids, Ids]] = []

    @abstractmethod
    def start(self, clients: Ids) -> dict[str, NDArray[np.float64]]:
        """The columns of arms never tried, for `clients` [n]."""

    @abstractmethod
    def untried_index(self, round: int, clients: Ids) -> NDArray[np.float64]:
        """The index [n] in this round of arms never tried; round 0 means the index they started with."""

    @abstractmethod
    def tried_index(self, round: int, clients: Ids, arms: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """The index [n] in this round of arms with the columns `arms`."""

    @abstractmethod
    def reward(self, arms: dict[str, NDArray[np.float64]], rewards: NDArray[np.float64]) -> None:
        """Learn `rewards` [n] (1 kept, 0 not) into the columns, in place."""

    def fade(self, clients: Ids, arms: dict[str, NDArray[np.float64]], discount: float) -> None:
        """Let every reward in the columns of `clients` [n] count `discount` times what it did, in place."""
        raise InvalidSetting("memory", self.memory, f"one without discount: {type(self).__name__} has no fade")

    def forget(self, arms: dict[str, NDArray[np.float64]], rewards: NDArray[np.float64]) -> None:
        """Take `rewards` [n] that were learnt out of the columns again, in place."""
        raise InvalidSetting("memory", self.memory, f"one without window: {type(self).__name__} has no forget")

    @abstractmethod
    def mean_and_width(
        self, round: int, arms: dict[str, NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How useful arms with the columns `arms` are thought to be after `round` [n], and the half-width of that."""

    def beliefs(self, round: int) -> Beliefs:
        """Of the arms that have been tried."""
        return Beliefs(
            self._tried, *self.mean_and_width(round, {name: self._arms[name].copy() for name in self.columns})
        )

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """The `count` available clients of highest index, sorted."""
        ids = sorted_ids(clients, count)
        tried = self._indices(round)
        index = self.untried_index(round if self.refresh == "fresh" else 0, ids)
        at = np.searchsorted(ids, self._tried)
        there = at < ids.size
        there[there] = ids[at[there]] == self._tried[there]
        index[at[there]] = tried[there]
        index += TIE_WIDTH * keys(self.seed, "bandit ties", round, ids)
        return ids[highest(index, count)]

    def observe(self, feedback: Feedback) -> None:
        """Reward the kept clients with 1, the others that were asked with 0."""
        self._arms["index"] = self._indices(feedback.round)
        asked = np.unique(np.asarray(feedback.sampled, dtype=np.int64))
        kept = np.unique(np.asarray(feedback.kept, dtype=np.int64))
        if self.memory.discount < 1:
            self.fade(self._tried, self._arms, self.memory.discount)
        self._remember(np.setdiff1d(asked, self._tried, assume_unique=True))
        self._change(self.reward, asked, kept)
        self._to_refresh = asked
        if self.memory.window is not None:
            self._window.append((asked, kept))
            if len(self._window) > self.memory.window:
                self._change(self.forget, *self._window.pop(0))

    def state_dict(self) -> dict[str, Any]:
        """The tried arms: client ids and one list per column; with a window also who was asked and kept in it."""
        state = {
            "clients": self._tried.tolist(),
            **{name: values.tolist() for name, values in self._arms.items()},
            "to_refresh": self._to_refresh.tolist(),
        }
        if self.memory.window is not None:
            state["window"] = [[asked.tolist(), kept.tolist()] for asked, kept in self._window]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._tried = np.array(state["clients"], dtype=np.int64)
        self._arms = {name: np.array(state[name], dtype=np.float64) for name in self._arms}
        self._to_refresh = np.array(state["to_refresh"], dtype=np.int64)
        if self.memory.window is not None:
            self._window = [
                (np.array(asked, dtype=np.int64), np.array(kept, dtype=np.int64)) for asked, kept in state["window"]
            ]

    def _change(
        self,
        how: Callable[[dict[str, NDArray[np.float64]], NDArray[np.float64]], None],
        asked: Ids,
        kept: Ids,
    ) -> None:
        """Reward `asked`, or forget their rewards: 1 for those among `kept`, 0 for the others."""
        at = np.searchsorted(self._tried, asked)
        arms = {name: self._arms[name][at] for name in self.columns}
        how(arms, np.isin(asked, kept).astype(np.float64))
        for name in self.columns:
            self._arms[name][at] = arms[name]

    def _indices(self, round: int) -> NDArray[np.float64]:
        """The index in this round of every tried arm; a function of the state, which it leaves alone."""
        if self.refresh == "fresh":
            return self.tried_index(round, self._tried, {name: self._arms[name] for name in self.columns})
        at = np.searchsorted(self._tried, self._to_refresh)
        index = self._arms["index"].copy()
        index[at] = self.tried_index(round, self._to_refresh, {name: self._arms[name][at] for name in self.columns})
        return index

    def _remember(self, new: Ids) -> None:
        if new.size == 0:
            return
        at = np.searchsorted(self._tried, new)
        starts = self.start(new) | {"index": self.untried_index(0, new)}
        self._tried = np.insert(self._tried, at, new)
        self._arms = {name: np.insert(values, at, starts[name]) for name, values in self._arms.items()}
