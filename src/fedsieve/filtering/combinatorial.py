"""The combinatorial model filter (Eq. 4): of all subsets of models, the one that scores best together."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import InvalidSetting, TooManyModels, unknown_name
from fedsieve.filtering import beam_search, branch_and_bound, exhaustive
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.scores import Score, accuracy, log_likelihood
from fedsieve.filtering.subsets import TIE_WIDTH, Found, Problem, members_of, preference

ScoredBy = Literal["logits", "weights"]
Search = Literal["auto", "exhaustive", "branch-and-bound", "beam"]

EXHAUSTIVE_UP_TO = {"cpu": 16, "cuda": 20}
"""Where trying all subsets takes a second or two on two cores, a sixth of a second on a large GPU."""

BRANCH_UP_TO = 32
AUTO_NODES = 300
MOST_WEIGHTED_MODELS = 12


class CombinatorialFilter(ModelFilter):
    """Keeps the subset whose averaged logits score best on the validation set.

    `score` is "accuracy" or "cross-entropy". `search` says how the best of the 2^n - 1 subsets is looked for:

    - "exhaustive": all of them; up to 24 models. Exact. Of equal scores the subset that drops fewer models wins,
      then the one with the lower client ids.
    - "branch-and-bound": exact without looking at all; fast for cross-entropy, for accuracy little better than
      exhaustive.
    - "beam": any number of models; a very good subset, with cross-entropy a proven bound on the best.
    - "auto": exhaustive up to 16 models (20 on a GPU); then, up to 32 models and with cross-entropy, branch-and-bound
      that settles after 300 nodes; else beam.

    The same logits give the same subset. Only with `seconds`, which ends branch-and-bound and beam with the best subset
    so far, the result may depend on the machine.

    A model with NaN or infinity among its logits is left out. `scored_by="weights"` scores the really averaged model
    of each subset instead of its averaged logits: one pass over the validation set per subset, so for a handful.
    """

    def __init__(
        self,
        score: Score = "accuracy",
        scored_by: ScoredBy = "logits",
        search: Search = "auto",
        seconds: float | None = None,
    ) -> None:
        for field, value, names in (
            ("score", score, get_args(Score)),
            ("scored_by", scored_by, get_args(ScoredBy)),
            ("search", search, get_args(Search)),
        ):
            if value not in names:
                raise unknown_name(field, value, names)
        if seconds is not None and not seconds > 0:
            raise InvalidSetting("seconds", seconds, "a number above 0")
        self.score = score
        self.scored_by = scored_by
        self.search = search
        self.seconds = seconds
        self.needs_models = scored_by == "weights"
        searched = exhaustive.MOST_MODELS if search == "exhaustive" else None
        self.most_models = MOST_WEIGHTED_MODELS if self.needs_models else searched

    def select(self, candidates: Candidates) -> Selection:
        """The best subset found, and what is known about it."""
        finite = candidates.logits.isfinite().flatten(1).all(1).cpu()
        usable = torch.nonzero(finite).flatten()
        if len(usable) == 0:
            raise InvalidSetting("candidates", len(finite), "at least one model with finite logits")
        if self.scored_by == "weights":
            found = self._by_weights(candidates, usable.tolist())
        else:
            counts = None if candidates.counts is None else candidates.counts.cpu()[usable]
            logits = candidates.logits if bool(finite.all()) else candidates.logits[usable.to(candidates.logits.device)]
            found = self._find(Problem(logits, candidates.labels, self.score, counts))
        kept = tuple(int(usable[member]) for member in found.members)
        everyone, single = self._for_comparison(candidates, usable)
        return Selection(
            kept,
            found.score,
            looked_at=found.looked_at,
            optimal=found.optimal,
            bound=found.bound,
            all=everyone,
            single=single,
        )

    def _for_comparison(self, candidates: Candidates, usable: Tensor) -> tuple[float, float]:
        """The score of all usable models' averaged logits, and the best score of one model."""
        score = accuracy if self.score == "accuracy" else log_likelihood
        counts = [1] * len(candidates.logits) if candidates.counts is None else candidates.counts.tolist()
        total, alone = torch.zeros_like(candidates.logits[0], dtype=torch.float64), []
        for member in usable.tolist():
            logits = candidates.logits[member].double()
            total += counts[member] * logits
            alone.append(score(logits, candidates.labels))
        together = total / sum(counts[member] for member in usable.tolist())
        return float(score(together, candidates.labels)), float(torch.stack(alone).max())

    def _find(self, problem: Problem) -> Found:
        exact = problem.score == "cross-entropy" and problem.models <= BRANCH_UP_TO
        match self.search:
            case "exhaustive":
                return exhaustive.search(problem)
            case "branch-and-bound":
                return branch_and_bound.search(problem, seconds=self.seconds)
            case "auto" if problem.models <= EXHAUSTIVE_UP_TO.get(problem.device.type, 16):
                return exhaustive.search(problem)
            case "auto" if exact:
                return branch_and_bound.search(problem, most_nodes=AUTO_NODES, seconds=self.seconds)
            case _:
                return beam_search.search(problem, seconds=self.seconds)

    def _by_weights(self, candidates: Candidates, usable: list[int]) -> Found:
        assert candidates.average is not None and candidates.predict is not None
        if len(usable) > MOST_WEIGHTED_MODELS:
            raise TooManyModels(
                f"candidates: {len(usable)} models are too many to score averaged weights; "
                f"use at most {MOST_WEIGHTED_MODELS}, or scored_by='logits'"
            )
        score = accuracy if self.score == "accuracy" else log_likelihood
        scores = np.full(2 ** len(usable), -np.inf)
        for subset in range(1, len(scores)):
            model = candidates.average([usable[member] for member in members_of(subset)])
            scores[subset] = float(score(candidates.predict(model), candidates.labels))
        scores = np.nan_to_num(scores, nan=-np.inf)
        tied = np.flatnonzero(scores >= scores.max() - TIE_WIDTH)
        best = int(tied[preference(tied, len(usable)).argmax()])
        score_of_best = float(scores[best])
        return Found(members_of(best), score_of_best, len(scores) - 1, optimal=True, bound=score_of_best)
