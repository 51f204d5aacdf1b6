"""Which way of learning mixing weights is best: `LearnedAveraging`, and changes of it one at a time.

    python benchmarks/mixing.py [--model mlp] [--seeds 3] [--at-once 2] [--only NAME ...] [--smoothing S] [--stop N]
        [--out FILE]

`mlp` learns Fashion-MNIST, on CPUs; `cnn` and `vgg11` learn CIFAR-10, on a GPU. What is run and printed: variants.py.
What is kept here but not in the library did not help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from variants import compare

from fedsieve import models
from fedsieve.filtering import CombinatorialFilter, LearnedAveraging
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.fine_tuning import FineTuning
from fedsieve.filtering.geometric_median import shares_of
from fedsieve.momentum import ServerMomentum
from fedsieve.randomness import generator
from fedsieve.sampling import Feedback, ThompsonSampler, UCBSampler, UniformSampler
from fedsieve.sampling.base import Ids, sorted_ids
from fedsieve.sampling.memory import Memory
from fedsieve.vector import Layout


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
        self.tune, self.augment = FineTuning(None, batch=tune_batch) if tune else None, augment
        self.rates = [0.01] * tune
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
            model = self.tune.train(candidates, model, self.rates)
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
        examples = self.draw(candidates)
        moved = (self.draw_crops(candidates, examples),) if self.augment else ()
        return candidates.score_and_gradient(model, examples, *moved)[1]

    def _mixture(self, held: Sequence[Tensor], weights: Tensor) -> Tensor:
        total = torch.zeros_like(held[0])
        for row, part in zip(weights.to(total.dtype), self.layers, strict=True):
            for model, weight in zip(held, row, strict=True):
                total[part].addcmul_(model[part], weight)
        return total


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


VARIANTS: dict[str, Callable[[list[slice], int], tuple[ModelFilter | None, Any]]] = {
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
    "UCB": lambda layers, rounds: (Mixing(), UCBSampler()),
    "UCB that fades": lambda layers, rounds: (Mixing(), FadingUCB(rounds)),
    "UCB that fades, server momentum 0.5": lambda layers, rounds: (Mixing(momentum=0.5), FadingUCB(rounds)),
    "UCB, fractional reward": lambda layers, rounds: (lambda mixing: (mixing, FractionalUCB(mixing)))(Mixing()),
    "UCB, discounted 0.9": lambda layers, rounds: (Mixing(), UCBSampler(memory=Memory(0.9))),
    "Thompson": lambda layers, rounds: (Mixing(), ThompsonSampler()),
    "Thompson, discounted 0.9": lambda layers, rounds: (Mixing(), ThompsonSampler(memory=Memory(0.9))),
}


def make(name: str, model: str, rounds: int) -> tuple[ModelFilter | None, Any, float] | None:
    """A variant's filter, with momentum of its own, and sampler."""
    return (*VARIANTS[name](stretches(model), rounds), 0.0) if name in VARIANTS else None


if __name__ == "__main__":
    compare(make, list(VARIANTS), __doc__)
