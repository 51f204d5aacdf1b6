"""Many runs: skip what is finished, go on with what was begun, several at once where a GPU has room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from fedsieve.engines.streams import RUNS_AT_ONCE, borrow, give_back
from fedsieve.errors import InvalidSetting, RunInUse, TooFewUpdates
from fedsieve.runs.assembly import find_device, find_ray
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory
from fedsieve.runs.experiment import History, check_same_run, load, run_in

log = logging.getLogger("fedsieve")


def run_many(
    runs: Mapping[Path, Config],
    callbacks: Sequence[Callback] = (),
    at_once: int | None = None,
    when_done: Callable[[Path, History], None] = lambda folder, history: None,
    watch: Callable[[Path, Mapping[str, Any]], None] = lambda folder, event: None,
    save_every: float = 0.0,
    begin: Callable[[Path, Config], bool] = lambda folder, config: True,
) -> dict[Path, History]:
    """Run every configuration in its folder; finished runs are read, unfinished ones go on.

    On a GPU, `at_once` runs (default: 2) share it and its copy of the data, so that it trains clients of one while
    another scores, searches and writes; on a CPU one run already keeps every core busy. A run that fails for too few
    usable models is left out with a warning, the others go on. All runs are on the device that the first one names.
    `begin` is called with each run before it begins, and may say that it is not wanted any more; `when_done` as it
    ends. Both perhaps in a thread. `save_every` is as in `run`. A run that another process is at is left to it: several
    that are given the same runs share them.

    With the engine `ray` the runs are spread over a cluster; on its GPUs, `at_once` share one. `watch` then hears of
    every round: an event has a `state` (running, done or failed), and of running ones `round`, `accuracy` and `node`.
    """
    if not runs:
        return {}
    check_at_once(at_once)
    if next(iter(runs.values())).engine == "ray":
        find_ray()
        from fedsieve.runs.cluster import run_on_cluster

        _check_begun(runs)
        return run_on_cluster(runs, callbacks, at_once, when_done, watch, save_every, begin)
    device = find_device(next(iter(runs.values())).device)
    if at_once is None:
        at_once = 2 if device.type == "cuda" else 1
    _check_begun(runs)
    stop = Stop()
    shared = [stop, *(OneAtATime(callback) for callback in callbacks)]

    def job(folder: Path, config: Config) -> History | None:
        directory = RunDirectory(folder)
        try:
            with directory.sole_writer(), _own_stream(device):
                if not begin(folder, config):
                    return None
                history = run_in(directory, config, {}, True, shared, save_every)
                when_done(folder, history)
                return history
        except RunInUse:
            log.info("%s: another process is at it", folder)
        except TooFewUpdates as error:
            log.warning("%s, seed %d: %s", config.algorithm, config.seed, error)
        except Stopped:
            pass
        return None

    if at_once == 1:
        done = [job(folder, config) for folder, config in runs.items()]
    else:
        with ThreadPoolExecutor(at_once) as threads:
            jobs = [threads.submit(job, folder, config) for folder, config in runs.items()]
            try:
                ended = wait(jobs, return_when=FIRST_EXCEPTION).done
                done = [future.result() for future in (jobs if len(ended) == len(jobs) else ended)]
            except BaseException:  # an error or Ctrl-C: the other runs end with the round they are in
                stop.asked = True
                threads.shutdown(cancel_futures=True)
                raise
    found = {}
    for folder, history in zip(runs, done, strict=True):
        if history is None and RunDirectory(folder).finished:  # by another process, meanwhile
            history = load(folder)
        if history is not None:
            found[folder] = history
    return found


def check_at_once(at_once: int | None) -> None:
    """Raise unless so many runs can share a GPU."""
    if at_once is not None and not 1 <= at_once <= RUNS_AT_ONCE:
        raise InvalidSetting("at_once", at_once, f"1 to {RUNS_AT_ONCE}")


def _check_begun(runs: Mapping[Path, Config]) -> None:
    """Raise if a folder holds another run than the one it is meant for."""
    for folder, config in runs.items():
        directory = RunDirectory(folder)
        if directory.exists:
            check_same_run(directory, config, resume=True)


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
