"""Sampling with replacement with probability p_k: FedProx (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.randomness import generator
from fedsieve.sampling.base import ClientSampler, Ids, sorted_ids


class ProportionalSampler(ClientSampler):
    """Draws each of the `count` places independently, client k with probability p_k among those available.

    `weights` maps client ids to p_k (any scale); in a run, `begin` brings the run's own. A client drawn twice is
    returned twice: it trains once and counts twice in the mean.
    """

    notation = "p_k, with replacement"

    def __init__(self, weights: Mapping[int, float] | None = None, seed: int = 0) -> None:
        self.weights = weights
        self.seed = seed
        known = sorted(weights or {})
        self._set(
            np.array(known, dtype=np.int64),
            np.array([(weights or {})[client] for client in known], dtype=np.float64),
        )

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed and weights."""
        super().begin(seed, clients, weights)
        self.weigh(clients, weights)

    def weigh(self, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take these weights in place of earlier ones."""
        order = np.argsort(clients, kind="stable")
        self._set(clients[order], weights[order])

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` clients, sorted, some perhaps more than once."""
        ids = sorted_ids(clients, count, with_replacement=True)
        if count == 0:
            return ids[:0]
        cumulative = np.cumsum(self._weights_of(ids))
        if not cumulative[-1] > 0:
            raise InvalidSetting("weights", 0.0, "a positive weight for at least one available client")
        places = generator(self.seed, "proportional sampler", round).random(count) * cumulative[-1]
        drawn: Ids = ids[np.sort(np.searchsorted(cumulative, places, side="right"))]
        return drawn

    def _set(self, known: Ids, weights: NDArray[np.float64]) -> None:
        if weights.size and not (np.isfinite(weights).all() and (weights >= 0).all()):
            bad = weights[~(np.isfinite(weights) & (weights >= 0))][0]
            raise InvalidSetting("weights", float(bad), "finite numbers that are not negative")
        self._known, self._known_weights = known, weights

    def _weights_of(self, ids: Ids) -> NDArray[np.float64]:
        if np.array_equal(ids, self._known):
            return self._known_weights
        missing = ~np.isin(ids, self._known)
        if missing.any():
            raise InvalidSetting("clients", int(ids[missing][0]), "clients whose weight is known")
        at = np.searchsorted(self._known, ids)
        return self._known_weights[at]
