"""Algorithms × seeds: run the grid, sum it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve import algorithms as registry
from fedsieve.errors import InvalidSetting
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config
from fedsieve.runs.experiment import History
from fedsieve.runs.many import run_many


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with its standard deviation (0 for one seed)."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Over at least one value; the standard deviation is the sample's (n - 1)."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Line:
    """One algorithm's line of a comparison; accuracies in [0, 1].

    `rounds_to_target` is over the `reached` of `seeds` runs that came to the first algorithm's mean final accuracy.
    """

    algorithm: str
    seeds: int
    final: Spread
    best: Spread
    mean_last_10: Spread
    rounds_to_target: Spread | None
    reached: int


def grid(config: Config, algorithms: Sequence[str], seeds: int) -> list[Config]:
    """The configurations of a comparison, seeds counting up from the configuration's own."""
    if seeds < 1:
        raise InvalidSetting("seeds", seeds, "a whole number of at least 1")
    if not algorithms or len(set(algorithms)) < len(algorithms):
        raise InvalidSetting(
            "algorithms", ",".join(algorithms), "one or more different algorithms, with commas between"
        )
    for name in algorithms:
        registry.find(name)
    settings = config.model_dump()
    return [
        Config(**settings | {"algorithm": name, "seed": config.seed + seed})
        for name in algorithms
        for seed in range(seeds)
    ]


def compare(
    config: Config,
    algorithms: Sequence[str],
    seeds: int,
    out: Path | str,
    callbacks: Sequence[Callback] = (),
    at_once: int | None = None,
    watch: Callable[[Path, Mapping[str, Any]], None] = lambda folder, event: None,
) -> dict[str, list[History]]:
    """Run every algorithm with every seed under `out`, as `run_many` does."""
    runs = {Path(out) / one.algorithm / f"seed-{one.seed}": one for one in grid(config, algorithms, seeds)}
    done = run_many(runs, callbacks, at_once, watch=watch)
    histories: dict[str, list[History]] = {name: [] for name in algorithms}
    for history in done.values():
        histories[history.config.algorithm].append(history)
    return histories


def summarise(histories: Mapping[str, Sequence[History]]) -> list[Line]:
    """A line per algorithm that has a finished run."""
    done = {name: runs for name, runs in histories.items() if runs}
    if not done:
        return []
    target = Spread.of([history.accuracy[-1] for history in next(iter(done.values()))]).mean
    lines = []
    for name, runs in done.items():
        summaries: list[dict[str, Any]] = [history.summary for history in runs]
        reached = [rounds for history in runs if (rounds := rounds_to(target, history.accuracy)) is not None]
        lines.append(
            Line(
                algorithm=name,
                seeds=len(runs),
                final=Spread.of([summary["final_accuracy"] for summary in summaries]),
                best=Spread.of([summary["best_accuracy"] for summary in summaries]),
                mean_last_10=Spread.of([summary["mean_last_10"] for summary in summaries]),
                rounds_to_target=Spread.of(reached) if reached else None,
                reached=len(reached),
            )
        )
    return lines


def rounds_to(target: float, accuracy: Sequence[float]) -> int | None:
    """The first round (from 1) whose accuracy is at least `target`."""
    return next((round for round, value in enumerate(accuracy, start=1) if value >= target), None)
