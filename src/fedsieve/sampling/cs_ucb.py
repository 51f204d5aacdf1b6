"""CS-UCB and CS-UCB-Q: bandits that learn how long clients take (Xia et al. 2020, arXiv 2007.02315).

The reward of a client that took τ seconds is 1 - τ / τ_max, 0 for one that was asked and did not answer. The queue of
CS-UCB-Q grows in every round, whether its client is there or not, and shrinks when the client is asked; a client not
there is never chosen, however long its queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.randomness import keys
from fedsieve.sampling.bandit import TIE_WIDTH
from fedsieve.sampling.base import Beliefs, ClientSampler, Feedback, Ids, highest, sorted_ids
from fedsieve.sampling.ledger import Ledger, of_clients


class CSUCBSampler(ClientSampler):
    """Index ȳ_k + √((m+1) ln t / z_k) when m clients are asked: mean reward, plus a bonus for being asked rarely.

    Clients never asked come first. `longest` is τ_max in seconds, by default the longest seen so far. Ties are broken
    at random. For data that is alike and balanced between clients; otherwise use `CSUCBQSampler`.
    """

    notation = "bandit (UCB) on durations, without replacement"
    uses_prior_knowledge = True
    needs_times = True

    def __init__(self, longest: float | None = None, seed: int = 0) -> None:
        if longest is not None and not longest > 0:
            raise InvalidSetting("longest", longest, "a number of seconds above 0")
        self.longest = longest
        self.seed = seed
        self._forget()

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed."""
        super().begin(seed, clients, weights)
        self._forget()

    def _forget(self) -> None:
        self._longest = float(self.longest or 0)
        self._places = 0
        self._asked = Ledger("seconds", "failures", "count")

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """The `count` available clients of highest index, sorted."""
        ids = sorted_ids(clients, count)
        index = self.index(round, ids, count) + TIE_WIDTH * keys(self.seed, "cs-ucb ties", round, ids)
        return ids[highest(index, count)]

    def index(self, round: int, clients: Ids, count: int) -> NDArray[np.float64]:
        """The index [n] of `clients` [n] in this round; above all others for those never asked."""
        times = self._asked.read("count", clients, 0.0)
        certain = self.mean_rewards(clients) + self.widths(round, times, count)
        return np.where(times > 0, certain, 2 + math.sqrt((count + 1) * math.log(round)))

    def widths(self, round: int, times: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """√((m+1) ln t / z_k) [n] of clients asked so many `times` [n]."""
        return np.sqrt((count + 1) * math.log(round) / np.maximum(times, 1))

    def mean_rewards(self, clients: Ids) -> NDArray[np.float64]:
        """ȳ_k [n] of `clients` [n]; 1 for those never asked."""
        lost = self._asked.read("failures", clients, 0.0)
        if self._longest > 0:
            lost += self._asked.read("seconds", clients, 0.0) / self._longest
        return 1 - lost / np.maximum(self._asked.read("count", clients, 0.0), 1)

    def observe(self, feedback: Feedback) -> None:
        """Learn how long those took who were asked, and who did not answer."""
        asked = np.unique(np.asarray(feedback.sampled, dtype=np.int64))
        timed, seconds = of_clients(feedback.durations)
        if self.longest is None and seconds.size:
            self._longest = max(self._longest, float(seconds.max()))
        there = np.isin(timed, asked)
        at = np.searchsorted(asked, timed[there])
        taken, failed = np.zeros(asked.size), np.ones(asked.size)
        taken[at], failed[at] = np.clip(seconds[there], 0.0, self._longest), 0.0
        now = {"seconds": taken, "failures": failed, "count": np.ones(asked.size)}
        self._asked.write(asked, **{name: self._asked.read(name, asked, 0.0) + more for name, more in now.items()})
        self._places = asked.size

    def beliefs(self, round: int) -> Beliefs:
        """Mean rewards of those who were asked, and what the index adds to them."""
        clients, times = self._asked.clients, self._asked.columns["count"]
        return Beliefs(clients, self.mean_rewards(clients), self.widths(round, times, self._places))

    def state_dict(self) -> dict[str, Any]:
        """Seconds of all answers, failures and counts of those who were asked, the longest time and the last m."""
        return {**self._asked.state_dict(), "longest": self._longest, "places": self._places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._asked.load_state_dict(state)
        self._longest = state["longest"]
        self._places = state["places"]


class CSUCBQSampler(CSUCBSampler):
    """Index (1 - β) ŷ_k + β D_k with ŷ_k = min(ȳ_k + √(2 ln t / z_k), 1) and the queue D_k ← max(D_k + c - b_k, 0).

    Every client is asked in a share c (`guaranteed_rate`) of rounds in the long run if that is possible, which takes
    c · (number of clients) ≤ (number asked). β (`fairness_weight`) trades that for speed: the higher, the sooner a
    client behind its rate is asked. b_k is 1 in a round in which client k is asked.
    """

    notation = "bandit (UCB) on durations with fairness queues, without replacement"

    def __init__(
        self, guaranteed_rate: float, fairness_weight: float = 0.5, longest: float | None = None, seed: int = 0
    ) -> None:
        super().__init__(longest, seed)
        if not 0 <= guaranteed_rate <= 1:
            raise InvalidSetting("guaranteed_rate", guaranteed_rate, "a number from 0 to 1")
        if not 0 <= fairness_weight <= 1:
            raise InvalidSetting("fairness_weight", fairness_weight, "a number from 0 to 1")
        self.guaranteed_rate = guaranteed_rate
        self.fairness_weight = fairness_weight

    def _forget(self) -> None:
        super()._forget()
        self._asked = Ledger("seconds", "failures", "count", "queue")
        self._rounds = 0

    def index(self, round: int, clients: Ids, count: int) -> NDArray[np.float64]:
        """The index [n] of `clients` [n] in this round."""
        times = self._asked.read("count", clients, 0.0)
        bound = self.mean_rewards(clients) + self.widths(round, times, count)
        truncated = np.where(times > 0, np.minimum(bound, 1.0), 1.0)
        return (1 - self.fairness_weight) * truncated + self.fairness_weight * self.queues(clients)

    def widths(self, round: int, times: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """√(2 ln t / z_k) [n] of clients asked so many `times` [n]."""
        return np.sqrt(2 * math.log(round) / np.maximum(times, 1))

    def queues(self, clients: Ids) -> NDArray[np.float64]:
        """D_k [n] of `clients` [n]; that of a client never asked has grown since the first round."""
        return self._asked.read("queue", clients, self._rounds * self.guaranteed_rate)

    def observe(self, feedback: Feedback) -> None:
        """Learn how long clients took; all queues grow, and those of the asked shrink."""
        asked = np.unique(np.asarray(feedback.sampled, dtype=np.int64))
        left = np.maximum(self.queues(asked) + self.guaranteed_rate - 1, 0.0)
        super().observe(feedback)
        self._asked.columns["queue"] += self.guaranteed_rate
        self._asked.write(asked, queue=left)
        self._rounds += 1

    def state_dict(self) -> dict[str, Any]:
        """As for CS-UCB, with queues and the number of rounds."""
        return {**super().state_dict(), "rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        super().load_state_dict(state)
        self._rounds = state["rounds"]
