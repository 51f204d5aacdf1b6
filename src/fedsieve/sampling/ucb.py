"""FedCM-UCB: Algorithm 2 of the paper, a combinatorial upper-confidence-bound bandit."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedsieve.randomness import keys
from fedsieve.sampling.bandit import BanditSampler
from fedsieve.sampling.base import Ids


class UCBSampler(BanditSampler):
    """Index μ̂_k + √(3 ln t / 2a_k): how often client k was kept when asked, plus a bonus for being asked rarely.

    Starts with a_k = 1 and μ̂_k drawn 0 or 1 (the paper's Appendix C). Use it when a run is long enough to try every
    client a few times; with very many clients Thompson sampling explores less rigidly. Where memory fades, t is the
    number of rounds that count: D-UCB with B = 1 and ξ = 3/8, or SW-UCB with B = 1 and ξ = 3/2, but for the start and
    for t, which counts plays there.
    """

    notation = "bandit (UCB), without replacement"
    columns = ("mean", "count")

    def start(self, clients: Ids) -> dict[str, NDArray[np.float64]]:
        """μ̂ from a fair coin, a = 1."""
        return {"mean": self._coins(clients), "count": np.ones(clients.size)}

    def untried_index(self, round: int, clients: Ids) -> NDArray[np.float64]:
        """μ̂ + √(3 ln t / 2); before the first round the bonus is √(3 ln 1 / 2) = 0."""
        return self._coins(clients) + math.sqrt(1.5 * math.log(self.memory.rounds(max(round, 1))))

    def tried_index(self, round: int, clients: Ids, arms: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """μ̄_k = μ̂_k + √(3 ln t / 2a_k) (Algorithm 2, line 3)."""
        bonus: NDArray[np.float64] = np.sqrt(1.5 * math.log(self.memory.rounds(round)) / arms["count"])
        return arms["mean"] + bonus

    def reward(self, arms: dict[str, NDArray[np.float64]], rewards: NDArray[np.float64]) -> None:
        """(μ̂_k, a_k) ← ((a_k μ̂_k + r_k) / (a_k + 1), a_k + 1) (Algorithm 2, line 2)."""
        arms["mean"] = (arms["count"] * arms["mean"] + rewards) / (arms["count"] + 1)
        arms["count"] = arms["count"] + 1

    def fade(self, clients: Ids, arms: dict[str, NDArray[np.float64]], discount: float) -> None:
        """a_k - 1 and the sum of rewards shrink; the coin stays."""
        coins = self._coins(clients)
        kept = discount * (arms["count"] * arms["mean"] - coins)
        arms["count"] = 1 + discount * (arms["count"] - 1)
        arms["mean"] = (coins + kept) / arms["count"]

    def forget(self, arms: dict[str, NDArray[np.float64]], rewards: NDArray[np.float64]) -> None:
        """a_k and the sum of rewards as if these had not been; the sum is whole, so that rounding never adds up."""
        kept = np.rint(arms["count"] * arms["mean"]) - rewards
        arms["count"] = arms["count"] - 1
        arms["mean"] = kept / arms["count"]

    def mean_and_width(
        self, round: int, arms: dict[str, NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """μ̂_k, and the bonus √(3 ln t / 2a_k)."""
        return arms["mean"], np.sqrt(1.5 * math.log(self.memory.rounds(round)) / arms["count"])

    def _coins(self, clients: Ids) -> NDArray[np.float64]:
        return (keys(self.seed, "ucb start", 0, clients) < 0.5).astype(np.float64)
