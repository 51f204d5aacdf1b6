"""Uniform sampling without replacement: FedAvg (McMahan et al. 2017), FedPdp (Li et al. 2019), FedCA."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedsieve.randomness import generator
from fedsieve.sampling.base import ClientSampler, Ids, sorted_ids


class UniformSampler(ClientSampler):
    """Every set of `count` clients is equally likely."""

    notation = "uniform, without replacement"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` different clients, sorted."""
        ids = sorted_ids(clients, count)
        places = generator(self.seed, "uniform sampler", round).choice(ids.size, count, replace=False, shuffle=False)
        return ids[np.sort(places)]
