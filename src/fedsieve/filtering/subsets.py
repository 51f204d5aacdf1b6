"""The problem that every search solves: of all subsets of models, find the one whose averaged logits score best.

Everything is in terms of margins, by how much a model prefers a class to the label: the label wins an example when
every other class's margin, summed over the subset, is negative; and its log-likelihood is -log Σ_c exp(mean margin).
Margins and sums of them are kept in double precision, so that what is equal in mathematics is equal here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.filtering.scores import Score, log_likelihood

TIE_WIDTH = 1e-9
"""Scores, and summed logits of two classes, closer than this are equal: rounding must not decide between equals."""


@dataclass(frozen=True)
class Found:
    """The subset a search settled for, as ascending positions, and what is known about it.

    `looked_at` subsets were scored. `optimal` says that no subset scores higher. `bound`, where there is one, is a
    score that no subset can exceed.
    """

    members: tuple[int, ...]
    score: float
    looked_at: int
    optimal: bool
    bound: float | None


class Problem:
    """Finite `logits` [models, examples, classes] with their `labels` [examples], to be scored by `score`.

    `counts` [models] says how often each model counts in a mean (a client drawn twice counts twice).
    """

    def __init__(self, logits: Tensor, labels: Tensor, score: Score, counts: Tensor | None = None) -> None:
        self.logits = logits
        self.labels = labels
        self.score = score
        self.counts = torch.ones(len(logits), dtype=torch.int64) if counts is None else counts.cpu().to(torch.int64)

    @property
    def models(self) -> int:
        """How many there are to choose from."""
        return len(self.logits)

    @property
    def device(self) -> torch.device:
        """Where the logits lie, and all work is done."""
        return self.logits.device

    def score_of(self, members: Sequence[int]) -> float:
        """The score of one subset, straight from its definition (Eq. 4)."""
        chosen = sorted(members)
        part = Problem(self.logits[chosen], self.labels, self.score, self.counts[chosen])
        if self.score == "accuracy":
            margins, wins_ties = part.margins()
            return float(label_wins(margins.sum(0), wins_ties).double().mean())
        shares = part.counts.double() / part.counts.sum()
        mean = torch.tensordot(shares.to(self.device), part.logits.double(), 1)
        return float(log_likelihood(mean, self.labels))

    def margins(self) -> tuple[Tensor, Tensor]:
        """Margins [models, examples, classes - 1] of the other classes over the label, times the model's count.

        The second is whether the class wins a tie with the label, being lower: [examples, classes - 1].
        """
        models, examples, classes = self.logits.shape
        every = torch.arange(classes, device=self.device).expand(examples, classes)
        other = every[every != self.labels.unsqueeze(1)].view(examples, classes - 1)
        counted = self.logits.double() * self.counts.to(self.device).double().view(-1, 1, 1)
        of_label = counted.gather(2, self.labels.view(1, -1, 1).expand(models, examples, 1))
        margins = counted.gather(2, other.expand(models, examples, classes - 1)) - of_label
        return margins, other < self.labels.unsqueeze(1)


def label_wins(sums: Tensor, wins_ties: Tensor) -> Tensor:
    """Where the label beats every class: summed margins [..., examples, classes] -> [..., examples]."""
    return torch.where(wins_ties, sums < -TIE_WIDTH, sums <= TIE_WIDTH).all(-1)


def preference(subsets: NDArray[np.int64], models: int) -> NDArray[np.int64]:
    """Which of equally good subsets (bit k of a number is model k) to take, higher first: [n] -> [n].

    The one that drops fewest models; then the one with the lowest ids.
    """
    members = subsets[:, None] >> np.arange(models) & 1
    lowest_first: NDArray[np.int64] = members @ (1 << np.arange(models)[::-1])
    most_first: NDArray[np.int64] = members.sum(1) << models
    return most_first + lowest_first


def members_of(subset: int) -> tuple[int, ...]:
    """The positions of the bits of a number, ascending."""
    return tuple(position for position in range(subset.bit_length()) if subset >> position & 1)


def subset_sums(values: Tensor) -> Tensor:
    """Sums of all subsets along the first dimension: [n, ...] -> [2^n, ...], subset s at place s."""
    sums = values.new_zeros(2 ** len(values), *values.shape[1:])
    for position, value in enumerate(values):
        torch.add(sums[: 2**position], value, out=sums[2**position : 2 ** (position + 1)])
    return sums
