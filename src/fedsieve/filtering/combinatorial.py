"""The combinatorial model filter (Eq. 4): of all subsets of models, the one that scores best together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from fedsieve.errors import InvalidSetting, TooManyModels, unknown_name
from fedsieve.filtering.base import Candidates, ModelFilter, Selection

Score = Literal["accuracy", "cross-entropy"]
ScoredBy = Literal["logits", "weights"]

MOST_MODELS = 16
TIE_WIDTH = 1e-6
CHUNK_BYTES = 64 * 2**20


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of examples whose highest logit is the label's (the paper's Dirac delta score).

    `logits` [..., examples, classes], `labels` [examples] -> [...].
    """
    return (logits.argmax(-1) == labels).double().mean(-1)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean log-probability of the label under the softmax of the logits: minus the cross-entropy, so higher is better.

    `logits` [..., examples, classes], `labels` [examples] -> [...].
    """
    of_label = logits.gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return (of_label - logits.logsumexp(-1)).double().mean(-1)


class CombinatorialFilter(ModelFilter):
    """Keeps the subset whose averaged logits score best on the validation set, of all 2^n - 1 subsets.

    `score` is "accuracy" or "cross-entropy". Among subsets of equal score the one that drops fewer models wins, then
    the one with the lower client ids. `scored_by="weights"` scores the really averaged model of each subset instead of
    its averaged logits: one pass over the validation set per subset, so for a handful of models.
    """

    def __init__(self, score: Score = "accuracy", scored_by: ScoredBy = "logits") -> None:
        if score not in get_args(Score):
            raise unknown_name("score", score, get_args(Score))
        if scored_by not in get_args(ScoredBy):
            raise unknown_name("scored_by", scored_by, get_args(ScoredBy))
        self.score = score
        self.scored_by = scored_by
        self.needs_models = scored_by == "weights"

    def select(self, candidates: Candidates) -> Selection:
        """The best subset, by trying every one."""
        models = len(candidates.weights)
        if models == 0:
            raise InvalidSetting("candidates", 0, "at least one model")
        if models > MOST_MODELS:
            raise TooManyModels(
                f"candidates: {models} models are too many for the exhaustive search; use at most {MOST_MODELS} "
                "(a lower ratio or fewer clients)"
            )
        chunks = list(self._scores(candidates))
        subsets = torch.cat([subsets for subsets, _ in chunks])
        scores = torch.cat([scores for _, scores in chunks]).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        tied = scores >= scores.max() - TIE_WIDTH
        best = max(subsets[tied].tolist(), key=_preference)
        score = float(scores[subsets == best])
        return Selection(kept=tuple(k for k in range(models) if best >> k & 1), score=score)

    def _scores(self, candidates: Candidates) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of subsets, as bit masks [chunk] (bit k is model k), and their scores [chunk]."""
        score = accuracy if self.score == "accuracy" else log_likelihood
        models = len(candidates.weights)
        if self.scored_by == "weights":
            assert candidates.average is not None and candidates.predict is not None
            for subset in range(1, 2**models):
                kept = [k for k in range(models) if subset >> k & 1]
                logits = candidates.predict(candidates.average(kept))
                yield torch.tensor([subset]), score(logits, candidates.labels).reshape(1)
            return
        logits = candidates.logits
        counts = torch.ones(models) if candidates.counts is None else candidates.counts
        chunk = max(1, CHUNK_BYTES // (4 * logits[0].numel()))
        for subsets in torch.split(torch.arange(1, 2**models, device=logits.device), chunk):
            members = subsets.unsqueeze(1) >> torch.arange(models, device=logits.device) & 1
            shares = (members * counts.to(logits.device)).to(logits.dtype)
            total = shares @ logits.flatten(1)
            # The highest logit of a sum is that of the mean: without the division, equal verdicts stay equal.
            mean = total if self.score == "accuracy" else total / shares.sum(1, keepdim=True)
            yield subsets, score(mean.view(-1, *logits.shape[1:]), candidates.labels)


def _preference(subset: int) -> tuple[int, list[int]]:
    """More models first, then the lowest ids (as positions, negated so that lower is greater)."""
    kept = [position for position in range(subset.bit_length()) if subset >> position & 1]
    return len(kept), [-position for position in kept]
