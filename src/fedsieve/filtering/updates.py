"""How far and which way a client moved the model: clipped norms, and directions compared with the server's own."""

from __future__ import annotations

import math

import numpy as np

from fedsieve.averaging import Coefficients, combine
from fedsieve.errors import InvalidSetting
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.geometric_median import shares_of
from fedsieve.filtering.stack import Stack, Vector


class NormClipping(ModelFilter):
    """w^t + Σ p_k min(1, bound / ‖w_k - w^t‖) (w_k - w^t), the p_k made to sum to 1.

    Nobody moves the model farther than `bound`; without one, than the median norm of the round's updates.
    """

    needs_logits = False
    needs_models = True

    def __init__(self, bound: float | None = None) -> None:
        if bound is not None and not (bound > 0 and math.isfinite(bound)):
            raise InvalidSetting("bound", bound, "a number above 0, or none for the median norm")
        self.bound = bound

    def select(self, candidates: Candidates) -> Selection:
        """All models, and the mean of their clipped updates."""
        assert candidates.models is not None and candidates.previous is not None
        stack = Stack(candidates.models, candidates.trained)
        norms, _ = stack.updates(candidates.previous)
        bound = float(np.median(norms)) if self.bound is None else self.bound
        clipped = np.minimum(1.0, _quotient(np.full(len(norms), bound), norms))
        steps = shares_of(candidates) * clipped
        model = combine(candidates.previous, stack.rows, Coefficients(1 - float(steps.sum()), steps))
        return Selection(tuple(range(len(stack))), model=model)


class FLTrust(ModelFilter):
    """Updates weighted by how far they point the server's way, and made equally long (Cao et al. 2021).

    A client's trust is max(0, cos) of the angle between its update w_k - w^t and the server's; the updates, scaled to
    the norm of the server's, are averaged in proportion to trust. In the paper the server's update comes from training
    on its own data. Here its direction is the gradient of the log-likelihood of the validation set at w^t. A single
    gradient has no meaningful length, so its norm is set to the median norm of all updates or of the trusted ones,
    whichever is smaller: a majority without trust can't make it long, nor can a few that are trusted. Who has no trust
    is left out; if nobody has any, the model stays as it is.
    """

    needs_logits = False
    needs_models = True
    needs_validation = True

    def select(self, candidates: Candidates) -> Selection:
        """The trusted models, and the mean of their scaled updates."""
        assert candidates.models is not None and candidates.previous is not None
        assert candidates.score_and_gradient is not None
        stack, previous = Stack(candidates.models, candidates.trained), candidates.previous
        _, gradient = candidates.score_and_gradient(previous)
        norms, products = stack.updates(previous, gradient)
        trust = np.maximum(_quotient(products, norms), 0.0)  # times the gradient's norm, which cancels out
        kept = np.flatnonzero(trust > 0).tolist()
        if not kept:
            return Selection((), model=previous.clone())
        length = min(np.median(norms), np.median(norms[kept]))
        steps = trust[kept] / trust.sum() * length / norms[kept]
        model = combine(previous, stack.part(kept).rows, Coefficients(1 - float(steps.sum()), steps))
        return Selection(tuple(kept), model=model)


def _quotient(above: Vector, below: Vector) -> Vector:
    """above / below [n], and 0 where `below` is 0: an update of no length has no direction, and changes nothing."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)
