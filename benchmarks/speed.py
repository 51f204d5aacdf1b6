"""How fast clients train on a GPU: FedSieve's lanes against the plain PyTorch loop, in one run.

    python benchmarks/speed.py [--rounds 3] [--run-rounds 100] [--json FILE]

The paper's setting: CIFAR-10 with crops and flips (noise of the same shape where it is not fetched), VGG11, 8 of 20
clients, batch 64, 5 local epochs, SGD with momentum. Images per second are over the training part of a round. "Even"
clients hold 2,250 images each (class heterogeneity), "uneven" ones what client heterogeneity with α = 0.5 gives them.
The plain loop is what one writes first: data on the GPU, `torch.optim.SGD`, one client after the other; it is timed
on two clients. Then one whole run, with evaluation, filter and records, and several runs that share the GPU. On a CPU,
see benchmarks/peers/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import fedsieve as fs
from fedsieve import data, models
from fedsieve.clients import crop_and_flip
from fedsieve.data import Dataset
from fedsieve.engines import LanesEngine
from fedsieve.engines.precision import Precision
from fedsieve.runs.assembly import assemble
from fedsieve.runs.environment import environment

ASKED = list(range(8))
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")


def images() -> Dataset:
    """CIFAR-10, or noise of its shape."""
    if data.is_fetched("cifar10"):
        return data.load("cifar10")
    random = np.random.default_rng(0)
    pixels, labels = random.integers(256, size=(60_000, 32, 32, 3), dtype=np.uint8), random.integers(10, size=60_000)
    third = (1 / 3, 1 / 3, 1 / 3)
    parts = (pixels[:50_000], labels[:50_000], pixels[50_000:], labels[50_000:])
    return Dataset("noise", *parts, classes=10, mean=third, std=third)


def config(**changes: Any) -> fs.Config:
    """The paper's setting."""
    return fs.Config(**{"dataset": "cifar10", "algorithm": "fedpdp", "alpha": 0.5, "device": "cuda"} | changes)


def lanes(dataset: Dataset, rounds: int, **changes: Any) -> list[float]:
    """Images per second of each round, trained in lanes."""
    _, engine = assemble(config(**changes), dataset=dataset)
    assert isinstance(engine, LanesEngine)
    model = engine.initial_model()
    trained = engine.settings.epochs * sum(len(engine.partition[client]) for client in ASKED)
    speeds = []
    for number in range(1, rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.train(model, ASKED, number)
        torch.cuda.synchronize()
        speeds.append(trained / (time.perf_counter() - began))
    engine.close()
    return speeds[1:]


def plain_loop(dataset: Dataset, precision: Precision) -> float:
    """Images per second of two clients with 2,250 images each, trained as one writes it first."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    form = torch.channels_last if precision == "bf16" else torch.contiguous_format
    model = models.build("vgg11", (3, 32, 32), 10).cuda().to(memory_format=form)  # type: ignore[call-overload]
    inputs = dataset.prepare(dataset.train_inputs[:4_500]).cuda()
    labels = torch.from_numpy(dataset.train_labels[:4_500].astype(np.int64)).cuda()
    speeds = []
    for client in range(2):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            order = 2_250 * client + torch.randperm(2_250, device="cuda")
            for batch in torch.split(order, 64):
                draws = torch.stack([torch.randint(most, (len(batch),), device="cuda") for most in (9, 9, 2)], dim=1)
                pictures = crop_and_flip(inputs[batch], draws).contiguous(memory_format=form)
                optimiser.zero_grad()
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    loss = cross_entropy(model(pictures), labels[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        torch.cuda.synchronize()
        speeds.append(5 * 2_250 / (time.perf_counter() - began))
    return speeds[1]


def whole_run(dataset: Dataset, rounds: int, precision: Precision) -> dict[str, Any]:
    """A run of the paper, from assembling it to its summary on disk."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        history = fs.run(
            config(algorithm="fedcm-ucb", rounds=rounds, alpha=0.1, precision=precision),
            dataset=dataset,
            out=Path(folder) / "run",
        )
        seconds = time.perf_counter() - began
    means = {phase: statistics.mean(round[phase] for round in history.profile) for phase in history.profile[0]}
    return {"rounds": rounds, "precision": precision, "seconds": seconds, "seconds_per_round": means}


def several_runs(model: str) -> dict[int, float]:
    """Seconds for four runs of ten rounds, by how many share the GPU at once."""
    seconds = {}
    for at_once in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            fs.compare(config(rounds=10, precision="bf16", model=model), ["fedca", "fedcm-ucb"], 2, folder, (), at_once)
            seconds[at_once] = time.perf_counter() - began
    return seconds


def main() -> None:
    """Measure everything, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each measurement")
    parser.add_argument("--run-rounds", type=int, default=100, help="rounds of the whole run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU; on a CPU, run benchmarks/peers/measure.py")
    dataset = images()
    print(f"{torch.cuda.get_device_name()}, {dataset.name}: thousands of images a second, median (range)")
    rows: list[dict[str, Any]] = []

    def add(what: str, precision: Precision, speeds: list[float]) -> None:
        rows.append({"what": what, "precision": precision, "images_per_second": speeds})
        low, middle, high = min(speeds) / 1e3, statistics.median(speeds) / 1e3, max(speeds) / 1e3
        print(f"  {what:<24} {precision}  {middle:6.1f}  ({low:.1f} to {high:.1f})", flush=True)

    for precision in PRECISIONS:
        add("plain loop", precision, [plain_loop(dataset, precision) for _ in range(2)])
        add("lanes, even clients", precision, lanes(dataset, given.rounds, precision=precision))
        add(
            "lanes, uneven clients",
            precision,
            lanes(dataset, given.rounds, precision=precision, heterogeneity="client"),
        )
    add("lanes, even, batch 128", "bf16", lanes(dataset, given.rounds, precision="bf16", batch_size=128))
    add("lanes, even, vgg11-bn", "bf16", lanes(dataset, given.rounds, precision="bf16", model="vgg11-bn"))
    best_loop = max(max(row["images_per_second"]) for row in rows if row["what"] == "plain loop")
    for precision in PRECISIONS:
        own = next(row for row in rows if row["what"] == "lanes, even clients" and row["precision"] == precision)
        ratio = statistics.median(own["images_per_second"]) / best_loop
        print(f"  lanes in {precision}: {ratio:.1f} x the best plain loop")
    run = whole_run(dataset, given.run_rounds, "bf16")
    phases = ", ".join(f"{phase} {1000 * seconds:.0f}" for phase, seconds in run["seconds_per_round"].items())
    print(f"  a run of {run['rounds']} rounds in bf16: {run['seconds']:.1f} s; ms a round: {phases}")
    several = {}
    if dataset.name == "cifar10":
        for model in ("vgg11", "cnn"):
            several[model] = several_runs(model)
            times = ", ".join(f"{at_once} at once {seconds:.1f} s" for at_once, seconds in several[model].items())
            print(f"  four runs of ten rounds, {model}: {times}", flush=True)
    if given.json:
        record = {
            "data": dataset.name,
            "speeds": rows,
            "run": run,
            "several_runs": several,
            **environment(torch.device("cuda")),
        }
        given.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
