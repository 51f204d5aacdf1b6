"""What learned averaging costs the server in a round, beside the training that it chooses among.

    python benchmarks/learned.py [--times 5] [--json FILE]     # on a GPU, or on a CPU as a server of Flower's

VGG11 and CIFAR-10 (noise of its shape where it is not fetched), five local epochs of 2,250 images a client, 5,000
validation images. On a GPU 8 clients train side by side (bf16); on a CPU 20 models come back, and how long their
training takes is reckoned from two clients that train on 500 images each. Parts are timed apart: the gradients, and
mixing (sums of the models, and products with the gradient). Memory is the peak beyond the models that came back.
Fine-tuning, as `fedsieve-finetune` does it after learned averaging, is timed by itself, on a CPU once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import images
from torch import Tensor

import fedsieve as fs
from fedsieve.engines.precision import arithmetic
from fedsieve.filtering import Candidates, FineTuning, LearnedAveraging
from fedsieve.filtering.learned import mixture, products
from fedsieve.runs.assembly import assemble
from fedsieve.runs.environment import environment

EPOCHS, IMAGES = 5, 2_250


def timed(work: Callable[[], Any], times: int, device: torch.device) -> list[float]:
    """Seconds, after once to warm up."""
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def some_models(model: Tensor, count: int) -> list[Tensor]:
    """Models near this one."""
    random = torch.Generator(model.device).manual_seed(0)
    near = torch.empty(count, len(model), device=model.device).normal_(std=1e-3, generator=random)
    return list(near.add_(model))


def peak(work: Callable[[], Any], model: Tensor) -> float:
    """The most memory beyond what was in use before, in models."""
    if model.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / model.nbytes
    import ctypes

    from defences import kibibytes

    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept doesn't count
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = kibibytes("VmRSS")
    work()
    return 1024 * (kibibytes("VmHWM") - before) / model.nbytes


def train(engine: fs.engines.Engine, model: Tensor, clients: Sequence[int]) -> Callable[[], Any]:
    """Rounds of these clients, with other batches each time."""
    rounds = iter(range(1, 1_000))
    return lambda: engine.train(model, clients, next(rounds))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    # A CPU's clients are so many that each holds 500 images.
    place = {"device": "cuda", "precision": "bf16"} if gpu else {"device": "cpu", "clients": 90, "local_epochs": 1}
    config = fs.Config(**{"algorithm": "fedsieve", "dataset": "cifar10", "model": "vgg11", "alpha": 0.5} | place)
    federation, engine = assemble(config, dataset=images())
    model, count = federation.model, 8 if gpu else 20
    trained = timed(train(engine, model, list(range(8 if gpu else 2))), given.times, device)
    if not gpu:
        trained = [seconds * count * EPOCHS * IMAGES / (2 * 500) for seconds in trained]
    models, labels = some_models(model, count), engine.labels("validation")
    shares = torch.full((count,), 1 / count, dtype=torch.float64, device=device)
    filter = LearnedAveraging()

    def candidates() -> Candidates:
        return Candidates(
            logits=torch.empty(0),
            labels=labels,
            weights=shares.cpu(),
            models=models,
            score_and_gradient=engine.score_and_gradient,
            random=np.random.default_rng(0),
            previous=model,
            trained=engine.layout.parameters,
            average=lambda kept: model,
            augments=True,
        )

    def gradients() -> None:
        among = candidates()
        for _ in range(filter.steps):
            engine.score_and_gradient(model, filter.draw(among))

    def mixing() -> None:
        for _ in range(filter.steps):
            products(models, mixture(models, shares))

    with arithmetic("fp32", device):  # as in the sieve
        found = {
            "training": trained,
            "learned averaging": timed(lambda: filter.select(candidates()), given.times, device),
            "its gradients": timed(gradients, given.times, device),
            "its mixing": timed(mixing, given.times, device),
            "fine-tuning": timed(lambda: FineTuning(rate=1e-3).select(candidates()), given.times if gpu else 1, device),
        }
        memory = peak(lambda: filter.select(candidates()), model)
    whole = statistics.median(found["training"])
    print(f"{count} models of {len(model):,} weights, {filter.steps} batches of {filter.batch}; median (range)")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"  {name:<18} {middle:8.4f} s ({min(seconds):.4f} to {max(seconds):.4f}), {middle / whole:6.1%}")
    print(f"  memory: {memory:.2f} models beyond the {count}")
    if given.json:
        record = {"models": count, "seconds": found, "memory_in_models": memory, **environment(device)}
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
