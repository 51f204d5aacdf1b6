"""A proven upper bound on the cross-entropy score of any subset.

The score of averaged logits, g(c) for weights c on the simplex, is concave in c, and a subset is a point of it:
c_k = 1/|S| for its members (their counts over the sum of counts, in general). So at any point c a tangent gives every
model a value v_k, and no subset scores above the mean of its members' values. Moving c to the maximum of g makes that
bound tight; every point along the way already gives a valid one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.filtering.subsets import Problem

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Tangent:
    """At a point c: the score g(c), the gradient [models], and each model's value [models]."""

    score: float
    gradient: Vector
    values: Vector


class Relaxation:
    """g(c), its gradient and curvature, in double precision on the problem's device."""

    def __init__(self, problem: Problem) -> None:
        self.logits = problem.logits.double()
        self.labels = problem.labels
        self.flat = self.logits.flatten(1)
        examples = len(problem.labels)
        of_label = self.logits.gather(2, problem.labels.view(1, -1, 1).expand(problem.models, examples, 1))
        self.of_label = of_label.squeeze(2).mean(1)

    def tangent(self, point: Vector) -> Tangent:
        """g and its gradient ∂g/∂c_k = mean over examples of (logit of the label - expected logit) of model k."""
        logarithms = self._log_probabilities(point)
        score = float(logarithms.gather(1, self.labels.unsqueeze(1)).mean())
        gradient = (self.of_label - self.flat @ logarithms.exp().flatten() / len(self.labels)).cpu().numpy()
        return Tangent(score, gradient, gradient + (score - float(gradient @ point)))

    def curvature(self, point: Vector) -> Vector:
        """Minus the Hessian [models, models]: the mean covariance of the models' logits under the prediction."""
        probabilities = self._log_probabilities(point).exp()
        weighted = (self.logits * probabilities.sqrt()).flatten(1)
        expected = (self.logits * probabilities).sum(-1)
        return ((weighted @ weighted.T - expected @ expected.T) / len(self.labels)).cpu().numpy()

    def _log_probabilities(self, point: Vector) -> Tensor:
        weights = torch.from_numpy(point).to(self.flat.device)
        return (weights @ self.flat).view(self.logits.shape[1:]).log_softmax(-1)

    def maximise(self, tolerance: float = 1e-4, steps: int = 20) -> tuple[float, Vector]:
        """A bound within about `tolerance` of the maximum of g over the simplex, and the point [models] it is at."""
        models = len(self.logits)
        point, bound = np.full(models, 1 / models), 0.0  # no likelihood exceeds 1
        nothing, everything = np.zeros(models), np.ones(models)
        for _ in range(steps):
            here = self.tangent(point)
            bound = min(bound, float(here.values.max()))
            if bound - here.score < tolerance:
                break
            step = newton_step(here.gradient, self.curvature(point), point, nothing, everything, 1e-8) - point
            length = 1.0
            while length > 1e-3 and self.tangent(point + length * step).score < here.score:
                length /= 2
            point = point + length * step
        return bound, point


def newton_step(
    gradient: Vector, curvature: Vector, point: Vector, low: Vector, high: Vector, tolerance: float = 1e-4
) -> Vector:
    """The maximum [models] of the quadratic model at `point` over {low ≤ c ≤ high, Σ c = 1} (FISTA)."""
    steepness = float(np.linalg.eigvalsh(curvature)[-1]) + 1e-9
    best, ahead, momentum = point, point, 1.0
    for _ in range(100):
        new = project(ahead + (gradient - curvature @ (ahead - point)) / steepness, low, high)
        if np.abs(new - best).max() < tolerance:
            return new
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / next_momentum * (new - best)
        best, momentum = new, next_momentum
    return best


def project(point: Vector, low: Vector, high: Vector) -> Vector:
    """The nearest point of {low ≤ c ≤ high, Σ c = 1}: all shifted by one number, then clipped."""
    shifts = np.sort(np.concatenate([point - low, point - high]))
    sums = np.clip(point - shifts[:, None], low, high).sum(1)  # falls along the shifts
    after = int(np.searchsorted(-sums, -1.0))
    if after == 0 or after == len(shifts):
        shift = shifts[min(after, len(shifts) - 1)]
    else:
        drop = sums[after - 1] - sums[after]
        part = (sums[after - 1] - 1) / drop if drop > 0 else 0.0
        shift = shifts[after - 1] + part * (shifts[after] - shifts[after - 1])
    nearest: Vector = np.clip(point - shift, low, high)
    return nearest
