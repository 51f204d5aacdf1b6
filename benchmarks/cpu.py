"""How fast clients train on this machine's CPU: with freed memory kept or handed back, in fp32 or in bf16.

    python benchmarks/cpu.py [--rounds 3] [--json FILE]

Noise of CIFAR-10's shape with crops and flips, four clients of 490 images, batch 64, one epoch (VGG11: 128 images).
Every measurement is a process of its own, for what is set of memory is set for the whole process; "handed back" is what
the C library does when it isn't told otherwise. Images per second over the training part of a round, processes taking
turns. Against other simulators, see benchmarks/peers/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import fedsieve as fs
from fedsieve.data import Dataset
from fedsieve.runs.assembly import assemble
from fedsieve.runs.environment import environment

CLIENTS, IMAGES = 4, {"mlp": 490, "cnn": 490, "vgg11": 128}
WAYS = {
    "fp32, memory handed back": ("fp32", {"GLIBC_TUNABLES": ""}),
    "fp32": ("fp32", {}),
    "bf16, memory handed back": ("bf16", {"GLIBC_TUNABLES": ""}),
    "bf16": ("bf16", {}),
}


def measure(model: str, precision: str, rounds: int) -> list[float]:
    """Images per second of each round, in this process."""
    random, images = np.random.default_rng(0), CLIENTS * IMAGES[model]
    pixels, labels = (
        random.integers(256, size=(images + 10, 32, 32, 3), dtype=np.uint8),
        random.integers(10, size=images),
    )
    dataset = Dataset.from_arrays(
        pixels[:images], labels, pixels[images:], labels[:10], 10, mean=(0.5,) * 3, std=(0.25,) * 3
    )
    config = fs.Config(
        algorithm="fedpdp", dataset="cifar10", model=model, precision=precision, device="cpu", clients=CLIENTS,
        heterogeneity="iid", local_epochs=1, validation_per_class=0,
    )  # fmt: skip
    _, engine = assemble(config, dataset=dataset)
    speeds = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        engine.train(engine.initial_model(), range(CLIENTS), number + 1)
        speeds.append(images / (time.perf_counter() - began))
    engine.close()
    return speeds[1:]


def main() -> None:
    """Measure everything, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PRECISION"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        model, precision = given.one
        print(json.dumps(measure(model, precision, given.rounds)))
        return
    rows = []
    for model in IMAGES:
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(2):
            for way, (precision, setting) in WAYS.items():
                words = [sys.executable, __file__, "--rounds", str(given.rounds), "--one", model, precision]
                told = subprocess.run(words, env=os.environ | setting, stdout=subprocess.PIPE, check=True)
                speeds[way] += json.loads(told.stdout)
        first = statistics.median(next(iter(speeds.values())))
        for way, values in speeds.items():
            middle = statistics.median(values)
            print(
                f"{model:<6} {way:<25} {middle:8.0f} images a second ({min(values):.0f} to {max(values):.0f}), "
                f"{middle / first:.2f} x",
                flush=True,
            )
            rows.append({"model": model, "way": way, "images_per_second": values})
    if given.json:
        given.json.write_text(json.dumps({"speeds": rows, **environment(torch.device("cpu"))}, indent=2) + "\n")


if __name__ == "__main__":
    main()
