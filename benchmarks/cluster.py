"""What Ray costs and brings: `--engine ray` against the local engine and Flower's simulation; many clients; faults.

    python benchmarks/cluster.py [--only engines,scale,faults] [--out docs/results/cluster]

One machine poses as several with Ray's own cluster utilities, so nothing here gets faster by adding nodes beyond its
cores: what shows is overhead.

engines  The two workloads of benchmarks/peers on FedSieve, on FedSieve with two Ray actors and on Flower's simulation
         with two actors, in turns; median seconds per round.
scale    100,000 clients of ten 8 × 8 images, 1,000 asked in a round, two steps of the project's `mlp`, on a cluster of
         four nodes with one core each: seconds per round against actors, and what the driver's memory does.
faults   24 short runs on a cluster of two nodes, undisturbed and with `kill -9` on a random Ray worker every two
         seconds: the results have to be the same.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

import fedsieve as fs
from fedsieve.report import style
from fedsieve.runs.environment import environment

PEERS = Path(__file__).parent / "peers"
SIMULATORS = {
    "local": ("with_fedsieve.py",),
    "ray": ("with_fedsieve.py", "--actors", "2"),
    "flower": ("with_flower.py",),
}
ACTORS = (1, 2, 4)
CLIENTS, EXAMPLES = 100_000, 10


def engines(passes: int, rounds: int) -> dict[str, Any]:
    """Median seconds per round by workload and simulator, and the ratios to the local engine."""
    seconds: dict[str, dict[str, list[float]]] = {name: {who: [] for who in SIMULATORS} for name in ("cnn", "mlp")}
    for turn in range(passes):
        for workload, found in seconds.items():
            for who, (script, *options) in SIMULATORS.items():
                command = [
                    sys.executable,
                    str(PEERS / script),
                    "--workload",
                    workload,
                    "--rounds",
                    str(rounds),
                    *options,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[who] += json.loads(done.stdout.splitlines()[-1])["seconds_per_round"]
                middle = statistics.median(found[who])
                print(f"pass {turn + 1}/{passes}  {workload}  {who:<7} {middle:.3f} s per round", flush=True)
    medians = {name: {who: statistics.median(times) for who, times in found.items()} for name, found in seconds.items()}
    return {
        "seconds_per_round": seconds,
        "median": medians,
        "ray_over_local": {name: found["ray"] / found["local"] for name, found in medians.items()},
        "flower_over_ray": {name: found["flower"] / found["ray"] for name, found in medians.items()},
    }


def scale(rounds: int) -> list[dict[str, Any]]:
    """For each number of actors, in a process of its own: seconds of each round and MiB of the driver after it."""
    results = []
    for actors in ACTORS:
        command = [sys.executable, __file__, "--actors", str(actors), "--rounds", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        last = results[-1]
        print(
            f"{actors} actors: {statistics.median(last['seconds'][2:]):.2f} s per round, driver "
            f"{last['driver_mib'][2]:.0f} to {last['driver_mib'][-1]:.0f} MiB",
            flush=True,
        )
    return results


def scale_with(actors: int, rounds: int) -> dict[str, Any]:
    """One line of `scale`."""
    draws = np.random.default_rng(0)
    labels = draws.integers(10, size=CLIENTS * EXAMPLES, dtype=np.uint8)
    images = draws.integers(128, size=(10, 8, 8), dtype=np.uint8)[labels]
    images += draws.integers(128, size=images.shape, dtype=np.uint8)
    data = fs.data.Dataset.from_arrays(images, labels, images[:1000], labels[:1000], classes=10)
    config = fs.Config(
        algorithm="fedpdp", model="mlp", clients=CLIENTS, ratio=1_000 / CLIENTS, heterogeneity="iid", rounds=rounds,
        local_steps=2, batch_size=5, lr=0.05, validation_per_class=0, engine="ray", actors=actors,
    )  # fmt: skip
    memory = Memory()
    with several_nodes(4):
        history = fs.run(config, dataset=data, callbacks=[memory])
    seconds = [row["seconds"] for row in history.rows]
    return {"actors": actors, "seconds": seconds, "driver_mib": memory.mib, "accuracy": history.accuracy[-1]}


class Memory(fs.Callback):
    """What the driver holds for itself after each round, in MiB (Linux: RssAnon)."""

    def __init__(self) -> None:
        self.mib: list[float] = []

    def on_round(self, row: Any) -> None:
        """After a round; what the C library keeps for later is given back first."""
        ctypes.CDLL(None).malloc_trim(0)
        lines = Path("/proc/self/status").read_text().splitlines()
        self.mib.append(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024)


def faults() -> dict[str, Any]:
    """The two sweeps, what was killed, and whether all rows are the same."""
    outcomes, killed, seconds = [], 0, []
    for disturbed in (False, True):
        with several_nodes(2), tempfile.TemporaryDirectory() as folder, Killer(disturbed) as killer:
            began = time.perf_counter()
            config = fs.Config(rounds=15, batch_size=16, lr=0.05, engine="ray")
            algorithms = ["fedavg", "fedprox", "fedpdp", "fedca", "fedcm-ucb", "fedcm-ts"]
            histories = fs.compare(config, algorithms, 4, folder)
            seconds.append(time.perf_counter() - began)
        killed += killer.count
        outcomes.append({name: [history.accuracy for history in runs] for name, runs in histories.items()})
    same = outcomes[0] == outcomes[1]
    print(f"24 runs: {seconds[0]:.0f} s; with {killed} workers killed {seconds[1]:.0f} s; the same results: {same}")
    return {"runs": 24, "seconds": seconds[0], "seconds_disturbed": seconds[1], "killed": killed, "same": same}


class Killer:
    """Ends a random Ray worker of this machine every two seconds, if it is to."""

    def __init__(self, active: bool) -> None:
        self.active, self.count, self.done = active, 0, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> Killer:
        if self.active:
            self.thread.start()
        return self

    def __exit__(self, *given: object) -> None:
        self.done.set()
        if self.active:
            self.thread.join()

    def run(self) -> None:
        """Until done."""
        chance = random.Random(0)
        while not self.done.wait(2.0):
            if there := [int(folder.name) for folder in Path("/proc").iterdir() if is_worker(folder)]:
                os.kill(chance.choice(there), signal.SIGKILL)
                self.count += 1


def is_worker(folder: Path) -> bool:
    """Whether a process runs tasks or actors of Ray."""
    try:
        name = (folder / "cmdline").read_text()
    except OSError:
        return False
    return name.startswith("ray::") and "Agent" not in name


class several_nodes:
    """A Ray cluster of nodes with one core each, on this machine; the driver's node has none."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(self.count):
            self.cluster.add_node(num_cpus=1)
        ray.init(address=self.cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def __exit__(self, *given: object) -> None:
        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]


def draw(results: list[dict[str, Any]], out: Path) -> Path:
    """Seconds per round against actors, and the driver's memory over rounds."""
    figure = style.new_figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    middles = [statistics.median(result["seconds"][2:]) for result in results]
    left.plot([result["actors"] for result in results], middles, "o-", color=style.KEPT)
    left.set(xlabel="actors, on two cores", ylabel="seconds per round", xticks=ACTORS, ylim=(0, None))
    for result, shade in zip(results, (style.INK, style.LEFT_OUT, style.KEPT), strict=True):
        memory = result["driver_mib"]
        many = f"{result['actors']} actor{'s' if result['actors'] > 1 else ''}"
        right.plot(range(1, len(memory) + 1), memory, color=shade, label=many)
    most = max(max(result["driver_mib"]) for result in results)
    right.set(xlabel="round", ylabel="the driver's memory, MiB", xticks=range(0, 21, 5), ylim=(0, 1.2 * most))
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        style.quiet(axes)
        axes.grid(color=style.GRID)
    return style.save(figure, out)


def main() -> None:
    """Measure, print, write JSON and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="engines,scale,faults")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each measurement")
    parser.add_argument("--actors", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("docs/results/cluster"))
    given = parser.parse_args()
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    if given.actors:
        print(json.dumps(scale_with(given.actors, given.rounds)))
        return
    file = given.out.with_suffix(".json")
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    record |= environment(torch.device("cpu")) | {"ray": ray.__version__}
    for name in given.only.split(","):
        if name == "engines":
            record[name] = engines(given.passes, given.rounds)
        elif name == "scale":
            record[name] = scale(given.rounds)
            print(draw(record[name], given.out.with_suffix(".png")))
        else:
            record[name] = faults()
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
