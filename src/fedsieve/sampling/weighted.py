"""What samplers that know the client weights p_k share: the weights by id, and draws by weight without replacement."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.randomness import keys
from fedsieve.sampling.base import ClientSampler, Ids, highest
from fedsieve.sampling.ledger import Ledger

WITHOUT_WEIGHT = -1e4
"""Below the logarithm of any positive number."""


class WeightedSampler(ClientSampler):
    """A sampler that goes by the weights it was last told; who is not among them weighs as the others do on average.

    Without weights everybody weighs the same.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._weights = Ledger("weight")

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed and weights."""
        super().begin(seed, clients, weights)
        self.weigh(clients, weights)

    def weigh(self, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take these weights in place of earlier ones."""
        if not (np.isfinite(weights) & (weights >= 0)).all():
            bad = weights[~(np.isfinite(weights) & (weights >= 0))][0]
            raise InvalidSetting("weights", float(bad), "finite numbers that are not negative")
        order = np.argsort(clients, kind="stable")
        self._weights = Ledger("weight")
        self._weights.write(clients[order], weight=weights[order])

    def _weights_of(self, ids: Ids) -> NDArray[np.float64]:
        known = self._weights.columns["weight"]
        return self._weights.read("weight", ids, float(known.mean()) if known.size else 1.0)


def drawn_by_weight(
    seed: int, purpose: str, round: int, ids: Ids, weights: NDArray[np.float64], count: int
) -> NDArray[np.intp]:
    """Positions [count], ascending, drawn one after the other by `weights` [n] among those of `ids` [n] still left.

    The `count` first to arrive when client k arrives after an exponential time of rate w_k (Efraimidis & Spirakis
    2006), in logarithms. Who has no weight comes only after everybody who has.
    """
    rates = np.log(weights, out=np.full(ids.size, WITHOUT_WEIGHT), where=weights > 0)
    waits = np.maximum(-np.log1p(-keys(seed, purpose, round, ids)), np.finfo(np.float64).tiny)
    return highest(rates - np.log(waits), count)
