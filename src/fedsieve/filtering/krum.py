"""Models that lie close to many others: Krum and Multi-Krum (Blanchard et al. 2017), Bulyan (El Mhamdi et al. 2018)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import TooFewUpdates
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.byzantine import count_of, liars_among
from fedsieve.filtering.stack import Stack, Vector, middle


class MultiKrum(ModelFilter):
    """The plain mean of the `keep` models with the lowest Krum scores; by default of all but f.

    A model's score is the sum of squared distances to its n - f - 2 nearest others, f = `byzantine`. Of equal scores
    the lowest client id wins. Needs n ≥ 2f + 3 models. Up to `keep` = n - f a lying model can only get in by lying
    close to honest ones.
    """

    needs_logits = False
    needs_models = True

    def __init__(self, byzantine: int, keep: int | None = None) -> None:
        self.byzantine = count_of("byzantine", byzantine)
        self.keep = None if keep is None else count_of("keep", keep, least=1)
        self.least_models = max(2 * self.byzantine + 3, self.keep or 1)

    def select(self, candidates: Candidates) -> Selection:
        """Those with the lowest scores, with equal weights."""
        assert candidates.models is not None
        models = len(candidates.models)
        liars = liars_among(models, candidates, self.byzantine, 2, 3)
        keep = models - liars if self.keep is None else self.keep
        if keep > models:
            raise TooFewUpdates(f"{models} usable models, keep = {keep} needed")
        scores = krum_scores(Stack(candidates.models, candidates.trained).squared_distances(), liars)
        kept = sorted(np.argsort(scores, kind="stable")[:keep].tolist())
        weights = torch.zeros(models, dtype=torch.float64)
        weights[kept] = 1 / keep
        return Selection(tuple(kept), weights=weights)


class Krum(MultiKrum):
    """The one model with the lowest Krum score. Needs n ≥ 2f + 3 models, f = `byzantine`."""

    def __init__(self, byzantine: int) -> None:
        super().__init__(byzantine, keep=1)


class Bulyan(ModelFilter):
    """Krum, again and again, chooses n - 2f models; of these, per coordinate, the mean of those nearest to the median.

    Each turn takes the model that Krum chooses among those left. Too few for Krum's n - f - 2 neighbours are left in
    the last turns when f ≤ 1; then one neighbour counts. Per coordinate the n - 4f chosen values nearest to the median
    of the chosen are averaged; of two equally near ones the lower. The median of an even number of values is the mean
    of the middle two, of which the paper would take either. Needs n ≥ 4f + 3 models, f = `byzantine`.
    """

    needs_logits = False
    needs_models = True

    def __init__(self, byzantine: int) -> None:
        self.byzantine = count_of("byzantine", byzantine)
        self.least_models = 4 * self.byzantine + 3

    def select(self, candidates: Candidates) -> Selection:
        """The chosen models, and what becomes of their coordinates."""
        assert candidates.models is not None
        models = len(candidates.models)
        liars = liars_among(models, candidates, self.byzantine, 4, 3)
        stack = Stack(candidates.models, candidates.trained)
        distances, left = stack.squared_distances(), list(range(models))
        chosen = []
        for _ in range(models - 2 * liars):
            scores = krum_scores(distances[np.ix_(left, left)], liars)
            chosen.append(left.pop(int(scores.argmin())))
        kept = sorted(chosen)
        model = stack.part(kept).per_coordinate(lambda values: mean_around_median(values, 2 * liars))
        return Selection(tuple(kept), model=model)


def krum_scores(distances: Vector, byzantine: int) -> Vector:
    """The sum of squared distances to the n - f - 2 nearest others, at least to one: [n, n] -> [n]."""
    others = distances.copy()
    np.fill_diagonal(others, np.inf)
    neighbours = max(1, len(others) - byzantine - 2)
    scores: Vector = np.sort(others, axis=1)[:, :neighbours].sum(1)
    return scores


def mean_around_median(ascending: Tensor, drop: int) -> Tensor:
    """The mean [rows] of all but the `drop` values farthest from the median, of ascending values [rows, columns]."""
    stay, centre = ascending.shape[1] - drop, middle(ascending).unsqueeze(1)
    below = centre - ascending[:, :drop] > ascending[:, stay:] - centre  # farther than what would take its place
    first = below.sum(1, keepdim=True)
    places = torch.arange(stay, device=ascending.device)
    return ascending.gather(1, first + places).mean(1, dtype=torch.float64)
