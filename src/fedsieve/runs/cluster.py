"""Many runs on a Ray cluster: each is one task, on a core or a share of a GPU."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedsieve import data
from fedsieve.data import Dataset
from fedsieve.engines import ray_cluster
from fedsieve.engines.ray_cluster import connect, in_memory, nodes, reason
from fedsieve.errors import ClusterLost, FedSieveError, TooFewUpdates
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory, write_whole
from fedsieve.runs.experiment import History, load, run

RETRIES = 100  # of a run whose worker or node was lost
RUNS_PER_GPU = 2

log = logging.getLogger("fedsieve")

Watch = Callable[[Path, Mapping[str, Any]], None]


def has_gpus(address: str | None) -> bool:
    """Whether the cluster at `address` has GPUs."""
    connect(address)
    return any(has["GPU"] for has in nodes().values())


def run_on_cluster(
    runs: Mapping[Path, Config],
    callbacks: Sequence[Callback],
    at_once: int | None,
    when_done: Callable[[Path, History], None],
    watch: Watch,
    save_every: float,
    begin: Callable[[Path, Config], bool],
) -> dict[Path, History]:
    """Every configuration in its folder, as `run_many` says; `watch` hears of every round, `callbacks` at a run's end.

    A run is written where it belongs if its node sees the driver's files, and goes on there when its worker is lost.
    Otherwise it is written on the node, and fetched when it has ended.
    """
    first = next(iter(runs.values()))
    connect(first.address)
    on_gpu = first.device != "cpu" and has_gpus(first.address)
    resources = {"num_gpus": 1 / (at_once or RUNS_PER_GPU), "num_cpus": 1} if on_gpu else {"num_gpus": 0}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(Board).options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    events: Any = board.remote()
    stored: dict[tuple[str, Path | None], Any] = {}
    token = f".driver-{uuid.uuid4().hex}"
    histories: dict[Path, History] = {}
    tasks: dict[Any, Path] = {}
    try:
        for folder, config in runs.items():
            if RunDirectory(folder).finished:
                histories[folder] = load(folder)
                _tell(callbacks, histories[folder], done=len(histories[folder].rows))
                when_done(folder, histories[folder])
                continue
            if not begin(folder, config):
                continue
            what = config.dataset, config.data_dir
            if what not in stored:
                stored[what] = ray.put(in_memory(data.load(*what)))
            cores = 1 if on_gpu else config.workers or 1
            local = config.model_copy(
                update={
                    "engine": "auto",
                    "device": "cuda" if on_gpu else "cpu",
                    "workers": cores,
                    "address": None,
                    "actors": None,
                }
            )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
            task = ray.remote(_run_there).options(max_retries=RETRIES, **{"num_cpus": cores} | resources)
            tasks[task.remote(local, stored[what], str(folder.resolve()), token, events, save_every)] = folder
        found = _gather(tasks, events, callbacks, when_done, watch, "GPU" if on_gpu else "CPU")
    finally:
        for task in tasks:
            ray.cancel(task, force=True)
        ray.kill(events)
        for folder in runs:
            (folder / token).unlink(missing_ok=True)
    histories |= found
    return {folder: histories[folder] for folder in runs if folder in histories}


def _gather(
    tasks: dict[Any, Path],
    events: Any,
    callbacks: Sequence[Callback],
    when_done: Callable[[Path, History], None],
    watch: Watch,
    kind: str,
) -> dict[Path, History]:
    """Take the runs as they end."""
    by_name = {str(folder.resolve()): folder for folder in tasks.values()}
    histories: dict[Path, History] = {}
    last_sign_of_life = time.monotonic()
    while tasks:
        ended, _ = ray.wait(list(tasks), timeout=0.5)
        for name, event in _hear(events):
            watch(by_name[name], event)
        if ended or any(has[kind] for has in nodes().values()):
            last_sign_of_life = time.monotonic()
        elif time.monotonic() - last_sign_of_life > ray_cluster.PATIENCE:
            raise ClusterLost(
                f"the cluster has had no {kind} for {ray_cluster.PATIENCE:.0f} s; what was done is kept, and with more "
                "nodes the same command goes on"
            )
        for task in ended:
            folder = tasks.pop(task)
            try:
                files = ray.get(task)
            except RayTaskError as error:
                if isinstance(error.cause, TooFewUpdates):
                    log.warning("%s: %s", folder, error.cause)
                    watch(folder, {"state": "failed"})
                    continue
                raise (error.cause if isinstance(error.cause, FedSieveError) else error) from None
            except RayError as error:
                log.warning("%s: lost %d times, given up (%s)", folder, RETRIES, reason(error))
                watch(folder, {"state": "failed"})
                continue
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(folder / name, content)
            histories[folder] = load(folder)
            watch(folder, {"state": "done"})
            _tell(callbacks, histories[folder], done=0)
            when_done(folder, histories[folder])
    return histories


def _tell(callbacks: Sequence[Callback], history: History, done: int) -> None:
    """What happened in a run, after the fact; `done` rounds were there before."""
    for callback in callbacks:
        callback.on_start(history.config, done)
        for row in history.rows[done:]:
            callback.on_round(row)
        callback.on_end(history.summary)


class Board:
    """An actor that runs tell of their rounds, for whoever watches."""

    def __init__(self) -> None:
        self.events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=100_000)

    def put(self, name: str, event: dict[str, Any]) -> None:
        """Something happened in a run."""
        self.events.append((name, event))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """What happened since the last call."""
        events, self.events = list(self.events), deque(maxlen=100_000)
        return events


def _hear(events: Any) -> list[tuple[str, dict[str, Any]]]:
    try:
        heard: list[tuple[str, dict[str, Any]]] = ray.get(events.take.remote(), timeout=10)
    except RayError:  # it starts again, and some news are lost
        return []
    return heard


class Reporter(Callback):
    """Tells the board of a run."""

    def __init__(self, events: Any, name: str) -> None:
        self.events, self.name = events, name
        self.node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def on_start(self, config: Config, done: int) -> None:
        """A run begins or goes on."""
        self.events.put.remote(self.name, {"state": "running", "round": done, "node": self.node})

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round is done."""
        event = {"state": "running", "round": row["round"], "accuracy": row["test_accuracy"], "node": self.node}
        self.events.put.remote(self.name, event)


def _run_there(
    config: Config, dataset: Dataset, folder: str, token: str, events: Any, save_every: float
) -> dict[str, bytes]:
    """A run on a node of the cluster; its files, where the driver can't see them."""
    callbacks = [Reporter(events, folder)]
    if (Path(folder) / token).exists():
        run(config, dataset=dataset, out=folder, resume=True, callbacks=callbacks, save_every=save_every)
        return {}
    with TemporaryDirectory() as aside:
        run(config, dataset=dataset, out=aside, callbacks=callbacks, save_every=save_every)
        files = (path for path in Path(aside).rglob("*") if path.is_file())
        return {str(path.relative_to(aside)): path.read_bytes() for path in files}
