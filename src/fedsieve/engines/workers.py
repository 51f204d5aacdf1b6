"""Every core of a CPU: one single-threaded worker per core."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedsieve.clients import LocalTraining
from fedsieve.data import Dataset, Partition
from fedsieve.engines.sequential import SequentialEngine


class WorkersEngine(SequentialEngine):
    """Trains several clients of a round at once, each on one core."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        partition: Partition,
        validation: NDArray[np.int64],
        settings: LocalTraining,
        seed: int,
        workers: int | None = None,
    ) -> None:
        super().__init__(build, dataset, partition, validation, settings, seed)
        self.workers = workers or os.cpu_count() or 1
