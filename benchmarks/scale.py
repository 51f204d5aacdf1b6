"""From a thousand clients to a million: seconds per round and memory, 1,000 clients asked in each round.

    python benchmarks/scale.py [--rounds N] [--out docs/results/scale]

One memory-mapped data set of ten 8 × 8 images per client (a million clients: 10 million images, 640 MB, written to a
temporary folder); a federation of n clients holds the first 10 n of them. Each size runs in a process of its own, with
UCB sampling, two local steps on the project's `mlp` and plain averaging. Memory is what the process holds for itself
(Linux: RssAnon), not the pages of the file that happen to be in memory: after opening the data, after the federation is
set up, and after the rounds. The peak while the partition is drawn is given too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsieve as fs
from fedsieve.data import Dataset
from fedsieve.report import style
from fedsieve.runs.assembly import assemble
from fedsieve.runs.environment import environment
from fedsieve.sampling import UCBSampler
from fedsieve.stopwatch import PHASES

SIZES = (1_000, 10_000, 100_000, 1_000_000)
EXAMPLES_PER_CLIENT = 10
ASKED = 1_000
PROMISED = 16 * EXAMPLES_PER_CLIENT + 64  # bytes per client: 16 for each of its examples and 64 for itself
MIB = 2**20


def given_back() -> None:
    """Let the C library give memory that is free back to the system, so that it is not counted."""
    ctypes.CDLL(None).malloc_trim(0)


def held() -> float:
    """MiB of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class Peak(threading.Thread):
    """Looks at `held` a hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.done = held(), threading.Event()

    def run(self) -> None:
        """Until `done`."""
        while not self.done.wait(0.01):
            self.highest = max(self.highest, held())


def write_images(folder: Path) -> None:
    """Ten million noisy images, a block at a time."""
    random = np.random.default_rng(0)
    count = EXAMPLES_PER_CLIENT * SIZES[-1]
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, (count, 8, 8))
    labels = np.lib.format.open_memmap(folder / "labels.npy", "w+", np.uint8, (count,))
    shades = random.integers(128, size=(10, 8, 8))
    for start in range(0, count, 100_000):
        here = random.integers(10, size=100_000, dtype=np.uint8)
        labels[start : start + 100_000] = here
        images[start : start + 100_000] = shades[here] + random.integers(128, size=(100_000, 8, 8))


def measure(folder: Path, clients: int, rounds: int) -> dict[str, Any]:
    """One federation, in this process."""
    images, labels = (np.lib.format.open_memmap(folder / f"{name}.npy", "r") for name in ("images", "labels"))
    count = EXAMPLES_PER_CLIENT * clients
    dataset = Dataset("scale", images[:count], labels[:count], images[:500], labels[:500], 10)
    config = fs.Config(
        algorithm="fedpdp",
        heterogeneity="iid",
        clients=clients,
        ratio=ASKED / clients,
        local_steps=2,
        batch_size=10,
        validation_per_class=0,
        augment=False,
        model="mlp",
        momentum=0,
    )
    small = config.model_copy(update={"clients": ASKED, "ratio": 0.01})
    assemble(small, dataset=Dataset("warm", images[:10_000], labels[:10_000], images[:500], labels[:500], 10))[0].play(
        1
    )
    given_back()
    opened = held()
    peak = Peak()
    peak.start()
    began = time.perf_counter()
    federation, engine = assemble(config, sampler=UCBSampler(), dataset=dataset)
    setup_seconds = time.perf_counter() - began
    peak.done.set()
    given_back()
    set_up = held()
    seconds = []
    for number in range(1, rounds + 2):
        began = time.perf_counter()
        federation.play(number)
        seconds.append(time.perf_counter() - began)
    engine.close()
    given_back()
    return {
        "clients": clients,
        "examples": count,
        "setup_seconds": setup_seconds,
        "seconds_per_round": statistics.median(seconds[1:]),
        "phases": {
            phase: statistics.median(round[phase] for round in federation.stopwatch.rounds[1:]) for phase in PHASES
        },
        "opened_mib": opened,
        "set_up_mib": set_up,
        "setup_peak_mib": peak.highest,
        "after_rounds_mib": held(),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds per round, and memory beside what was promised."""
    figure = style.new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    clients = [row["clients"] for row in rows]
    left.plot(clients, [row["seconds_per_round"] for row in rows], "o-", color=style.KEPT, label="a whole round")
    left.plot(
        clients, [row["phases"]["sample"] for row in rows], "o-", color=style.LEFT_OUT, label="of it sampling (UCB)"
    )
    left.set(xlabel="clients", ylabel="seconds", xscale="log", ylim=(0, None), title=f"{ASKED:,} clients asked a round")
    left.legend(frameon=False, fontsize=9)
    index = [row["set_up_mib"] - row["opened_mib"] for row in rows]
    limit = [PROMISED * count / MIB for count in clients]
    right.plot(clients, index, "o-", color=style.KEPT, label="the federation's memory")
    right.plot(clients, limit, "--", color=style.INK, label="16 bytes an example + 64 a client")
    right.set(xlabel="clients", ylabel="MiB", xscale="log", ylim=(0, None), title="10 examples per client")
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        style.quiet(axes)
        axes.grid(color=style.GRID)
        axes.title.set_fontsize(10)
    style.save(figure, path)


def main() -> None:
    """All sizes, each in its own process; a table, a JSON file and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale"), help="without an ending")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "CLIENTS"), help="measure one size in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(Path(given.one[0]), int(given.one[1]), given.rounds)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        print("writing 10 million images ...", flush=True)
        write_images(Path(folder))
        print(
            f"{'clients':>10} {'s/round':>8} {'sampling':>9} {'set up s':>9} {'index MiB':>10} {'limit':>7} {'peak':>7}"
        )
        for clients in SIZES:
            command = [sys.executable, __file__, "--rounds", str(given.rounds), "--one", folder, str(clients)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            row = json.loads(answer.splitlines()[-1])
            rows.append(row)
            print(
                f"{clients:>10,} {row['seconds_per_round']:>8.3f} {row['phases']['sample']:>9.4f} "
                f"{row['setup_seconds']:>9.2f} {row['set_up_mib'] - row['opened_mib']:>10.1f} "
                f"{PROMISED * clients / MIB:>7.1f} {row['setup_peak_mib'] - row['opened_mib']:>7.1f}",
                flush=True,
            )
    record = {"rows": rows, **environment(torch.device("cpu"))}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    draw(rows, given.out.with_suffix(".png"))
    print(given.out.with_suffix(".json"), given.out.with_suffix(".png"), sep="\n")


if __name__ == "__main__":
    main()
