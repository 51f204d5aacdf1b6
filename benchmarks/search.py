"""The combinatorial filter's searches: time, memory and quality, on logits of real federated runs.

    python benchmarks/search.py --collect FILE [--dataset mnist] [--device cuda]     make the logits: two short runs
    python benchmarks/search.py --logits FILE [--device cuda] [--json FILE] [--plot FILE]

The alternative is the plain search that one writes first: chunks of subset masks, times the logits, then the score.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedsieve as fs
from fedsieve.filtering import Candidates, Selection, beam_search, branch_and_bound, exhaustive
from fedsieve.filtering.scores import Score, accuracy, log_likelihood
from fedsieve.filtering.subsets import Found, Problem
from fedsieve.runs.environment import environment

SCORES: tuple[Score, ...] = ("accuracy", "cross-entropy")
UNITS = {"accuracy": "points", "cross-entropy": "nats"}


class Recorder(fs.filtering.ModelFilter):
    """Keeps the better three quarters of the models, each judged alone, and remembers all logits it saw."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.labels = torch.empty(0)

    def select(self, candidates: Candidates) -> Selection:
        self.logits.append(candidates.logits.half().cpu())
        self.labels = candidates.labels.cpu()
        alone = log_likelihood(candidates.logits, candidates.labels)
        kept = alone.argsort(descending=True)[: max(1, 3 * len(alone) // 4)]
        return Selection(tuple(sorted(kept.tolist())))


def collect(file: Path, dataset: str, device: str) -> None:
    """20 rounds of 20 clients and one round of 200, all asked: logits as half-precision numbers."""
    tensors = {}
    for clients, rounds, epochs in ((20, 20, 2), (200, 1, 1)):
        recorder = Recorder()
        config = fs.Config(
            algorithm="fedpdp",
            dataset=dataset,
            clients=clients,
            ratio=1.0,
            rounds=rounds,
            local_epochs=epochs,
            lr=0.01,
            schedule="constant",
            validation_per_class=500,
            device=device,
        )
        fs.run(config, filter=recorder)
        tensors[f"logits-{clients}"] = torch.stack(recorder.logits)
        tensors["labels"] = recorder.labels
    save_file(tensors, file)


def plain(problem: Problem, chunk: int = 256) -> Found:
    """The plain batched search."""
    logits, models = problem.logits, problem.models
    score = accuracy if problem.score == "accuracy" else log_likelihood
    best, top = 0, -float("inf")
    for subsets in torch.split(torch.arange(1, 2**models, device=problem.device), chunk):
        masks = (subsets.unsqueeze(1) >> torch.arange(models, device=problem.device) & 1).to(logits.dtype)
        mean = (masks / masks.sum(1, keepdim=True)) @ logits.flatten(1)
        scores = score(mean.view(-1, *logits.shape[1:]), problem.labels)
        place = int(scores.argmax())
        if float(scores[place]) > top:
            best, top = int(subsets[place]), float(scores[place])
    members = tuple(k for k in range(models) if best >> k & 1)
    return Found(members, top, 2**models - 1, True, top)


def timed(search: Callable[[], Found], repeat: int = 3) -> tuple[Found, float]:
    """The result, and the best time of a few; the first is a warm-up on a GPU."""
    times = []
    for _ in range(repeat):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        found = search()
        times.append(time.perf_counter() - began)
    return found, min(times)


class Benchmark:
    def __init__(self, file: Path, device: str) -> None:
        tensors = load_file(file)
        self.device = device
        self.labels = tensors["labels"].long().to(device)
        self.rounds = tensors["logits-20"].float()
        self.many = tensors["logits-200"][0].float()

    def problem(self, models: int, score: Score, round: int = -1) -> Problem:
        """The first `models` of a round of 20 clients, or of the round of 200."""
        logits = self.rounds[round] if models <= self.rounds.shape[1] else self.many
        return Problem(logits[:models].to(self.device), self.labels, score)

    def exhaustive_against_plain(self, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
        rows = []
        print(f"\n{'models':>7} {'score':15}{'plain s':>10}{'ours s':>10}{'ratio':>8}  same score")
        for models in sizes:
            for score in SCORES:
                problem = self.problem(models, score)
                other, plain_s = timed(lambda problem=problem: plain(problem), 2)  # type: ignore[misc]
                found, ours_s = timed(lambda problem=problem: exhaustive.search(problem))  # type: ignore[misc]
                same = abs(other.score - found.score) < 1e-5
                row = {"models": models, "score": score, "plain_s": plain_s, "ours_s": ours_s, "same": same}
                rows.append(row)
                print(f"{models:7} {score:15}{plain_s:10.4f}{ours_s:10.4f}{plain_s / ours_s:7.1f}×  {same}")
        return rows

    def cost(self, sizes: dict[str, tuple[int, ...]], seconds: float) -> list[dict[str, Any]]:
        rows = []
        print(f"\n{'search':18}{'models':>7} {'score':15}{'s':>9}{'looked at':>12}{'optimal':>9}{'gap to bound':>14}")
        searches: dict[str, Callable[[Problem], Found]] = {
            "exhaustive": exhaustive.search,
            "branch-and-bound": lambda problem: branch_and_bound.search(problem, seconds=seconds),
            "beam": beam_search.search,
        }
        for name, search in searches.items():
            for models in sizes[name]:
                for score in SCORES:
                    if name == "branch-and-bound" and score == "accuracy" and models > 20:
                        continue
                    problem = self.problem(models, score)
                    found, taken = timed(lambda problem=problem, search=search: search(problem), 1 + (models < 17))  # type: ignore[misc]
                    gap = None if found.bound is None else found.bound - found.score
                    rows.append(
                        {"search": name, "models": models, "score": score, "s": taken, "looked_at": found.looked_at}
                        | {"optimal": found.optimal, "reached": found.score, "gap_to_bound": gap}
                    )
                    shown = "–" if gap is None else f"{gap:.4f}"
                    known = f"{found.looked_at:12,}{found.optimal!s:>9}{shown:>14}"
                    print(f"{name:18}{models:7} {score:15}{taken:9.3f}{known}", flush=True)
        return rows

    def beam_against_exact(self, models: int) -> list[dict[str, Any]]:
        rows = []
        print(f"\nbeam against the exact optimum, {models} models, {len(self.rounds)} rounds of a real run")
        print(
            f"{'score':15}{'optimal':>10}{'mean loss':>12}{'most lost':>12}{'beam s':>9}{'exhaustive s':>14}{'time':>8}"
        )
        for score in SCORES:
            losses: list[float] = []
            beam_times: list[float] = []
            exact_times: list[float] = []
            for round in range(len(self.rounds)):
                problem = self.problem(models, score, round)
                if not exact_times or score == "accuracy" or exact_times[0] < 5:
                    exact, exact_s = timed(lambda problem=problem: exhaustive.search(problem), 1)  # type: ignore[misc]
                    exact_times.append(exact_s)
                else:  # the same optimum, proven sooner
                    exact = branch_and_bound.search(problem)
                    assert exact.optimal
                found, beam_s = timed(lambda problem=problem: beam_search.search(problem))  # type: ignore[misc]
                losses.append((exact.score - found.score) * (100 if score == "accuracy" else 1))
                beam_times.append(beam_s)
            row: dict[str, Any] = {
                "score": score,
                "rounds": len(losses),
                "optimal": sum(loss < 1e-9 for loss in losses),
                "losses": losses,
                "unit": UNITS[score],
                "beam_s": float(np.median(beam_times)),
                "exhaustive_s": float(np.median(exact_times)),
            }
            rows.append(row)
            print(
                f"{score:15}{row['optimal']:>7}/{len(losses)}{np.mean(losses):12.4f}{max(losses):12.4f}"
                f"{row['beam_s']:9.3f}{row['exhaustive_s']:14.3f}{100 * row['beam_s'] / row['exhaustive_s']:7.1f}%"
            )
        return rows


def plot(rows: list[dict[str, Any]], file: Path, title: str) -> None:
    from fedsieve.report.style import GRID, INK, new_figure, quiet, save

    colours = {"exhaustive": "#555555", "branch-and-bound": "#009E73", "beam": "#0072B2"}
    figure = new_figure(9, 4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, score in zip(panels, SCORES, strict=True):
        for name, colour in colours.items():
            points = [(row["models"], row["s"]) for row in rows if row["search"] == name and row["score"] == score]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        axes.minorticks_off()
        axes.set_xlabel("models")
        axes.set_title(score, loc="left", fontsize=10, color=INK)
        axes.grid(color=GRID, linewidth=0.8)
        quiet(axes)
    panels[0].set_ylabel("seconds")
    panels[0].legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="FILE", help="make a file of logits and stop")
    parser.add_argument("--logits", type=Path, metavar="FILE", help="a file of logits")
    parser.add_argument("--dataset", default="mnist", help="with --collect: the data set of the runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw cost against the number of models")
    parser.add_argument("--seconds", type=float, default=60, help="limit of one branch-and-bound search")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.dataset, arguments.device)
        return
    if not arguments.logits:
        parser.error("give --logits FILE, or make one with --collect FILE")
    benchmark = Benchmark(arguments.logits, arguments.device)
    gpu = arguments.device != "cpu"
    many = benchmark.many.shape[0]
    results: dict[str, Any] = {
        "against_plain": benchmark.exhaustive_against_plain((8, 12, 16) if gpu else (8, 12)),
        "cost": benchmark.cost(
            {
                "exhaustive": (4, 8, 12, 16, 20),
                "branch-and-bound": (8, 12, 16, 20, 30, 50),
                "beam": (8, 16, 20, 50, 100, many),
            },
            arguments.seconds,
        ),
        "beam_against_exact": benchmark.beam_against_exact(20),
    }
    where = torch.cuda.get_device_name() if gpu else "2 CPU cores" if torch.get_num_threads() == 2 else "CPU"
    results["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if gpu:
        results["peak_gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    print(f"\npeak memory {results['peak_memory_mib']:.0f} MiB")
    if arguments.plot:
        examples, classes = benchmark.rounds.shape[2:]
        plot(results["cost"], arguments.plot, f"One search on {examples:,} × {classes} logits, {where}")
    if arguments.json:
        record = results | environment(torch.device(arguments.device))
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
