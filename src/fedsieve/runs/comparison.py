"""Algorithms × seeds: run the grid, sum it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve import algorithms as registry
from fedsieve.errors import InvalidSetting
from fedsieve.runs.assembly import check
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory
from fedsieve.runs.experiment import History, Simulated
from fedsieve.runs.many import check_at_once, run_many
from fedsieve.runs.participation import share_of

log = logging.getLogger("fedsieve")


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

    `rounds_to_target` is over the `reached` of `seeds` runs that came to the first algorithm's mean final accuracy, as
    are simulated `seconds_to_target` and `bytes_to_target` of those with a system. Where clients are hostile,
    `hostile_sampled` and `hostile_kept` are their share of the requests and of the models kept; `backdoor_success` is
    over the last ten rounds. `requests_gini` says how unevenly clients were asked (see `gini`). What the runs don't
    know is None.
    """

    algorithm: str
    seeds: int
    final: Spread
    best: Spread
    mean_last_10: Spread
    rounds_to_target: Spread | None
    reached: int
    seconds_to_target: Spread | None
    bytes_to_target: Spread | None
    requests_gini: Spread | None
    hostile_sampled: Spread | None
    hostile_kept: Spread | None
    backdoor_success: Spread | None


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
    """Run every algorithm with every seed under `out`, as `run_many` does, if none has a setting that it can't have."""
    runs = {Path(out) / one.algorithm / f"seed-{one.seed}": one for one in grid(config, algorithms, seeds)}
    check_at_once(at_once)
    if config.engine != "ray":  # whose nodes may have data that isn't here
        for folder, one in runs.items():
            if not RunDirectory(folder).finished:
                check(one)
    done = run_many(runs, callbacks, at_once, watch=watch)
    if left := len(runs) - len(done):
        log.warning("%d of %d runs are missing: they failed, or another process is at them", left, len(runs))
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
        reached = [(history, rounds) for history in runs if (rounds := rounds_to(target, history.accuracy)) is not None]
        attacked = [history for history in runs if "hostile" in history.summary]
        lines.append(
            Line(
                algorithm=name,
                seeds=len(runs),
                final=Spread.of([summary["final_accuracy"] for summary in summaries]),
                best=Spread.of([summary["best_accuracy"] for summary in summaries]),
                mean_last_10=Spread.of([summary["mean_last_10"] for summary in summaries]),
                rounds_to_target=_known([rounds for _, rounds in reached]),
                reached=len(reached),
                seconds_to_target=_known([_until(history, "seconds", rounds) for history, rounds in reached]),
                bytes_to_target=_known([_until(history, "bytes", rounds) for history, rounds in reached]),
                requests_gini=_known([summary.get("requests_gini") for summary in summaries]),
                hostile_sampled=_known([share_of(run.summary["hostile"], run.rows, "sampled") for run in attacked]),
                hostile_kept=_known([share_of(run.summary["hostile"], run.rows, "kept") for run in attacked]),
                backdoor_success=_known([_backdoor_success(history) for history in runs]),
            )
        )
    return lines


def rounds_to(target: float, accuracy: Sequence[float]) -> int | None:
    """The first round (from 1) whose accuracy is at least `target`, but for rounding: records have six digits."""
    return next((round for round, value in enumerate(accuracy, start=1) if value >= target - 1e-6), None)


def _until(history: History, what: Simulated, round: int) -> float | None:
    so_far = history.simulated(what)
    return None if so_far is None else so_far[round - 1]


def _backdoor_success(history: History) -> float | None:
    last = [row["backdoor_success"] for row in history.rows[-10:] if "backdoor_success" in row]
    return float(np.mean(last)) if last else None


def _known(values: Sequence[float | None]) -> Spread | None:
    """Over the values that are known, if any is."""
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None
