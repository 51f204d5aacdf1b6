"""FedCM-TS: Algorithm 3 of the paper, combinatorial Thompson sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsieve.randomness import generator, keys
from fedsieve.sampling.bandit import BanditSampler
from fedsieve.sampling.base import Ids


class ThompsonSampler(BanditSampler):
    """Index θ̂_k ~ Beta(α_k, β_k), where α_k - 1 and β_k - 1 count how often client k was kept and left out.

    Starts at Beta(1, 1). The default choice: it explores in proportion to what is still uncertain and has nothing
    to tune.
    """

    notation = "bandit (Thompson), without replacement"
    columns = ("alpha", "beta")

    def start(self, clients: Ids) -> dict[str, NDArray[np.float64]]:
        """Beta(1, 1)."""
        return {"alpha": np.ones(clients.size), "beta": np.ones(clients.size)}

    def untried_index(self, round: int, clients: Ids) -> NDArray[np.float64]:
        """A draw of Beta(1, 1), which is uniform."""
        return keys(self.seed, "thompson untried", round, clients)

    def tried_index(self, round: int, clients: Ids, arms: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """θ̂_k ~ Beta(α_k, β_k) (Algorithm 3, line 3), drawn in the order of client ids."""
        return generator(self.seed, "thompson", round).beta(arms["alpha"], arms["beta"])

    def reward(self, arms: dict[str, NDArray[np.float64]], rewards: NDArray[np.float64]) -> None:
        """(α_k, β_k) ← (α_k + r_k, β_k + 1 - r_k) (Algorithm 3, line 2)."""
        arms["alpha"] = arms["alpha"] + rewards
        arms["beta"] = arms["beta"] + 1 - rewards

    def fade(self, clients: Ids, arms: dict[str, NDArray[np.float64]], discount: float) -> None:
        """α_k - 1 and β_k - 1 shrink."""
        for name in self.columns:
            arms[name] = 1 + discount * (arms[name] - 1)

    def forget(self, arms: dict[str, NDArray[np.float64]], rewards: NDArray[np.float64]) -> None:
        """(α_k, β_k) ← (α_k - r_k, β_k - 1 + r_k)."""
        arms["alpha"] = arms["alpha"] - rewards
        arms["beta"] = arms["beta"] - 1 + rewards

    def mean_and_width(
        self, round: int, arms: dict[str, NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of Beta(α_k, β_k)."""
        total = arms["alpha"] + arms["beta"]
        mean = arms["alpha"] / total
        return mean, np.sqrt(mean * (1 - mean) / (total + 1))
