"""What each defence costs the server in a round: seconds, and peak memory beside the models that came back.

    python benchmarks/defences.py                       # writes docs/results/defences.json

100 models of the size of VGG11, a fifth of them hostile, go through the sieve as in any round: checked, filtered,
averaged. `all` is plain averaging. Forward passes are left out: what models predict is drawn, and so is the gradient
that FLTrust asks for. Flower's functions take NumPy arrays, and many times the time and memory; ours and theirs are
compared on the first weights of the same models.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.server.strategy import aggregate as flower
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.algorithms import Options
from fedsieve.averaging import fedpdp
from fedsieve.engines import Judge, Update
from fedsieve.parts import FILTERS
from fedsieve.runs.directory import write_whole
from fedsieve.runs.environment import environment
from fedsieve.sieve import Population, Sieve
from fedsieve.stopwatch import Stopwatch

HOSTILE = 0.2
EXAMPLES, CLASSES = 100, 10


class Drawn(Judge):
    """A server whose models predict at random, without looking."""

    def __init__(self, size: int) -> None:
        self.random = torch.Generator().manual_seed(1)
        self.gradient = torch.randn(size, generator=self.random)

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        return torch.randn(len(models), EXAMPLES, CLASSES, generator=self.random)

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        return torch.arange(EXAMPLES) % CLASSES

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), self.gradient


def draw(updates: int, weights: int) -> tuple[Tensor, list[Tensor]]:
    """A model, and what clients made of it: a fifth of them turned what they learned round, tenfold."""
    random = torch.Generator().manual_seed(0)
    previous, common = torch.randn(2, weights, generator=random) * torch.tensor([[0.05], [0.005]])
    models = []
    for place in range(updates):
        update = torch.randn(weights, generator=random).mul_(0.005).add_(common)
        models.append(update.mul_(-10 if place % 5 == 1 else 1).add_(previous))
    return previous, models


def sift(name: str, previous: Tensor, models: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A round with the filter of this name."""
    count = len(models)
    options = Options(per_round=count, byzantine=int(HOSTILE * count))
    sieve = Sieve(FILTERS[name].make(options), fedpdp, Drawn(len(previous)), 1)
    updates = [Update(client, model, 1.0) for client, model in enumerate(models)]
    population = Population(count, lambda ids: np.full(len(ids), 1 / count))

    def round() -> Tensor:
        stopwatch = Stopwatch(torch.device("cpu"))
        stopwatch.next_round()
        return sieve.sift(1, previous, updates, Counter(range(count)), population, stopwatch).model

    return round


def flowers(name: str, models: Sequence[Tensor]) -> Callable[[], object] | None:
    """The same by Flower, where it has it."""
    results = [([model.numpy()], 1) for model in models]
    hostile = int(HOSTILE * len(models))
    rules: dict[str, Callable[[], object]] = {
        "all": lambda: flower.aggregate(results),
        "krum": lambda: flower.aggregate_krum(results, hostile, 0),
        "multi-krum": lambda: flower.aggregate_krum(results, hostile, len(models) - hostile),
        "bulyan": lambda: flower.aggregate_bulyan(list(results), hostile, flower.aggregate_krum, to_keep=0),
        "median": lambda: flower.aggregate_median(results),
        "trimmed-mean": lambda: flower.aggregate_trimmed_avg(results, HOSTILE),
    }
    return rules.get(name)


def measure(round: Callable[[], object], times: int, stack: int) -> dict[str, Any]:
    """Seconds, and the most memory beyond what was in use before, in multiples of the models' `stack` bytes."""
    seconds, peaks = [], []
    for _ in range(times):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = kibibytes("VmRSS")
        began = time.perf_counter()
        round()
        seconds.append(time.perf_counter() - began)
        peaks.append(1024 * (kibibytes("VmHWM") - before) / stack)
    return {
        "seconds": float(f"{np.median(seconds):.3g}"),
        "from": float(f"{min(seconds):.3g}"),
        "to": float(f"{max(seconds):.3g}"),
        "peak_memory": float(f"{max(peaks):.3f}"),
    }


def kibibytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--weights", type=int, default=9_231_114)
    parser.add_argument("--times", type=int, default=5, help="how often; the median counts")
    parser.add_argument("--flower-weights", type=int, default=100_000, help="0 leaves Flower out")
    parser.add_argument("--only", nargs="*", help="names of filters (default: all but the combinatorial)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/defences.json"))
    given = parser.parse_args()
    load = os.getloadavg()[0]
    previous, models = draw(given.updates, given.weights)
    few = min(given.flower_weights, given.weights)
    part = [model[:few].clone() for model in models]
    results: dict[str, Any] = {}
    print(f"{given.updates} models of {given.weights:,} weights; median of {given.times} (lowest to highest)")
    for name in given.only or [name for name in FILTERS if name != "combinatorial"]:
        ours = measure(sift(name, previous, models), given.times, 4 * given.updates * given.weights)
        results[name] = ours
        line = f"{name:18}{ours['seconds']:7.2f} s ({ours['from']:.2f} to {ours['to']:.2f})"
        line += f", {ours['peak_memory']:.2f} x the models"
        theirs = flowers(name, part)
        if few and theirs is not None:
            small = measure(sift(name, previous[:few].clone(), part), given.times, 4 * given.updates * few)
            other = measure(theirs, 3, 4 * given.updates * few)
            ours["flower"] = {"weights": few, "ours": small, "flower": other}
            ratio = other["seconds"] / small["seconds"]
            line += f"; with {few:,} weights {small['seconds']:.3f} s, Flower {other['seconds']:.3f} s ({ratio:.1f} x)"
            line += f", {other['peak_memory']:.1f} x the models"
        print(line, flush=True)
    record = {
        "updates": given.updates, "weights": given.weights, "hostile": HOSTILE, "times": given.times,
        "load_before": round(load, 1), "results": results, **environment(torch.device("cpu")),
    }  # fmt: skip
    write_whole(given.out, (json.dumps(record, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
