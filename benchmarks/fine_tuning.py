"""How to train on the validation data after averaging: `FineTuning` by its steps, their size, and what they see.

    python benchmarks/fine_tuning.py [--model vgg11] [--seeds 3] [--first-seed N] [--at-once 2] [--only NAME ...]
        [--smoothing S] [--stop N] [--out FILE]

`vgg11` learns CIFAR-10, on a GPU; `mlp` learns Fashion-MNIST, on CPUs. A name says how many steps, on how many examples
each, at which rate (in each round they get smaller to nothing, unless they are "of one size"), whether these are
cropped and flipped as clients do with theirs, and whether weights are learned before, at once (each gradient moves
both), or not at all, all models being averaged as FedPdp does. Without --only what is kept is run with one change at a
time. What is run and printed: variants.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from variants import WITH_MOMENTUM, compare, momentum_of, stem

from fedsieve.clients.schedule import cosine
from fedsieve.filtering import Candidates, LearnedAveraging, ModelFilter, Selection
from fedsieve.filtering.fine_tuning import FineTuning
from fedsieve.filtering.learned import mixture
from fedsieve.filtering.steps import MOMENTUM


class Tuning(FineTuning):
    """Takes `steps`, perhaps `even` ones; `first` times as many in the first round."""

    def __init__(self, before: ModelFilter | None, steps: int, batch: int, rate: float, augment: bool) -> None:
        super().__init__(before, 0, batch, rate, augment)
        self.steps, self.even, self.first = steps, False, 1

    def step_count(self, examples: int) -> int:
        """Whatever there is to train on."""
        steps, self.first = self.steps * self.first, 1
        return steps

    def train(self, candidates: Candidates, model: Tensor, rates: Iterable[float], augment: bool = False) -> Tensor:
        """As the base does, or with the first of the rates throughout."""
        rates = list(rates)
        return super().train(candidates, model, rates[:1] * len(rates) if self.even else rates, augment)


class Together(LearnedAveraging):
    """Learns weights c and takes steps of SGD at once: each gradient, at Σ c_k w_k + d, moves both c and d.

    d stays 0 for the first `wait` steps; then its steps get smaller to nothing, with `ramp` after they got larger.
    """

    def __init__(self, steps: int, batch: int, tuning: float, augment: bool, wait: int, ramp: bool) -> None:
        super().__init__(steps, batch, rate=0.2 * max(1.0, 40 / steps))
        self.augment = augment
        some = range(1, steps - wait + 1)
        sizes = [math.sin(math.pi * (step - 0.5) / len(some)) if ramp else cosine(step, len(some)) for step in some]
        self.rates = [0.0] * wait + [tuning * size for size in sizes]

    def select(self, candidates: Candidates) -> Selection:
        """Those worth at least half of an equal share, averaged, and d."""
        assert candidates.score_and_gradient is not None and candidates.models is not None
        at_model, models = candidates.score_and_gradient, list(candidates.models)
        d, velocity = torch.zeros_like(models[0]), torch.zeros_like(models[0])
        rates = iter(self.rates)

        def moving(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
            crops = (self.draw_crops(candidates, examples),) if self.augment else ()
            score, gradient = at_model(model.add_(d), examples, *crops)
            if rate := next(rates):
                velocity.mul_(MOMENTUM).add_(gradient)
                d.add_(velocity, alpha=rate * candidates.pace)
            return score, gradient

        selection = super().select(replace(candidates, score_and_gradient=moving))
        assert selection.weights is not None
        return replace(selection, model=mixture(models, selection.weights).add_(d))


AUGMENTED, AVERAGED, EVEN, FIRST = ", augmented", ", after FedPdp", ", of one size", ", ten times as many at first"
SHAPES = [f"{steps} x {batch}" for steps, batch in ((40, 200), (80, 200), (100, 200), (100, 64), (200, 64), (400, 64))]
GRID = [
    f"{shape} at {rate}{''.join(more)}"
    for shape, rate in product(SHAPES, (0.01, 0.02, 0.05, 0.1))
    for more in product(*(("", one) for one in (AUGMENTED, EVEN, FIRST, AVERAGED, WITH_MOMENTUM)))
]
TOGETHER, WAIT, RAMP, BRIEF = ", at once", ", from the 11th step", ", first larger", ", weights in 16"
CHEAP = [f"{shape} x 200" for shape in (32, 40, 48)] + ["20 x 1000", "24 x 800", "25 x 1000", "30 x 500", "50 x 500"]
GRID += [
    f"{shape} at {rate}{AUGMENTED}{more}"
    for shape, rate in product(CHEAP, (0.1, 0.2, 0.3, 0.4))
    for more in (TOGETHER, TOGETHER + WAIT, TOGETHER + RAMP, BRIEF, AVERAGED)
]


def make(name: str, model: str, rounds: int) -> tuple[ModelFilter | None, Any, float] | None:
    """The filter of a name of the grid."""
    if name not in GRID:
        return None
    steps, _, batch, _, rate = stem(name).partition(",")[0].split()
    augment = AUGMENTED in name
    if TOGETHER in name:
        wait = 10 if WAIT in name else 0
        together = Together(int(steps), int(batch), float(rate), augment, wait, RAMP in name)
        return together, None, momentum_of(name)
    learned = LearnedAveraging(16, rate=0.4) if BRIEF in name else LearnedAveraging()
    before = None if AVERAGED in name else learned
    tuning = Tuning(before, int(steps), int(batch), float(rate), augment)
    tuning.even, tuning.first = EVEN in name, 10 if FIRST in name else 1
    return tuning, None, momentum_of(name)


if __name__ == "__main__":
    kept = f"100 x 200 at 0.1{AUGMENTED}"
    others = [f"100 x 200 at 0.05{AUGMENTED}", f"40 x 200 at 0.1{AUGMENTED}", "100 x 200 at 0.1"]
    changed = [kept + one for one in (EVEN, FIRST, AVERAGED, WITH_MOMENTUM)]
    compare(make, [kept, *others, *changed], __doc__, "vgg11", GRID)
