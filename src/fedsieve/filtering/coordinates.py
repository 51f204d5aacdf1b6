"""One coordinate at a time: median and trimmed mean (Yin et al. 2018). Every model has one vote, whatever its p_k."""

from __future__ import annotations

import torch

from fedsieve.errors import InvalidSetting
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.stack import Stack, middle


class CoordinateMedian(ModelFilter):
    """The median of each coordinate; of an even number of values the mean of the middle two."""

    needs_logits = False
    needs_models = True

    def select(self, candidates: Candidates) -> Selection:
        """All models, and their median."""
        assert candidates.models is not None
        stack = Stack(candidates.models)
        return Selection(tuple(range(len(stack))), model=stack.per_coordinate(middle))


class TrimmedMean(ModelFilter):
    """The mean of each coordinate without the lowest ⌊share · n⌋ and the highest ⌊share · n⌋ of its n values."""

    needs_logits = False
    needs_models = True

    def __init__(self, share: float) -> None:
        if not 0 <= share < 0.5:
            raise InvalidSetting("share", share, "a number from 0 up to, but not including, 0.5")
        self.share = share

    def select(self, candidates: Candidates) -> Selection:
        """All models, and their trimmed mean."""
        assert candidates.models is not None
        stack = Stack(candidates.models)
        models = len(stack)
        cut = min(int(self.share * models + 1e-9), (models - 1) // 2)  # 0.29 · 100 is 28.999… in floating point
        model = stack.per_coordinate(lambda values: values[:, cut : models - cut].mean(1, dtype=torch.float64))
        return Selection(tuple(range(models)), model=model)
