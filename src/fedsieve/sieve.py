"""From the models that came back to one model: check, score, keep, average. The same in simulation and on Flower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.averaging import Coefficients, Kept, Scheme
from fedsieve.engines.base import Judge, Models, Returned, is_nonsense, problem_of
from fedsieve.engines.precision import arithmetic
from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.filtering import Candidates, ModelFilter, Selection
from fedsieve.randomness import generator
from fedsieve.stopwatch import Stopwatch
from fedsieve.threads import single_thread


@dataclass(frozen=True)
class Population:
    """All clients: `weights(ids)` are the p_k [n] of some, which sum to 1 over all `size` of them."""

    size: int
    weights: Callable[[Sequence[int]], NDArray[np.float64]]


@dataclass(frozen=True)
class Sifted:
    """What became of a round's models; `kept` and `coefficients.clients` are in the same order.

    `losses` are those of usable models, `excluded` says why others were not. `per_class` is the accuracy of each
    usable model on each class, where somebody looked. Where the filter made the model itself and named no weights, the
    coefficients are equal shares of those kept (or the previous model's 1, if nobody was).
    """

    model: Tensor
    kept: list[int]
    coefficients: Coefficients
    selection: Selection
    losses: dict[int, float]
    excluded: dict[int, str]
    per_class: dict[int, list[float]] | None


class Sieve:
    """A filter and an averaging scheme at work. `pace(round)` is what the clients' schedule has left of their rate.

    Fails, changing nothing, when fewer than `min_updates` models are usable, or too few for the filter. With
    `watch_models` it says how each model does on each class even if no filter looks at that.
    """

    def __init__(
        self,
        filter: ModelFilter,
        averaging: Scheme,
        judge: Judge,
        min_updates: int,
        watch_models: bool = False,
        seed: int = 0,
        pace: Callable[[int], float] = lambda round: 1.0,
    ) -> None:
        self.filter = filter
        self.averaging = averaging
        self.judge = judge
        self.min_updates = min_updates
        self.watch_models = watch_models
        self.seed = seed
        self.pace = pace

    def sift(
        self,
        round: int,
        previous: Tensor,
        updates: Sequence[Returned],
        drawn: Counter[int],
        population: Population,
        stopwatch: Stopwatch,
    ) -> Sifted:
        """The new model [size] after `previous` [size], of what the clients in `drawn` sent back."""
        phase = stopwatch.phase
        with phase("score"), single_thread():
            updates, excluded = _usable(updates, drawn, previous)
            logits, updates = self._score(updates, excluded)
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in sorted(excluded.items())[:3])
        why = f" ({reasons})" if reasons else ""
        if len(updates) < self.min_updates:
            raise TooFewUpdates(
                f"round {round}: {len(updates)} usable models of {len(drawn)}, at least {self.min_updates} needed{why}",
                excluded,
            )

        def kept_of(chosen: Sequence[Returned]) -> Kept:
            return Kept(
                weights=population.weights([update.client for update in chosen]),
                population=population.size,
                counts=np.array([drawn[update.client] for update in chosen], dtype=np.int64),
                losses=np.array([update.loss for update in chosen]),
            )

        models = Models(updates)
        nonsense = sum(map(is_nonsense, excluded.values()))
        try:
            with phase("search"), arithmetic("fp32", previous.device):
                candidates = self._candidates(previous, updates, logits, kept_of)
                random = generator(self.seed, "filter", round)
                told = replace(candidates, nonsense=nonsense, random=random, pace=self.pace(round))
                selection = self.filter.select(told)
        except TooFewUpdates as problem:
            name = type(self.filter).__name__
            raise TooFewUpdates(f"round {round}: {name} has {problem}{why}", excluded) from None
        selection = _checked(selection, len(updates), previous, type(self.filter).__name__)
        kept = [updates[position] for position in selection.kept]
        with phase("average"), single_thread():
            if selection.weights is not None:
                shares = [float(selection.weights[position]) for position in selection.kept]
                coefficients = Coefficients(0.0, np.array(shares))
            elif selection.model is not None:
                coefficients = Coefficients(0.0 if kept else 1.0, np.full(len(kept), 1 / max(1, len(kept))))
            elif kept:
                coefficients = self._coefficients(kept_of(kept))
            else:
                raise InvalidSetting("kept", (), f"at least one model kept by {type(self.filter).__name__}")
            if selection.model is not None:
                model = selection.model.to(previous)
            else:
                model = self.judge.combine(previous, Models(kept), coefficients)
        if problem_of(model, 0.0, previous) is not None:
            name = type(self.filter).__name__
            raise TooFewUpdates(f"round {round}: the new model has NaN or infinity, after {name}{why}", excluded)
        if self.watch_models and not logits.numel():
            with phase("score"):
                logits = self.judge.logits(models, "validation")
        return Sifted(
            model=model,
            kept=[update.client for update in kept],
            coefficients=coefficients,
            selection=selection,
            losses={update.client: update.loss for update in updates},
            excluded=dict(sorted(excluded.items())),
            per_class=_per_class(updates, logits, self.judge.labels("validation")) if logits.numel() else None,
        )

    def _coefficients(self, kept: Kept) -> Coefficients:
        """What the scheme says, which may be the user's own."""
        given = self.averaging(kept)
        allowed = f"Coefficients with one number for each of {len(kept.weights)} models"
        if not isinstance(given, Coefficients):
            raise InvalidSetting("averaging", given, allowed)
        try:
            own = Coefficients(float(given.previous), np.asarray(given.clients, dtype=np.float64))
        except (TypeError, ValueError):
            raise InvalidSetting("averaging", given, allowed) from None
        if own.clients.shape != kept.weights.shape:
            raise InvalidSetting("averaging", given, allowed)
        return own

    def _score(self, updates: list[Returned], excluded: dict[int, str]) -> tuple[Tensor, list[Returned]]:
        """Validation logits [models, examples, classes] where the filter reads them; who has none to show is out."""
        if not self.filter.needs_logits or not updates:
            return torch.empty(len(updates), 0, 0), updates
        logits = self.judge.logits(Models(updates), "validation")
        finite = logits.isfinite().flatten(1).all(1).tolist()
        for update, ok in zip(updates, finite, strict=True):
            if not ok:
                excluded[update.client] = "validation logits with NaN or infinity"
        good = [position for position, ok in enumerate(finite) if ok]
        return logits[good], [updates[position] for position in good]

    def _candidates(
        self, previous: Tensor, updates: list[Returned], logits: Tensor, kept_of: Callable[[Sequence[Returned]], Kept]
    ) -> Candidates:
        who = kept_of(updates)
        candidates = Candidates(
            logits=logits,
            labels=self.judge.labels("validation"),
            weights=torch.from_numpy(who.weights),
            counts=torch.from_numpy(who.counts),
        )
        if not self.filter.needs_models:
            return candidates

        def coefficients(kept: Sequence[int]) -> Coefficients:
            return self._coefficients(kept_of([updates[position] for position in kept]))

        def average(kept: Sequence[int]) -> Tensor:
            chosen = Models([updates[position] for position in kept])
            return self.judge.combine(previous, chosen, coefficients(kept))

        return replace(
            candidates,
            models=Models(updates),
            average=average,
            predict=lambda model: self.judge.logits([model], "validation")[0],
            score_and_gradient=self.judge.score_and_gradient,
            previous=previous,
            augments=self.judge.augments,
            trained=None if self.judge.layout is None else self.judge.layout.parameters,
            coefficients=coefficients,
        )


def _checked(selection: object, models: int, previous: Tensor, filter: str) -> Selection:
    """A filter's choice among so many models, in plain numbers; raise if it, which may be the user's own, is none."""
    if not isinstance(selection, Selection):
        raise InvalidSetting("select", selection, f"a Selection, from {filter}")
    try:
        selection = replace(selection, kept=tuple(index(position) for position in selection.kept))
    except TypeError:
        raise InvalidSetting("kept", selection.kept, f"positions, which are whole numbers, from {filter}") from None
    try:
        selection = replace(selection, score=None if selection.score is None else float(selection.score))
    except (TypeError, ValueError):
        raise InvalidSetting("score", selection.score, f"a number, or None, from {filter}") from None
    if len(set(selection.kept)) < len(selection.kept) or not set(selection.kept) <= set(range(models)):
        raise InvalidSetting("kept", selection.kept, f"different positions among {models} models, from {filter}")
    if selection.weights is not None and tuple(selection.weights.shape) != (models,):
        raise InvalidSetting(
            "weights", tuple(selection.weights.shape), f"one for each of {models} models, from {filter}"
        )
    if selection.model is not None and selection.model.shape != previous.shape:
        shape = tuple(selection.model.shape)
        raise InvalidSetting("model", shape, f"one of shape {tuple(previous.shape)}, from {filter}")
    return selection


def _usable(
    updates: Sequence[Returned], drawn: Counter[int], previous: Tensor
) -> tuple[list[Returned], dict[int, str]]:
    """The updates with a model that can be averaged, in the order of ids, and why others are out."""
    good: list[Returned] = []
    excluded = dict.fromkeys(set(drawn).difference(update.client for update in updates), "no answer")
    for update in sorted(updates, key=lambda update: update.client):
        problem = update.problem(previous)
        if problem is None:
            good.append(update)
        else:
            excluded[update.client] = problem
    return good, excluded


def _per_class(updates: Sequence[Returned], logits: Tensor, labels: Tensor) -> dict[int, list[float]]:
    """For each client its model's accuracy on the validation examples of each class (the paper's Figure 5)."""
    right = (logits.argmax(-1) == labels).double()  # [models, examples]
    member = torch.nn.functional.one_hot(labels, logits.shape[-1]).double()
    shares = (right @ member / member.sum(0).clamp(min=1)).tolist()
    return {update.client: of_class for update, of_class in zip(updates, shares, strict=True)}
