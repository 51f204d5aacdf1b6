"""What all the scripts share: their arguments, the clock, the memory and the line they print."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from workload import WORKLOADS, Workload

WARM_UP = 2
"""Rounds before those that are timed: processes start, code is compiled, memory is taken."""

WATCHED = 5
"""Rounds after those that are timed, in which memory is sampled: reading it costs time."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every script."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--workload", choices=WORKLOADS, required=True)
    arguments.add_argument(
        "--rounds", type=int, default=10, help=f"timed rounds, after {WARM_UP} to warm up and before {WATCHED} more"
    )
    return arguments


class Measurement:
    """The clock and the memory of a run of `total` rounds, after each of which `end` is called.

    Memory is that of the process `root` and all its descendants.
    """

    def __init__(self, timed: int, root: int | None = None) -> None:
        self.total = WARM_UP + timed + WATCHED
        self._timed = timed
        self._ends: list[float] = []
        self._memory = PeakMemory(root or os.getpid())

    def end(self) -> None:
        """A round has ended."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == WARM_UP + self._timed:
            self._memory.start()
        elif len(self._ends) == self.total:
            self._memory.stop()

    def results(self) -> dict[str, object]:
        """The wall time from the end of one round to the end of the next, and the memory."""
        timed = self._ends[WARM_UP - 1 : WARM_UP + self._timed]
        return {
            "seconds_per_round": [round(after - before, 5) for before, after in itertools.pairwise(timed)],
            "memory_mib": round(self._memory.shared_once),
            "memory_rss_mib": round(self._memory.shared_each),
        }


class PeakMemory:
    """Samples the memory of a process and all its descendants, in MiB, and keeps the most it has seen.

    `shared_once` is the sum of proportional set sizes (PSS): what n processes share counts 1/n for each, so once in
    all. `shared_each` is the sum of resident set sizes (RSS), where it counts for each of them.
    """

    interval = 0.1

    def __init__(self, root: int) -> None:
        self.shared_once = self.shared_each = 0.0
        self._root = root
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Sample from now on."""
        self._thread.start()

    def stop(self) -> None:
        """No longer."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            pss, rss = (
                sum(sizes) / 2**10 for sizes in zip(*map(_pss_and_rss_kib, _descendants(self._root)), strict=True)
            )
            self.shared_once, self.shared_each = max(self.shared_once, pss), max(self.shared_each, rss)
            if self._done.wait(self.interval):
                return


def _descendants(root: int) -> list[int]:
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has ended
                continue
            children[int(parent)].append(int(entry.name))
    found = [root]
    for process in found:
        found += children[process]
    return found


def _pss_and_rss_kib(process: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return sizes["Pss:"], sizes["Rss:"]


def report(
    peer: str,
    package: str,
    framework: str,
    workload: Workload,
    results: dict[str, object],
    losses: tuple[float, float],
    steps: float,
) -> None:
    """Print the measurement as one line of JSON.

    `results` are a `Measurement`'s; `losses` those of the first and the last model on the same training examples;
    `steps` is how many steps of SGD all clients of a round made together, which must be what the workload asks for.
    """
    if steps != workload.steps:
        sys.exit(f"{peer} made {steps:g} steps in a round of {workload.name}, not {workload.steps}")
    seconds = results["seconds_per_round"]
    assert isinstance(seconds, list)
    line = {
        "peer": peer,
        "version": version(package),
        "workload": workload.name,
        **results,
        "mean_seconds": round(statistics.mean(seconds), 5),
        "median_seconds": round(statistics.median(seconds), 5),
        "train_loss_first": round(losses[0], 4),
        "train_loss_last": round(losses[1], 4),
        "steps_per_round": steps,
        "framework": {framework: version(framework)},
    }
    print(json.dumps(line), flush=True)
