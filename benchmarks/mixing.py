"""Which way of learning mixing weights is best: `LearnedAveraging`, and changes of it one at a time.

    python benchmarks/mixing.py [--model mlp] [--seeds 3] [--at-once 2] [--only NAME ...] [--smoothing S] [--stop N]
        [--out FILE]

`mlp` learns Fashion-MNIST, on CPUs; `cnn` and `vgg11` learn CIFAR-10, on a GPU.

Every variant is run with class and client heterogeneity (α = 0.1, 8 of 20 clients) and the same seeds, next to the
algorithms it has to beat. FILE (JSON) gets a line per run as it ends; what it has is not run again. At the end a table:
mean test accuracy of the last ten rounds, and the difference from `learned`, seed by seed, with its 95 % interval.
What is kept here but not in the library did not help. With --stop only the first N rounds of a run are played, for
what is to be seen early. With --smoothing the table says what it is to hand out an average over rounds: mean accuracy
of the rounds in the middle of the run and of the last ten, and the first round that is as good as `fedavg` in the end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from torch import Tensor

import fedsieve as fs
from fedsieve import data, models
from fedsieve.clients import crop_and_flip, draw_crops_and_flips
from fedsieve.filtering import CombinatorialFilter, LearnedAveraging
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.fine_tuning import FineTuning
from fedsieve.filtering.geometric_median import shares_of
from fedsieve.filtering.learned import mixture
from fedsieve.momentum import ServerMomentum
from fedsieve.randomness import generator
from fedsieve.report import figures, style
from fedsieve.reproduction.claims import Interval
from fedsieve.reproduction.tables import spread_of
from fedsieve.runs import Callback, rounds_to
from fedsieve.runs.environment import environment
from fedsieve.sampling import Feedback, ThompsonSampler, UCBSampler, UniformSampler
from fedsieve.sampling.base import Ids, sorted_ids
from fedsieve.sampling.memory import Memory
from fedsieve.vector import Layout

SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": {
        "dataset": "fashion-mnist", "rounds": 30, "local_epochs": 1, "lr": 0.05, "validation_per_class": 200,
    },
    "cnn": {"dataset": "cifar10", "rounds": 60, "local_epochs": 2, "lr": 0.02, "precision": "bf16"},
    "vgg11": {
        "dataset": "cifar10", "rounds": 100, "local_epochs": 5, "lr": 0.05, "batch_size": 64, "weight_decay": 5e-4,
        "precision": "bf16",
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "clients": 20, "ratio": 0.4, "alpha": 0.1, "schedule": "cosine", "score": "cross-entropy", "algorithm": "fedpdp",
}  # fmt: skip


class Mixing(LearnedAveraging):
    """`LearnedAveraging` with its choices as options.

    `start`: "p" from the p_k, "subset" from the best subset's. `pull` adds λ KL(c, p) to the loss. `layers`: a weight
    for each of these stretches of the model. `free`: weights that sum to 1 but may be negative. `drop`: leave out who
    has less than half of an equal share. `settled`: stop when no weight has moved by more than this in five steps.
    `momentum` of the server.
    `length`: a factor on each round's change, or "all" for one that makes the models that are mixed move as far, on
    average, as all that came back. `tune` steps of SGD on `tune_batch` validation images each at the end, of one size
    in all rounds. `augment`: crop and flip the validation images, as clients do theirs.
    """

    def __init__(
        self,
        steps: int = 40,
        batch: int = 1024,
        rate: float = 0.2,
        start: str = "p",
        pull: float = 0.0,
        layers: Sequence[slice] = (slice(None),),
        free: bool = False,
        drop: bool = True,
        settled: float = 0.0,
        momentum: float = 0.0,
        length: float | str = 1.0,
        tune: int = 0,
        tune_batch: int = 64,
        augment: bool = False,
    ) -> None:
        super().__init__(steps, batch, rate)
        self.start, self.pull, self.layers, self.free, self.drop = start, pull, layers, free, drop
        self.settled, self.length, self.taken = settled, length, list[int]()
        self.momentum = ServerMomentum(momentum, 0)  # before the steps of `tune`, where that of a run comes after
        self.tune, self.augment = FineTuning(steps=tune, batch=tune_batch) if tune else None, augment
        self.needs_logits = start == "subset"
        self.learned: Tensor | None = None

    def select(self, candidates: Candidates) -> Selection:
        """The models that are worth something, and what is made of all."""
        assert candidates.models is not None and candidates.previous is not None
        held = list(candidates.models)
        weights = self._mix(candidates, held)  # [layers, models]
        mean = weights.mean(0)
        kept = torch.nonzero(mean >= 1 / (2 * len(held)) if self.drop else mean > -math.inf).flatten()
        self.learned = mean
        shares = torch.zeros_like(weights)
        shares[:, kept] = weights[:, kept] / weights[:, kept].sum(1, keepdim=True)
        model = self._mixture(held, shares)
        if self.length != 1:
            model = candidates.previous + self._longer(candidates, shares) * (model - candidates.previous)
        self.momentum.trained = candidates.trained or len(model)
        model = self.momentum.step(candidates.previous, model)
        if self.tune is not None:
            model = self.tune.train(candidates, model)
        return Selection(tuple(kept.tolist()), model=model)

    def _mix(self, candidates: Candidates, held: Sequence[Tensor]) -> Tensor:
        p = torch.from_numpy(shares_of(candidates)).to(held[0].device)
        start = p.clone()
        if self.start == "subset":
            best = list(CombinatorialFilter("cross-entropy").select(candidates).kept)
            start = torch.full_like(p, 1e-3)
            start[best] += p[best] / p[best].sum()
        a = (start / start.sum() if self.free else start.clamp(min=1e-300).log()).repeat(len(self.layers), 1)
        mean, square = torch.zeros_like(a), torch.zeros_like(a)
        rate = self.rate / 4 if self.free else self.rate
        before = c = self._weights(a)
        step = 0
        for step in range(1, self.steps + 1):
            c = self._weights(a)
            if self.settled and step % 5 == 1 and step > 1:
                if float((c - before).abs().max()) < self.settled:
                    break
                before = c
            gradient = self._gradient(candidates, self._mixture(held, c))
            rows = [[torch.dot(gradient[part], model[part]) for model in held] for part in self.layers]
            slope = -torch.stack([torch.stack(row) for row in rows]).double()
            if self.pull:
                slope += self.pull * (c.clamp(min=1e-300).log() - p.clamp(min=1e-300).log() + 1) / len(self.layers)
            slope = self._by_a(slope, c)
            mean = 0.9 * mean + 0.1 * slope
            square = 0.999 * square + 0.001 * slope**2
            a = a - rate * mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        self.taken.append(step)
        return self._weights(a)

    def _longer(self, candidates: Candidates, shares: Tensor) -> float:
        if isinstance(self.length, float):
            return self.length
        assert candidates.models is not None and candidates.previous is not None
        moved = torch.stack([(model - candidates.previous).norm() for model in candidates.models]).double()
        p = torch.from_numpy(shares_of(candidates)).to(moved) * (moved > 0)
        return float((p @ moved / p.sum() / (shares.mean(0) @ moved)).clamp(1, 3))

    def _weights(self, a: Tensor) -> Tensor:
        return a - (a.sum(1, keepdim=True) - 1) / a.shape[1] if self.free else a.softmax(1)

    def _by_a(self, slope: Tensor, c: Tensor) -> Tensor:
        return slope - slope.mean(1, keepdim=True) if self.free else c * (slope - (c * slope).sum(1, keepdim=True))

    def _gradient(self, candidates: Candidates, model: Tensor) -> Tensor:
        assert candidates.score_and_gradient is not None
        with augmented(candidates) if self.augment else nullcontext():
            return candidates.score_and_gradient(model, self.draw(candidates))[1]

    def _mixture(self, held: Sequence[Tensor], weights: Tensor) -> Tensor:
        total = torch.zeros_like(held[0])
        for row, part in zip(weights.to(total.dtype), self.layers, strict=True):
            for model, weight in zip(held, row, strict=True):
                total[part].addcmul_(model[part], weight)
        return total


class Together(LearnedAveraging):
    """Learns the weights and takes steps of SGD at once: each gradient, at Σ c_k w_k + d, moves both c and d.

    d stays 0 for the first `wait` steps.
    """

    def __init__(self, wait: int = 0, tune_rate: float = 0.01) -> None:
        super().__init__()
        self.wait, self.tune_rate = wait, tune_rate

    def select(self, candidates: Candidates) -> Selection:
        """Those worth at least half of an equal share, averaged, and d."""
        assert candidates.score_and_gradient is not None and candidates.models is not None
        held, random = list(candidates.models), candidates.random
        assert random is not None
        drift, velocity = torch.zeros_like(held[0]), torch.zeros_like(held[0])
        calls = 0

        def moved(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
            nonlocal calls
            calls += 1
            score, gradient = at_model(model + drift, examples)
            if calls > self.wait:
                velocity.mul_(0.9).add_(gradient)
                drift.add_(velocity, alpha=self.tune_rate * candidates.pace)
            return score, gradient

        at_model = candidates.score_and_gradient
        selection = super().select(replace(candidates, score_and_gradient=moved))
        assert selection.weights is not None
        return replace(selection, model=mixture(held, selection.weights) + drift)


class Augmented(FineTuning):
    """Crops and flips the validation images, as clients do theirs."""

    def select(self, candidates: Candidates) -> Selection:
        """As the base does."""
        with augmented(candidates):
            return super().select(candidates)


@contextmanager
def augmented(candidates: Candidates) -> Iterator[None]:
    """Gradients by cropped and flipped images."""
    assert candidates.score_and_gradient is not None and candidates.random is not None
    engine, random = candidates.score_and_gradient.__self__, candidates.random  # type: ignore[attr-defined]
    plain = engine._examples

    def changed(data: str, places: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = plain(data, places)
        draws = torch.from_numpy(draw_crops_and_flips(random, len(inputs))).to(inputs.device)
        return crop_and_flip(inputs, draws), labels

    engine._examples = changed
    try:
        yield
    finally:
        del engine._examples


class Remembering(UniformSampler):
    """Knows whom it asked last."""

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """As the base does."""
        self.asked = super().sample(round, clients, count)
        return self.asked


class Joined(Mixing):
    """Mixes in what others changed when they were last asked, or, without a sampler, what the last round changed.

    Each such change, applied to the model as it is, is a candidate beside those that came back.
    """

    def __init__(self, sampler: Remembering | None = None) -> None:
        super().__init__(batch=200)
        self.sampler = sampler
        self.changes: dict[int, tuple[Tensor, float]] = {}

    def select(self, candidates: Candidates) -> Selection:
        """As the base does, with more candidates."""
        assert candidates.models is not None and candidates.previous is not None
        held, previous, weights = list(candidates.models), candidates.previous, candidates.weights.tolist()
        here = [] if self.sampler is None else self.sampler.asked.tolist()
        others = [change for client, change in self.changes.items() if client not in here]
        among = replace(
            candidates,
            models=[*held, *(previous + change for change, _ in others)],
            weights=torch.tensor([*weights, *(weight for _, weight in others)], dtype=candidates.weights.dtype),
            counts=None,
        )
        selection = super().select(among)
        assert selection.model is not None
        if self.sampler is None:
            self.changes[-1] = (selection.model - previous, float(np.mean(weights)))
        for client, model, weight in zip(here, held, weights, strict=self.sampler is not None):
            self.changes[client] = (model - previous, weight)
        return Selection(tuple(position for position in selection.kept if position < len(held)), model=selection.model)


class FractionalUCB(UCBSampler):
    """Rewards a client with its weight times the number of models, at most 1."""

    def __init__(self, filter: Mixing) -> None:
        super().__init__()
        self.filter = filter

    def observe(self, feedback: Feedback) -> None:
        """As the base does, with other rewards."""
        assert self.filter.learned is not None
        answered = sorted(feedback.losses)
        worth = dict(zip(answered, (self.filter.learned * len(answered)).clamp(0, 1).tolist(), strict=True))
        base = self.reward

        def reward(arms: Any, rewards: Any) -> None:
            asked = np.unique(np.asarray(feedback.sampled, dtype=np.int64))
            base(arms, np.array([worth.get(int(client), 0.0) for client in asked]))

        self.reward = reward  # type: ignore[method-assign]
        try:
            super().observe(feedback)
        finally:
            del self.reward


class FadingUCB(UCBSampler):
    """Asks those of highest index at first; from round to round more places go to clients drawn from all others."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """The best, and others at random, sorted."""
        ids = sorted_ids(clients, count)
        drawn = math.floor(count * (round - 1) / max(1, self.rounds - 1) + 0.5)
        best = super().sample(round, ids, count - drawn) if drawn < count else ids[:0]
        others = np.setdiff1d(ids, best, assume_unique=True)
        return np.sort(np.concatenate([best, generator(0, "fading", round).choice(others, drawn, replace=False)]))


def stretches(model: str) -> list[slice]:
    """Where each layer, weight and bias together, lies in the flat model."""
    shape = (1, 28, 28) if model == "mlp" else (3, 32, 32)
    layout = Layout.of(models.build(model, shape, 10))
    by_layer: dict[str, list[int]] = {}
    for piece in layout.pieces:
        by_layer.setdefault(piece.name.rpartition(".")[0], []).extend((piece.start, piece.stop))
    return [slice(min(ends), max(ends)) for ends in by_layer.values()]


Made = tuple[ModelFilter | None, Any]
VARIANTS: dict[str, Callable[[list[slice], int], Made]] = {
    "learned": lambda layers, rounds: (Mixing(), None),
    "from the best subset": lambda layers, rounds: (Mixing(start="subset"), None),
    "pulled to p, 0.01": lambda layers, rounds: (Mixing(pull=0.01), None),
    "pulled to p, 0.1": lambda layers, rounds: (Mixing(pull=0.1), None),
    "a weight per layer": lambda layers, rounds: (Mixing(layers=layers), None),
    "weights may be negative": lambda layers, rounds: (Mixing(free=True, drop=False), None),
    "nobody is dropped": lambda layers, rounds: (Mixing(drop=False), None),
    "until settled, 0.02": lambda layers, rounds: (Mixing(batch=200, settled=0.02), None),
    "until settled, 0.05": lambda layers, rounds: (Mixing(batch=200, settled=0.05), None),
    "batch 200": lambda layers, rounds: (Mixing(batch=200), None),
    "20 steps": lambda layers, rounds: (Mixing(steps=20), None),
    "10 steps": lambda layers, rounds: (Mixing(steps=10, rate=0.4), None),
    "batch 512": lambda layers, rounds: (Mixing(batch=512), None),
    "batch 128": lambda layers, rounds: (Mixing(batch=128), None),
    "rate 0.1": lambda layers, rounds: (Mixing(rate=0.1), None),
    "batch 200, 1.5 times as far": lambda layers, rounds: (Mixing(batch=200, length=1.5), None),
    "batch 200, twice as far": lambda layers, rounds: (Mixing(batch=200, length=2.0), None),
    "batch 200, as far as all move": lambda layers, rounds: (Mixing(batch=200, length="all"), None),
    "UCB, batch 200, as far as all move": lambda layers, rounds: (Mixing(batch=200, length="all"), UCBSampler()),
    "batch 200, 0.7 times as far": lambda layers, rounds: (Mixing(batch=200, length=0.7), None),
    "batch 200, and the last change": lambda layers, rounds: (Joined(), None),
    "batch 200, and others' last changes": lambda layers, rounds: (lambda sampler: (Joined(sampler), sampler))(
        Remembering()
    ),
    "batch 200, server momentum 0.5": lambda layers, rounds: (Mixing(batch=200, momentum=0.5), None),
    "server momentum 0.5": lambda layers, rounds: (Mixing(momentum=0.5), None),
    "server momentum 0.8": lambda layers, rounds: (Mixing(momentum=0.8), None),
    "nothing learned, server momentum 0.5": lambda layers, rounds: (Mixing(steps=0, drop=False, momentum=0.5), None),
    "nothing learned, server momentum 0.8": lambda layers, rounds: (Mixing(steps=0, drop=False, momentum=0.8), None),
    "server momentum 0.5, then 20 steps of SGD": lambda layers, rounds: (Mixing(momentum=0.5, tune=20), None),
    "UCB, server momentum 0.5": lambda layers, rounds: (Mixing(momentum=0.5), UCBSampler()),
    "20 steps, batch 256": lambda layers, rounds: (Mixing(steps=20, batch=256), None),
    "augmented batches": lambda layers, rounds: (Mixing(augment=True), None),
    "then 20 steps of SGD": lambda layers, rounds: (Mixing(tune=20), None),
    "nothing learned, then 40 steps of SGD": lambda layers, rounds: (
        Mixing(steps=0, drop=False, tune=40, tune_batch=200),
        None,
    ),
    "fine-tuned at 0.02": lambda layers, rounds: (FineTuning(LearnedAveraging(), rate=0.02), None),
    "fine-tuned at 0.05": lambda layers, rounds: (FineTuning(LearnedAveraging(), rate=0.05), None),
    "fine-tuned in 80 steps": lambda layers, rounds: (FineTuning(LearnedAveraging(), steps=80), None),
    "learned in 20 steps, fine-tuned in 20": lambda layers, rounds: (
        FineTuning(LearnedAveraging(steps=20), steps=20),
        None,
    ),
    "fine-tuned with augmented batches": lambda layers, rounds: (Augmented(LearnedAveraging()), None),
    "fine-tuned with augmented batches, 80 steps of 0.02": lambda layers, rounds: (
        Augmented(LearnedAveraging(), steps=80, rate=0.02),
        None,
    ),
    "learned and fine-tuned at once": lambda layers, rounds: (Together(), None),
    "learned and, after 20 steps, fine-tuned at once": lambda layers, rounds: (Together(wait=20), None),
    "UCB": lambda layers, rounds: (Mixing(), UCBSampler()),
    "UCB that fades": lambda layers, rounds: (Mixing(), FadingUCB(rounds)),
    "UCB that fades, server momentum 0.5": lambda layers, rounds: (Mixing(momentum=0.5), FadingUCB(rounds)),
    "UCB, fractional reward": lambda layers, rounds: (lambda mixing: (mixing, FractionalUCB(mixing)))(Mixing()),
    "UCB, discounted 0.9": lambda layers, rounds: (Mixing(), UCBSampler(memory=Memory(0.9))),
    "Thompson": lambda layers, rounds: (Mixing(), ThompsonSampler()),
    "Thompson, discounted 0.9": lambda layers, rounds: (Mixing(), ThompsonSampler(memory=Memory(0.9))),
}
WITH_MOMENTUM = ", server momentum 0.5"
NAMED = (
    *("fedavg", "fedpdp", "fedca", "fedcm-ucb", "fedcm-ts"),
    *("server-only", "fedpdp-finetune", "fedpdp-server-client", "fedsieve-finetune"),
    *(name + WITH_MOMENTUM for name in ("fedpdp-finetune", "fedsieve-finetune")),
)
"""The library's own, as they are or with momentum at the server."""


class Stopped(Exception):
    """The rounds that were asked for are played."""


class Stop(Callback):
    """Ends a run early, with the learning rates of a whole one."""

    def __init__(self, after: int | None) -> None:
        self.after, self.rows = after, list[Mapping[str, Any]]()

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.rows.append(row)
        if row["round"] == self.after:
            raise Stopped


def play(
    name: str, model: str, where: str, seed: int, changed: dict[str, Any], stop: int | None = None
) -> dict[str, Any]:
    """One run: its accuracies and what it took."""
    settings = COMMON | SETTINGS[model] | {"model": model, "heterogeneity": where, "seed": seed} | changed
    filter, sampler = None, None
    if name in VARIANTS:
        filter, sampler = VARIANTS[name](stretches(model), settings["rounds"])
    else:
        settings["algorithm"] = name.removesuffix(WITH_MOMENTUM)
        settings["server_momentum"] = 0.5 if name.endswith(WITH_MOMENTUM) else 0.0
    began = time.perf_counter()
    watch = Stop(stop)
    with suppress(Stopped):
        fs.run(fs.Config(**settings, workers=1), filter=filter, sampler=sampler, callbacks=[watch])
    search = [row["phases"].get("search", 0.0) for row in watch.rows]
    return {
        "name": name,
        "model": model,
        "heterogeneity": where,
        "seed": seed,
        "rounds": len(watch.rows),
        "accuracy": [round(row["test_accuracy"], 5) for row in watch.rows],
        **(
            {"unsmoothed": [round(row["unsmoothed_accuracy"], 5) for row in watch.rows]}
            if "smoothing" in changed
            else {}
        ),
        "seconds": round(time.perf_counter() - began, 1),
        "search_seconds_per_round": round(float(np.median(search)), 4),
        **({"steps": round(float(np.mean(filter.taken)), 1)} if isinstance(filter, Mixing) else {}),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Mean ± spread of the last ten rounds, and the paired difference from `learned`."""
    last = {
        (run["name"], run["heterogeneity"], run["seed"]): 100 * float(np.mean(run["accuracy"][-10:])) for run in runs
    }
    lines = ["| | class | | client | |", "|---|---:|---:|---:|---:|"]
    for name in dict.fromkeys(run["name"] for run in runs):
        cells = []
        for where in ("class", "client"):
            seeds = [seed for (who, het, seed) in last if who == name and het == where]
            cells.append(spread_of([last[name, where, seed] for seed in seeds]))
            known = [seed for seed in seeds if name != "learned" and ("learned", where, seed) in last]
            differences = [last[name, where, seed] - last["learned", where, seed] for seed in known]
            found = Interval.of(differences) if differences else None
            cells.append("" if found is None else f"{found.mean:+.1f} ± {found.high - found.mean:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def smoothing_table(runs: Sequence[dict[str, Any]]) -> str:
    """What the last model and the average over rounds come to: in the middle, at the end, and on the way."""
    lines = []
    for where in ("class", "client"):
        names = dict.fromkeys(run["name"] for run in runs)
        of = {name: [run for run in runs if (run["name"], run["heterogeneity"]) == (name, where)] for name in names}
        ends = [run["unsmoothed"][-1] for run in of.get("fedavg", [])]
        target = float(np.mean(ends)) if ends else math.inf
        lines += [
            f"| {where} | middle | smoothed | last 10 | smoothed | rounds to {100 * target:.1f} % | smoothed |",
            "|---" + "|---:" * 6 + "|",
        ]
        for name, some in of.items():
            rounds = len(some[0]["accuracy"])
            cells = []
            for part in (slice(rounds * 2 // 5, rounds * 3 // 5), slice(-10, None)):
                for what in ("unsmoothed", "accuracy"):
                    cells.append(spread_of([100 * float(np.mean(run[what][part])) for run in some]))
            for what in ("unsmoothed", "accuracy"):
                reached = [first for run in some if (first := rounds_to(target, run[what])) is not None]
                cells.append(f"{spread_of(reached)} ({len(reached)} of {len(some)})")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def smoothing_figure(runs: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy over rounds of the last model and of the average over rounds."""
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for where in ("class", "client"):
        for what, title in (("unsmoothed", "last model"), ("accuracy", "average over rounds")):
            panel = panels.setdefault(f"{where} heterogeneity, {title}", {})
            for run in runs:
                name = {"batch 200": "fedsieve"}.get(run["name"], run["name"])
                if run["heterogeneity"] == where and name in ("fedpdp", "fedca", "fedcm-ts", "fedsieve"):
                    panel.setdefault(name, []).append(run[what])
    figure = figures.accuracy_panels(panels, title="Handing out an average over rounds")
    figure.axes[0].set_ylim(bottom=50)
    return figure


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SETTINGS), default="mlp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--stop", type=int, metavar="N", help="play the first N rounds alone")
    parser.add_argument("--smoothing", type=float, help="hand out an average over rounds")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument(
        "--only", nargs="+", choices=[*VARIANTS, *NAMED], metavar="NAME", help="some of the table's lines"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mixing.json"))
    given = parser.parse_args()
    try:
        data.load(SETTINGS[given.model]["dataset"])
    except fs.FedSieveError as error:
        parser.error(str(error))
    known = json.loads(given.out.read_text()) if given.out.exists() else {"runs": []}
    done = {(run["name"], run["model"], run["heterogeneity"], run["seed"]) for run in known["runs"]}
    names = given.only or [*VARIANTS, *NAMED]
    jobs = [
        (name, given.model, where, seed)
        for seed in range(given.seeds)
        for where in ("class", "client")
        for name in names
        if (name, given.model, where, seed) not in done
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known |= {"command": f"python benchmarks/mixing.py --model {given.model}", "environment": environment(device)}
    changed = {name: value for name in ("rounds", "smoothing") if (value := getattr(given, name)) is not None}
    known["setting"] = COMMON | SETTINGS[given.model] | changed
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.at_once, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(play, *job, changed, given.stop) for job in jobs]
        for number, future in enumerate(as_completed(waiting), start=1):
            known["runs"].append(future.result())
            given.out.write_text(json.dumps(known) + "\n")
            run = known["runs"][-1]
            what = f"{run['name']}, {run['heterogeneity']}, seed {run['seed']}"
            print(f"{number}/{len(jobs)} {what}: {run['accuracy'][-1]:.3f}, {run['seconds']} s", flush=True)
    given.out.write_text(json.dumps(known) + "\n")
    runs = [run for run in known["runs"] if run["model"] == given.model]
    if given.smoothing is None:
        print(table(runs))
    else:
        print(smoothing_table(runs))
        print(style.save(smoothing_figure(runs), given.out.with_suffix(".png")))


if __name__ == "__main__":
    main()
