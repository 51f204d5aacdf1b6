"""The point with the smallest sum of distances to all models (robust federated averaging, Pillutla et al. 2019)."""

from __future__ import annotations

import numpy as np
import torch

from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.stack import Stack, Vector

SMOOTHING = 1e-6
"""The paper's ν: a model nearer than this counts as being this far away."""

MOST_STEPS = 1000
"""The paper makes do with a handful. Here a step costs next to nothing."""


class GeometricMedian(ModelFilter):
    """Minimises Σ p_k ‖v - w_k‖ by the smoothed Weiszfeld algorithm, which starts from the mean.

    Each step averages the models with weights p_k / max(ν, ‖v - w_k‖). So the median is a weighted mean of the models,
    and the products of the models with each other say all about it: the models are read once, however many steps.
    """

    needs_logits = False
    needs_models = True

    def select(self, candidates: Candidates) -> Selection:
        """All models, with the weights that make their geometric median."""
        assert candidates.models is not None
        shares = shares_of(candidates)
        weights = weiszfeld(Stack(candidates.models, candidates.trained).gram(), shares)
        return Selection(tuple(range(len(shares))), weights=torch.from_numpy(weights))


def weiszfeld(products: Vector, shares: Vector) -> Vector:
    """The weights [models] of the geometric median; `products` [models, models], `shares` [models] are the p_k."""
    weights, before = shares, np.full(len(shares), np.inf)
    for _ in range(MOST_STEPS):
        ways = weights - np.eye(len(shares))  # row k: what to add up to get v - w_k
        distances = np.sqrt(np.maximum(((ways @ products) * ways).sum(1), 0.0))
        # Not the weights: that of a model far out, though tiny, may still count.
        if np.allclose(distances, before, rtol=1e-9, atol=1e-9 * float(np.median(distances))):
            break
        weights = shares / np.maximum(distances, SMOOTHING)
        weights, before = weights / weights.sum(), distances
    return weights


def shares_of(candidates: Candidates) -> Vector:
    """The weights p_k [models], made to sum to 1."""
    weights: Vector = candidates.weights.double().cpu().numpy()
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1 / len(weights))
