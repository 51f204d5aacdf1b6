"""Uniform sampling without replacement: FedAvg (McMahan et al. 2017), FedPdp (Li et al. 2019), FedCA."""

from __future__ import annotations

from numpy.typing import ArrayLike

from fedsieve.randomness import keys
from fedsieve.sampling.base import ClientSampler, Ids, highest, sorted_ids


class UniformSampler(ClientSampler):
    """Every set of `count` clients is equally likely: the `count` highest of one random key per client."""

    notation = "uniform, without replacement"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` different clients, sorted."""
        ids = sorted_ids(clients, count)
        return ids[highest(keys(self.seed, "uniform sampler", round, ids), count)]
