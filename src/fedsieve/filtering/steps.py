"""What filters share that go down a gradient on batches of the validation set."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.clients.augmentation import draw_crops_and_flips
from fedsieve.errors import InvalidSetting
from fedsieve.filtering.base import Candidates, ModelFilter
from fedsieve.filtering.byzantine import count_of

MOMENTUM = 0.9


class Stepping(ModelFilter):
    """Takes steps, the largest of size `rate`, each on another `batch` of validation examples."""

    needs_logits = False
    needs_models = True
    needs_validation = True

    def __init__(self, batch: int, rate: float) -> None:
        self.batch = count_of("batch", batch, least=1)
        if not (rate > 0 and math.isfinite(rate)):
            raise InvalidSetting("rate", rate, "a finite number above 0")
        self.rate = rate

    def draw(self, candidates: Candidates) -> Tensor | None:
        """The positions [batch] of the next batch; None, which stands for all, if there are no more."""
        assert candidates.random is not None
        examples = len(candidates.labels)
        if self.batch >= examples:
            return None
        return torch.from_numpy(candidates.random.choice(examples, self.batch, replace=False))

    def draw_crops(self, candidates: Candidates, examples: Tensor | None) -> NDArray[np.int64]:
        """How to crop and flip the images of a batch that was drawn."""
        assert candidates.random is not None
        return draw_crops_and_flips(candidates.random, len(candidates.labels if examples is None else examples))

    def train(self, candidates: Candidates, model: Tensor, rates: Iterable[float], augment: bool = False) -> Tensor:
        """What SGD with momentum 0.9 makes of a model [size] on batches of the validation set, with one step per rate.

        With `augment` images are cropped and flipped, anew for each batch.
        """
        assert candidates.score_and_gradient is not None
        model = model.clone()
        velocity = torch.zeros_like(model)
        for rate in rates:
            examples = self.draw(candidates)
            moved = (self.draw_crops(candidates, examples),) if augment else ()
            _, gradient = candidates.score_and_gradient(model, examples, *moved)
            velocity.mul_(MOMENTUM).add_(gradient)
            model.add_(velocity, alpha=rate)  # up: it is the gradient of the log-likelihood
        return model
