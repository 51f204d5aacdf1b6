"""How to train on the validation data after averaging: `FineTuning` by its steps, their size, and what they see.

    python benchmarks/fine_tuning.py [--model vgg11] [--seeds 3] [--first-seed N] [--at-once 2] [--only NAME ...]
        [--smoothing S] [--stop N] [--out FILE]

`vgg11` learns CIFAR-10, on a GPU; `mlp` learns Fashion-MNIST, on CPUs. A name says how many steps, on how many examples
each, at which rate, whether these are cropped and flipped as clients do with theirs, and whether weights are learned
before, or all models averaged as FedPdp does. What is run and printed: variants.py.
"""

from __future__ import annotations

from typing import Any

from variants import WITH_MOMENTUM, compare, momentum_of, stem

from fedsieve.filtering import LearnedAveraging, ModelFilter
from fedsieve.filtering.fine_tuning import FineTuning

AUGMENTED, AVERAGED = ", augmented", ", after FedPdp"
GRID = [
    f"{steps} x {batch} at {rate}{seen}{before}{momentum}"
    for steps, batch in ((40, 200), (80, 200), (100, 64), (200, 64), (400, 64))
    for rate in (0.01, 0.02, 0.05)
    for seen in ("", AUGMENTED)
    for before in ("", AVERAGED)
    for momentum in ("", WITH_MOMENTUM)
]


def make(name: str, model: str, rounds: int) -> tuple[ModelFilter | None, Any, float] | None:
    """The filter of a name of the grid."""
    if name not in GRID:
        return None
    steps, _, batch, _, rate = stem(name).partition(",")[0].split()
    before = None if AVERAGED in name else LearnedAveraging()
    return FineTuning(before, int(steps), int(batch), float(rate), AUGMENTED in name), None, momentum_of(name)


if __name__ == "__main__":
    compare(make, GRID, __doc__, "vgg11")
