"""Algorithms × seeds: run the grid, skip what is finished, sum it up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from fedsieve import algorithms as registry
from fedsieve.engines.streams import RUNS_AT_ONCE, borrow, give_back
from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory
from fedsieve.runs.experiment import History, check_same_run, find_device, run

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
) -> dict[str, list[History]]:
    """Run every algorithm with every seed under `out`; finished runs are read, unfinished ones go on.

    On a GPU, `at_once` runs (default: 2) share it and its copy of the data, so that it trains clients of one while
    another scores, searches and writes; on a CPU one run already keeps every core busy. A run that fails for too few
    usable models is left out with a warning, the others go on.
    """
    configs = grid(config, algorithms, seeds)
    device = find_device(config.device)
    if at_once is None:
        at_once = 2 if device.type == "cuda" else 1
    if not 1 <= at_once <= RUNS_AT_ONCE:
        raise InvalidSetting("at_once", at_once, f"1 to {RUNS_AT_ONCE}")
    directories = [RunDirectory(Path(out) / run.algorithm / f"seed-{run.seed}") for run in configs]
    for one, directory in zip(configs, directories, strict=True):
        if directory.exists:
            check_same_run(directory, one, resume=True)
    stop = Stop()
    shared = [stop, *(OneAtATime(callback) for callback in callbacks)]

    def job(one: Config, directory: RunDirectory) -> History | None:
        try:
            with _own_stream(device):
                return run(one, out=directory.path, resume=True, callbacks=shared)
        except TooFewUpdates as error:
            log.warning("%s, seed %d: %s", one.algorithm, one.seed, error)
        except Stopped:
            pass
        return None

    if at_once == 1:
        done = list(map(job, configs, directories))
    else:
        with ThreadPoolExecutor(at_once) as threads:
            jobs = [threads.submit(job, one, directory) for one, directory in zip(configs, directories, strict=True)]
            try:
                ended = wait(jobs, return_when=FIRST_EXCEPTION).done
                done = [future.result() for future in (jobs if len(ended) == len(jobs) else ended)]
            except BaseException:  # an error or Ctrl-C: the other runs end with the round they are in
                stop.asked = True
                threads.shutdown(cancel_futures=True)
                raise
    histories: dict[str, list[History]] = {name: [] for name in algorithms}
    for one, history in zip(configs, done, strict=True):
        if history is not None:
            histories[one.algorithm].append(history)
    return histories


class Stopped(Exception):
    """A run was asked to end early."""


class Stop(Callback):
    """Ends runs after the round they are in, once `asked`."""

    asked = False

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round is done and written."""
        if self.asked:
            raise Stopped


class OneAtATime(Callback):
    """Passes on to `callback` what happens in runs of several threads, never two things at once."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.turn = Lock()

    def on_start(self, config: Config, done: int) -> None:
        """A run begins or goes on."""
        with self.turn:
            self.callback.on_start(config, done)

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round is done."""
        with self.turn:
            self.callback.on_round(row)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """A run is done."""
        with self.turn:
            self.callback.on_end(summary)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Inside, a thread's GPU work waits for nobody else's."""
    stream = borrow(device) if device.type == "cuda" else None
    if stream is None:
        yield
        return
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        give_back(device, stream)


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
