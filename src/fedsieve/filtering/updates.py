"""How far and which way a client moved the model: clipped norms, and directions compared with the server's own."""

from __future__ import annotations

import math

import numpy as np

from fedsieve.averaging import Coefficients, combine
from fedsieve.errors import InvalidSetting
from fedsieve.filtering.base import Candidates, ModelFilter, Selection
from fedsieve.filtering.byzantine import count_of
from fedsieve.filtering.geometric_median import shares_of
from fedsieve.filtering.stack import Stack, Vector
from fedsieve.filtering.steps import Stepping


class NormClipping(ModelFilter):
    """w^t + Σ p_k min(1, bound / ‖w_k - w^t‖) (w_k - w^t), the p_k made to sum to 1.

    Nobody moves what is trained farther than `bound`; without one, than the median norm of the round's updates. What is
    not trained, batch norm's statistics, is shortened as much.
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


class FLTrust(Stepping):
    """Updates weighted by how far they point the server's way, and made equally long (Cao et al. 2021).

    A client's trust is max(0, cos) of the angle between its update w_k - w^t and the server's, which comes from
    training on the validation set: `steps` steps of SGD with momentum 0.9 from w^t, in all rounds at the `rate` of the
    clients' first. The updates, made as long as the server's, are averaged in proportion to trust. Who has no trust is
    left out; if nobody has any, the model stays as it is. In the source the server takes as many steps as a client.
    Ours knows of clients' rate alone, so, unlike there, updates are made no longer than the trusted ones' median
    either. What is not trained is averaged by trust and not made longer.
    """

    def __init__(self, steps: int = 40, batch: int = 200, rate: float = 0.05) -> None:
        super().__init__(batch, rate)
        self.steps = count_of("steps", steps)

    def select(self, candidates: Candidates) -> Selection:
        """The trusted models, and the mean of their scaled updates."""
        assert candidates.models is not None and candidates.previous is not None
        stack, previous = Stack(candidates.models, candidates.trained), candidates.previous
        own = self.train(candidates, previous, [self.rate] * self.steps) - previous
        if not own.isfinite().all():  # it trusts nobody, least of all itself
            return Selection((), model=previous.clone())
        norms, products = stack.updates(previous, own)
        trust = np.maximum(_quotient(products, norms), 0.0)  # times the server's norm, which cancels out
        kept = np.flatnonzero(trust > 0).tolist()
        if not kept:
            return Selection((), model=previous.clone())
        length = min(float(own[: stack.trained].double().norm()), np.median(norms[kept]))
        steps = trust[kept] / trust.sum() * length / norms[kept]
        trusted, buffers = stack.part(kept), slice(stack.trained, None)
        model = trusted.moved(previous, steps)
        by_trust = Coefficients(0.0, trust[kept] / trust.sum())
        model[buffers] = combine(previous[buffers], [row[buffers] for row in trusted.rows], by_trust)
        return Selection(tuple(kept), model=model)


def _quotient(above: Vector, below: Vector) -> Vector:
    """above / below [n], and 0 where `below` is 0: an update of no length has no direction, and changes nothing."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)
