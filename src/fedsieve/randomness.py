"""Randomness belongs to the run: every draw is a function of (seed, purpose, round, client), in any order.

Two forms. `generator` gives a NumPy generator for draws that belong to one client or one round. `keys` gives one
uniform number per client for a whole population at once: client 7's number in round 3 is the same whoever else is
there and in whatever order they are listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np
import torch
from numpy.typing import NDArray

_global_generators = RLock()


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A generator of its own for (seed, purpose, round, client)."""
    return np.random.Generator(np.random.PCG64(_digest(seed, purpose, round, client)))


def keys(seed: int, purpose: str, round: int, clients: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per client id (`clients` [n] -> [n]), independent between ids, purposes, rounds."""
    offset = np.uint64(_digest(seed, purpose, round, 0) & 0xFFFFFFFFFFFFFFFF)
    bits = clients.astype(np.uint64)
    _splitmix64(bits)
    bits ^= offset
    _splitmix64(bits)
    bits >>= np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


@contextmanager
def torch_draws(
    seed: int, purpose: str, round: int = 0, client: int = 0, device: torch.device | None = None
) -> Iterator[None]:
    """Inside, PyTorch's own draws (initialisation, dropout) depend on the arguments alone; outside, nothing changed.

    PyTorch's generators are global: threads that come here at the same time wait for each other.
    """
    source = torch.Generator()
    state = int(generator(seed, purpose, round, client).integers(2**63))
    source.manual_seed(state)
    gpu = device if device is not None and device.type == "cuda" else None
    with _global_generators, torch.random.fork_rng(devices=[] if gpu is None else [gpu]):
        torch.default_generator.set_state(source.get_state())
        if gpu is not None:
            torch.cuda.default_generators[gpu.index or 0].manual_seed(state)
        yield


def _digest(seed: int, purpose: str, round: int, client: int) -> int:
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def _splitmix64(value: NDArray[np.uint64]) -> None:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014), in place: a bijection that scatters neighbours."""
    value += np.uint64(0x9E3779B97F4A7C15)
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
