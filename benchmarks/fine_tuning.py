"""How to train on the validation data after averaging: `FineTuning` by its steps, their size, and what they see.

    python benchmarks/fine_tuning.py [--model vgg11] [--seeds 3] [--first-seed N] [--at-once 2] [--only NAME ...]
        [--smoothing S] [--stop N] [--out FILE]

`vgg11` learns CIFAR-10, on a GPU; `mlp` learns Fashion-MNIST, on CPUs. A name says how many steps, on how many examples
each, at which rate (in each round they get smaller to nothing, unless they are "of one size"), whether these are
cropped and flipped as clients do with theirs, and whether weights are learned before, or all models averaged as FedPdp
does. Without --only what is kept is run with one change at a time. What is run and printed: variants.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from torch import Tensor
from variants import WITH_MOMENTUM, compare, momentum_of, stem

from fedsieve.filtering import Candidates, LearnedAveraging, ModelFilter
from fedsieve.filtering.fine_tuning import FineTuning


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


AUGMENTED, AVERAGED, EVEN, FIRST = ", augmented", ", after FedPdp", ", of one size", ", ten times as many at first"
SHAPES = [f"{steps} x {batch}" for steps, batch in ((40, 200), (80, 200), (100, 200), (100, 64), (200, 64), (400, 64))]
GRID = [
    f"{shape} at {rate}{''.join(more)}"
    for shape, rate in product(SHAPES, (0.01, 0.02, 0.05, 0.1))
    for more in product(*(("", one) for one in (AUGMENTED, EVEN, FIRST, AVERAGED, WITH_MOMENTUM)))
]


def make(name: str, model: str, rounds: int) -> tuple[ModelFilter | None, Any, float] | None:
    """The filter of a name of the grid."""
    if name not in GRID:
        return None
    steps, _, batch, _, rate = stem(name).partition(",")[0].split()
    before = None if AVERAGED in name else LearnedAveraging()
    tuning = Tuning(before, int(steps), int(batch), float(rate), AUGMENTED in name)
    tuning.even, tuning.first = EVEN in name, 10 if FIRST in name else 1
    return tuning, None, momentum_of(name)


if __name__ == "__main__":
    kept = f"100 x 200 at 0.1{AUGMENTED}"
    others = [f"100 x 200 at 0.05{AUGMENTED}", f"40 x 200 at 0.1{AUGMENTED}", "100 x 200 at 0.1"]
    changed = [kept + one for one in (EVEN, FIRST, AVERAGED, WITH_MOMENTUM)]
    compare(make, [kept, *others, *changed], __doc__, "vgg11", GRID)
