"""The two workloads that every simulator gets: who learns, from what and how. NumPy only.

All clients hold equally many examples of the same distribution: noise, with a weak pattern that belongs to the class.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
BATCH_SIZE = 10
LEARNING_RATE = 0.05
EVALUATED = 1000
"""The first so many training examples are those whose loss is reported."""

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True)
class Workload:
    """How many clients there are, how many are asked in a round, and what each of them holds."""

    name: str
    clients: int
    clients_per_round: int
    examples: int
    image: tuple[int, int, int]
    flat: bool
    signal: float

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example: (channels, height, width), or (features,) where images are flat."""
        return (int(np.prod(self.image)),) if self.flat else self.image

    @property
    def steps(self) -> int:
        """The steps that all clients of a round make together."""
        return self.clients_per_round * -(-self.examples // BATCH_SIZE)

    def data(self) -> Arrays:
        """Inputs [clients · examples, *input_shape] and labels [clients · examples]."""
        random = np.random.default_rng(0)
        count = self.clients * self.examples
        channels, height, width = self.image
        coarse = random.standard_normal((CLASSES, channels, height // 4, width // 4), dtype=np.float32)
        patterns = self.signal * coarse.repeat(4, axis=2).repeat(4, axis=3)
        labels = random.integers(CLASSES, size=count)
        inputs = random.standard_normal((count, *self.image), dtype=np.float32)
        for label in range(CLASSES):
            inputs[labels == label] += patterns[label]
        return inputs.reshape(count, *self.input_shape), labels

    def of_client(self, data: Arrays, client: int) -> Arrays:
        """The examples of one client, as views."""
        own = slice(client * self.examples, (client + 1) * self.examples)
        return data[0][own], data[1][own]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("cnn", 100, 10, 50, (3, 32, 32), flat=False, signal=0.2),
        Workload("mlp", 3000, 100, 20, (1, 28, 28), flat=True, signal=0.5),
    )
}


def save(data: Arrays, folder: Path) -> None:
    """Write the data for other processes to `load`."""
    np.save(folder / "inputs.npy", data[0])
    np.save(folder / "labels.npy", data[1])


@functools.cache
def load(folder: str) -> Arrays:
    """Data that was saved, mapped into memory so that processes share it."""
    # Mode "c" (private) only because PyTorch warns of arrays that cannot be written.
    return np.load(Path(folder, "inputs.npy"), mmap_mode="c"), np.load(Path(folder, "labels.npy"), mmap_mode="c")
