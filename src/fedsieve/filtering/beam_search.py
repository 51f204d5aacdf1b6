"""A very good subset of any number of models, quickly: several beams, then a short tabu walk.

A beam goes from no model upwards or from all models downwards, one model at a time, and takes the best few subsets of
each size along. It ranks them on a sample of the examples, which makes it wide for its price, and every beam has
another sample, so that they err differently. The best subsets of all beams and sizes are scored on all examples; from
the best of them a tabu search (Glover 1989) adds and removes single models. Nothing depends on time unless `seconds` is
given: the same logits give the same subset. For cross-entropy the concave relaxation proves how good any could be.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.filtering.exhaustive import count_passes
from fedsieve.filtering.relaxation import Relaxation
from fedsieve.filtering.subsets import TIE_WIDTH, Found, Problem, label_wins
from fedsieve.randomness import generator

Members = NDArray[np.bool_]

BEAMS = {"accuracy": 8, "cross-entropy": 2}
"""At most; half of them go downwards, half upwards. Accuracy is the more rugged of the two."""

WIDTH = {"accuracy": 128, "cross-entropy": 64}
"""Subsets of each size that a beam takes along, at most; fewer when there are many models."""

SAMPLE = {"accuracy": 400, "cross-entropy": 500}
"""Examples on which a beam ranks: evenly spaced, and others for every beam."""

FINALISTS = 100
"""Subsets from each beam that are scored on all examples."""

NEARLY_EQUAL = 8
"""Subsets, the best in single precision, that are scored in double precision: by accuracy, rounding may break ties."""

LARGEST_EXPONENT = 40.0
"""Where mean margins are cut off in the ranking, so that a product of two exponentials fits single precision."""


def search(problem: Problem, *, seconds: float | None = None) -> Found:
    """The best subset seen; for cross-entropy with a proven bound on how good any could be."""
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    exact, wins_ties = problem.margins()
    margins = exact.clamp(-1e30, 1e30).float()
    if problem.score == "accuracy":  # sums of 0 are ties; a little more or less says who wins them
        margins += torch.where(wins_ties, 1e-6, -1e-6)
    scorer = _Scorer(margins, problem)
    width = int(np.clip(WIDTH[problem.score] * 2**12 // problem.models**2, 8, WIDTH[problem.score]))
    every = max(1, len(problem.labels) // SAMPLE[problem.score])
    beams = int(np.clip(256 // problem.models, 2, BEAMS[problem.score]))
    samples = [_Scorer(margins[:, turn * every // beams :: every], problem) for turn in range(beams)]
    ends = [_beam(sample, width, turn % 2 == 1, deadline) for turn, sample in enumerate(samples)]

    def best_of(members: Members) -> tuple[Members, float]:
        few, scores = scorer.best_of(members, NEARLY_EQUAL)
        if problem.score == "accuracy":
            sums = torch.tensordot(torch.from_numpy(few).to(exact), exact, 1)
            scores = label_wins(sums, wins_ties).double().mean(1)
        best = int(scores.argmax())
        return few[best], float(scores[best])

    top, score = best_of(np.unique(np.concatenate(ends), axis=0))
    walk = _walk(scorer, top, max(20, problem.models // 4), deadline)
    top, score = max((top, score), best_of(walk), key=lambda found: found[1])
    members = tuple(np.flatnonzero(top).tolist())
    score, looked_at = problem.score_of(members), scorer.looked_at + sum(sample.looked_at for sample in samples)
    if problem.score == "accuracy":
        return Found(members, score, looked_at, optimal=False, bound=None)
    bound, _ = Relaxation(problem).maximise(tolerance=1e-3)
    return Found(members, score, looked_at, optimal=bound <= score + TIE_WIDTH, bound=max(bound, score))


def _beam(scorer: _Scorer, width: int, upwards: bool, deadline: float) -> Members:
    """The `FINALISTS` best subsets [k, models] seen on the way from no model to all (upwards), or from all to one."""
    models = scorer.models
    names = generator(0, "names of models").integers(2**63, size=models)  # a subset's name: its members' names, xored
    members, name = np.full((1, models), not upwards), np.zeros(1, dtype=np.int64)
    sums = scorer.margins.sum(1, keepdim=True) * (not upwards)  # [classes - 1, subsets, examples]
    sign = 1 if upwards else -1
    seen, scores_seen = [np.ones((1, models), dtype=bool)], [np.array([np.inf])]
    for _ in range(models - 1):
        if time.monotonic() > deadline:
            break
        scores = scorer.after_change(sums, np.full(models, float(sign)), members @ scorer.counts)
        parent, changed = np.nonzero(members != upwards)
        _, once = np.unique(name[parent] ^ names[changed], return_index=True)  # what two parents have in common: once
        parent, changed = parent[once], changed[once]
        order = np.argsort(-scores[parent, changed], kind="stable")[: max(width, FINALISTS)]
        parent, changed = parent[order], changed[order]
        children = members[parent]
        children[np.arange(len(order)), changed] = upwards
        seen.append(children)
        scores_seen.append(scores[parent, changed])
        parent, changed, members = parent[:width], changed[:width], children[:width]
        name = name[parent] ^ names[changed]
        sums = sums[:, parent] + sign * scorer.margins[:, changed]
    order = np.argsort(-np.concatenate(scores_seen), kind="stable")[:FINALISTS]
    finalists: Members = np.concatenate(seen)[order]
    return finalists


def _walk(scorer: _Scorer, members: Members, moves: int, deadline: float) -> Members:
    """The subsets [k, models] on a tabu walk: to the best neighbour, better or not, but not soon back."""
    members, visited = members.copy(), [members.copy()]
    sums = scorer.margins[:, members].sum(1, keepdim=True)
    free_again, best = np.zeros(scorer.models, dtype=int), -np.inf
    tenure = generator(0, "tabu tenure").integers(2, 4 + scorer.models // 8, size=moves)
    for move in range(moves):
        if time.monotonic() > deadline:
            break
        signs = np.where(members, -1.0, 1.0)
        scores = scorer.after_change(sums, signs, members[None] @ scorer.counts)[0]
        if members.sum() == 1:
            scores[members] = -np.inf
        scores = np.where((free_again <= move) | (scores > best), scores, -np.inf)
        model = int(scores.argmax())
        if scores[model] == -np.inf:
            break
        best = max(best, float(scores[model]))
        sums = sums + signs[model] * scorer.margins[:, model : model + 1]
        members[model] ^= True
        free_again[model] = move + 1 + tenure[move]
        visited.append(members.copy())
    return np.array(visited)


class _Scorer:
    """Scores many subsets at once, in single precision, on some of the examples."""

    def __init__(self, margins: Tensor, problem: Problem) -> None:
        self.margins = margins.permute(2, 0, 1).contiguous()  # [classes - 1, models, examples]
        self.models = problem.models
        self.counts = problem.counts.numpy()
        self.by_accuracy = problem.score == "accuracy"
        self.looked_at = 0

    def best_of(self, members: Members, few: int) -> tuple[Members, Tensor]:
        """The best `few` of the subsets [k, models], best first, and their scores."""
        self.looked_at += len(members)
        scores = []
        for part in np.array_split(members, -(-len(members) // 64)):
            chosen = torch.from_numpy(part).to(self.margins)
            sums = torch.stack([chosen @ of_class for of_class in self.margins], 1)  # [k, classes - 1, examples]
            if self.by_accuracy:
                scores.append((sums.amax(1) <= 0).float().mean(1))
            else:
                sums /= torch.from_numpy(part @ self.counts).to(self.margins).view(-1, 1, 1)
                highest = sums.amax(1).clamp(min=0)
                total = (sums - highest.unsqueeze(1)).exp().sum(1) + (-highest).exp()
                scores.append(-(highest + total.log()).mean(1))
        best, places = torch.cat(scores).sort(descending=True, stable=True)
        return members[places[:few].cpu().numpy()], best[:few]

    def after_change(self, sums: Tensor, signs: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """About the score of subsets with `sums` [classes - 1, k, examples] after each single change: [k, models].

        A model is added (sign 1) or dropped (-1); `sizes` [k] are those of the subsets before. Good for ranking:
        accuracy compares margins coarsened to bytes, as the exhaustive search does, and cross-entropy cuts them off.
        """
        self.looked_at += sums.shape[1] * self.models
        changes = self.margins * torch.from_numpy(signs).to(self.margins).view(1, -1, 1)
        if self.by_accuracy:
            lowest, highest = changes.amin(1, keepdim=True), changes.amax(1, keepdim=True)
            unit = (highest - lowest).clamp(min=1e-6) / 253
            low, high = (((x - lowest) / unit + 1).clamp_(0, 255).to(torch.uint8) for x in (changes, -sums))
            return count_passes(low, high).double().cpu().numpy() / sums.shape[2]
        scores = torch.empty(sums.shape[1], self.models, device=sums.device)
        steps = signs * self.counts
        for size, step in product(np.unique(sizes), np.unique(steps)):
            subsets, models = np.flatnonzero(sizes == size).tolist(), np.flatnonzero(steps == step).tolist()
            after = max(size + step, 1.0)
            of_sums, of_changes = (
                (x / after).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp().permute(2, 1, 0)
                for x in (sums[:, subsets], changes[:, models])
            )
            total = torch.bmm(of_sums, of_changes.transpose(1, 2)).add_(1)  # [examples, subsets, models]
            scores[np.ix_(subsets, models)] = -total.log_().mean(0)
        return scores.double().cpu().numpy()
