"""A round of four samplers among a million clients, against the plain way to write them.

    python benchmarks/samplers_vs_plain.py [--clients N] [--count N] [--json FILE]

The plain way is what one writes first: NumPy's `choice` for the samplers without memory, and for the bandits one
number per client, updated and drawn for all of them each round, as published bandit samplers do. What
every sampler costs is measured by `samplers.py`.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedsieve.runs.environment import environment
from fedsieve.sampling import (
    ClientSampler,
    Feedback,
    ProportionalSampler,
    ThompsonSampler,
    UCBSampler,
    UniformSampler,
)

ROUNDS = 30
Plain = Callable[[int], None]


def plain_uniform(clients: int, count: int) -> Plain:
    random = np.random.default_rng(0)

    def round(number: int) -> None:
        random.choice(clients, count, replace=False)

    return round


def plain_proportional(clients: int, count: int) -> Plain:
    random, weights = np.random.default_rng(0), np.full(clients, 1 / clients)

    def round(number: int) -> None:
        random.choice(clients, count, p=weights)

    return round


def plain_ucb(clients: int, count: int) -> Plain:
    random = np.random.default_rng(0)
    means, counts = random.integers(2, size=clients).astype(float), np.ones(clients)

    def round(number: int) -> None:
        index = means + np.sqrt(1.5 * np.log(number) / counts)
        asked = np.lexsort((random.random(clients), -index))[:count]
        rewards = np.arange(count) % 2
        means[asked] = (counts[asked] * means[asked] + rewards) / (counts[asked] + 1)
        counts[asked] += 1

    return round


def plain_thompson(clients: int, count: int) -> Plain:
    random = np.random.default_rng(0)
    alpha, beta = np.ones(clients), np.ones(clients)

    def round(number: int) -> None:
        asked = np.argsort(-random.beta(alpha, beta))[:count]
        rewards = np.arange(count) % 2
        alpha[asked] += rewards
        beta[asked] += 1 - rewards

    return round


def ours(sampler: ClientSampler, ids: NDArray[np.int64], count: int) -> Plain:
    sampler.begin(0, ids, np.full(ids.size, 1 / ids.size))

    def round(number: int) -> None:
        asked = sampler.sample(number, ids, count)
        sampler.observe(Feedback(number, asked, asked[::2]))

    return round


def milliseconds(round: Plain) -> float:
    """The median over all rounds after the first."""
    times = []
    for number in range(1, ROUNDS + 1):
        began = time.perf_counter()
        round(number)
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the results there too")
    arguments = parser.parse_args()
    ids = np.arange(arguments.clients)
    pairs: list[tuple[ClientSampler, Plain]] = [
        (UniformSampler(), plain_uniform(ids.size, arguments.count)),
        (ProportionalSampler(), plain_proportional(ids.size, arguments.count)),
        (UCBSampler(), plain_ucb(ids.size, arguments.count)),
        (ThompsonSampler(), plain_thompson(ids.size, arguments.count)),
    ]
    results = []
    print(f"{ids.size:,} clients, {arguments.count:,} a round: milliseconds a round, median of {ROUNDS - 1}")
    print(f"{'':22}{'ours':>8}{'plain':>8}{'ratio':>8}{'peak bytes a client':>22}")
    for sampler, plain in pairs:
        own, other = milliseconds(ours(sampler, ids, arguments.count)), milliseconds(plain)
        tracemalloc.start()
        sampler.sample(ROUNDS + 1, ids, arguments.count)
        peak = tracemalloc.get_traced_memory()[1] / ids.size
        tracemalloc.stop()
        name = type(sampler).__name__
        print(f"{name:22}{own:8.1f}{other:8.1f}{other / own:7.2f}×{peak:22.0f}")
        results.append(
            {"sampler": name, "ours_ms": round(own, 1), "plain_ms": round(other, 1), "peak_bytes": round(peak)}
        )
    if arguments.json:
        record = {"clients": ids.size, "count": arguments.count, "results": results, **environment(torch.device("cpu"))}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
