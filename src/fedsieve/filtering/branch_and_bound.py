"""Exact search that leaves out what can't be best.

Cross-entropy: subsets of each size k are a tree of decisions, keep or drop a model. Under a node, members have weight
1/k and the undecided at most that, so the concave relaxation bounds every subset below it; a node whose bound is under
the best score found is never opened. Real rounds are decided after dozens to thousands of nodes, for 20 to 50 models.

Accuracy: no bound of that strength is known to us. Models are decided one by one; examples on which the undecided can
no longer change the verdict are dropped, and when few models are left all their subsets are counted at once.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedsieve.filtering import beam_search, exhaustive
from fedsieve.filtering.relaxation import Relaxation, Vector, newton_step, project
from fedsieve.filtering.subsets import TIE_WIDTH, Found, Problem, members_of

LEAF_MODELS = 12


def search(problem: Problem, *, most_nodes: int | None = None, seconds: float | None = None) -> Found:
    """The best subset, proven so unless `most_nodes` or `seconds` ran out first.

    Among subsets of equal score it may return another than the exhaustive search does.
    """
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    nodes = most_nodes or 2**62
    begin = beam_search.search(problem, seconds=seconds)
    if problem.score == "accuracy":
        return _AccuracySearch(problem, begin, nodes, deadline).run()
    return _LikelihoodSearch(problem, begin, nodes, deadline).run()


@dataclass(order=True)
class _Node:
    """Subsets of total count `size` that hold all `members` and otherwise only `undecided`; best bound first."""

    rank: float
    size: int = field(compare=False)
    members: list[int] = field(compare=False)
    undecided: list[int] = field(compare=False)
    point: Vector = field(compare=False)
    order: int = 0


class _LikelihoodSearch:
    def __init__(self, problem: Problem, begin: Found, most_nodes: int, deadline: float) -> None:
        self.problem, self.most_nodes, self.deadline = problem, most_nodes, deadline
        self.relaxation = Relaxation(problem)
        self.counts = problem.counts.double().numpy()
        self.best, self.score, self.looked_at = begin.members, begin.score, begin.looked_at
        self.open: list[_Node] = []
        self.made = 0

    def run(self) -> Found:
        everyone = list(range(self.problem.models))
        _, point = self.relaxation.maximise()
        curvature = self.relaxation.curvature(point)
        for size in range(1, int(self.counts.sum()) + 1):
            self._open(size, [], everyone, point, np.inf, curvature)
        opened = 0
        while self.open and -self.open[0].rank > self.score + TIE_WIDTH:
            if opened >= self.most_nodes or time.monotonic() > self.deadline:
                return Found(self.best, self.score, self.looked_at, optimal=False, bound=-self.open[0].rank)
            opened += 1
            node = heapq.heappop(self.open)
            shares = node.point[node.undecided] * node.size / self.counts[node.undecided]
            split = node.undecided[int(np.abs(shares - 0.5).argmin())]
            rest = [model for model in node.undecided if model != split]
            curvature = self.relaxation.curvature(node.point)
            self._open(node.size, [*node.members, split], rest, node.point, -node.rank, curvature)
            self._open(node.size, node.members, rest, node.point, -node.rank, curvature)
        return Found(self.best, self.score, self.looked_at, optimal=True, bound=self.score)

    def _open(
        self, size: int, members: list[int], undecided: list[int], point: Vector, bound: float, curvature: Vector
    ) -> None:
        """Put the node among the open ones unless its bound rules it out or it has one subset only."""
        missing = size - self.counts[members].sum()
        there = self.counts[undecided].sum()
        if missing < 0 or missing > there:
            return
        if missing == 0 or missing == there:
            self._consider(members if missing == 0 else members + undecided)
            return
        bound, point = self._bound(size, members, undecided, point, bound, curvature)
        if bound > self.score + TIE_WIDTH:
            self.made += 1
            heapq.heappush(self.open, _Node(-bound, size, members, undecided, point, self.made))

    def _bound(
        self, size: int, members: list[int], undecided: list[int], point: Vector, bound: float, curvature: Vector
    ) -> tuple[float, Vector]:
        """An upper bound on every subset of the node, and the point it was found at."""
        low, high = np.zeros(len(self.counts)), np.zeros(len(self.counts))
        low[members] = high[members] = self.counts[members] / size
        high[undecided] = self.counts[undecided] / size
        point = project(point, low, high)
        for _ in range(4):
            here = self.relaxation.tangent(point)
            bound = min(bound, self._highest_mean(here.values, size, members, undecided))
            if bound <= self.score + TIE_WIDTH or here.score > self.score + TIE_WIDTH:
                break  # ruled out, or can't be
            point = newton_step(here.gradient, curvature, point, low, high)
        return bound, point

    def _highest_mean(self, values: Vector, size: int, members: list[int], undecided: list[int]) -> float:
        """The highest mean value of a subset of this size: its members, and the best of the undecided (one in part)."""
        order = np.array(undecided)[np.argsort(-values[undecided])]
        counts = self.counts[order]
        missing = size - self.counts[members].sum()
        taken = np.clip(missing - (np.cumsum(counts) - counts), 0, counts)
        return float((self.counts[members] @ values[members] + taken @ values[order]) / size)

    def _consider(self, members: list[int]) -> None:
        self.looked_at += 1
        score = self.problem.score_of(members)
        if score > self.score + TIE_WIDTH:
            self.best, self.score = tuple(sorted(members)), score


class _AccuracySearch:
    def __init__(self, problem: Problem, begin: Found, most_nodes: int, deadline: float) -> None:
        self.problem, self.most_nodes, self.deadline = problem, most_nodes, deadline
        self.best, self.looked_at = begin.members, begin.looked_at
        self.correct = round(begin.score * len(problem.labels))
        margins, self.wins_ties = problem.margins()
        self.order = margins.abs().sum((1, 2)).argsort(descending=True).tolist()  # the loudest are decided first
        self.margins = margins[self.order]
        self.opened = 0
        self.complete = True

    def run(self) -> Found:
        self._visit(0, (), self.margins, self.wins_ties, torch.zeros_like(self.margins[0]), 0)
        score = self.problem.score_of(self.best)
        return Found(self.best, score, self.looked_at, self.complete, score if self.complete else None)

    def _visit(
        self, depth: int, kept: tuple[int, ...], margins: Tensor, wins_ties: Tensor, start: Tensor, right: int
    ) -> None:
        """All subsets that begin with `kept`; `margins` are those of the undecided models on the examples left."""
        self.opened += 1
        if self.opened > self.most_nodes or time.monotonic() > self.deadline:
            self.complete = False
            return
        live, settled = exhaustive.unsettled(margins, wins_ties, start)
        right += settled
        chosen = live.any(1)
        if right + int(chosen.sum()) <= self.correct and self.best:
            return
        margins, wins_ties, start = margins[:, chosen], wins_ties[chosen], start[chosen]
        if len(margins) <= LEAF_MODELS:
            self._count(depth, kept, margins, wins_ties, start, right)
            return
        self._visit(depth + 1, (*kept, depth), margins[1:], wins_ties, start + margins[0], right)
        self._visit(depth + 1, kept, margins[1:], wins_ties, start, right)

    def _count(
        self, depth: int, kept: tuple[int, ...], margins: Tensor, wins_ties: Tensor, start: Tensor, right: int
    ) -> None:
        self.looked_at += 2 ** len(margins) - (not kept)
        subset, top = exhaustive.most_correct(margins, wins_ties, self.correct - right, start, empty_too=bool(kept))
        if top + right > self.correct:
            low = tuple(depth + bit for bit in members_of(subset))
            self.correct, self.best = top + right, tuple(sorted(self.order[place] for place in (*kept, *low)))
