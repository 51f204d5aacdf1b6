"""Algorithm 1: federated learning with knowledgeable sampling and filtered averaging.

sample  →  train  →  score  →  keep  →  average  →  observe
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.averaging import Coefficients, Kept, Scheme, combine
from fedsieve.engines import Engine, Update
from fedsieve.engines.precision import arithmetic
from fedsieve.engines.sequential import single_thread
from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.filtering import Candidates, ModelFilter, Selection
from fedsieve.sampling import Beliefs, ClientSampler, Feedback
from fedsieve.stopwatch import Stopwatch


@dataclass(frozen=True)
class Round:
    """What happened in one round; `kept` and `coefficients.clients` are in the same order."""

    round: int
    sampled: list[int]
    kept: list[int]
    coefficients: Coefficients
    score: float | None
    search: dict[str, int | bool | float | None] | None
    train_loss: float
    excluded: dict[int, str]
    per_class: dict[int, list[float]] | None
    beliefs: Beliefs | None
    seconds: float


class Federation:
    """A model, the clients that train it, and the parts that choose among them.

    `clients` [n] are the ids of the clients that hold data and `weights` [n] their p_k. A round asks
    round(ratio · n) of them and fails, leaving everything as it was, when fewer than `min_updates` usable models
    come back. With `watch_models` a round says how each model does on each class even if no filter looks at that.
    """

    def __init__(
        self,
        *,
        clients: NDArray[np.int64],
        weights: NDArray[np.float64],
        ratio: float,
        sampler: ClientSampler,
        engine: Engine,
        filter: ModelFilter,
        averaging: Scheme,
        seed: int,
        min_updates: int = 1,
        watch_models: bool = False,
    ) -> None:
        order = np.argsort(clients)
        self.clients = clients[order]
        self.weights = weights[order] / weights.sum()
        self.per_round = max(1, math.floor(ratio * len(clients) + 0.5))
        self.sampler = sampler
        self.engine = engine
        self.filter = filter
        self.averaging = averaging
        self.min_updates = min_updates
        self.watch_models = watch_models
        self.model = engine.initial_model()
        self.stopwatch = Stopwatch(self.model.device)
        sampler.begin(seed, self.clients, self.weights)

    def play(self, round: int) -> Round:
        """One round of Algorithm 1 (rounds count from 1); afterwards `model` is the new global model."""
        began = time.perf_counter()
        self.stopwatch.next_round()
        phase = self.stopwatch.phase
        with phase("sample"):
            sampled = [int(client) for client in self.sampler.sample(round, self.clients, self.per_round)]
        drawn = Counter(sampled)
        if strangers := set(drawn).difference(self.clients[np.isin(self.clients, sampled)].tolist()):
            raise InvalidSetting("sampled", min(strangers), f"ids of clients, from {type(self.sampler).__name__}")

        with phase("train"):
            updates = self.engine.train(self.model, sorted(drawn), round)
        with phase("score"), single_thread():
            updates, models, excluded = self._usable(updates, drawn)
            logits, updates, models = self._score(updates, models, excluded)
        if len(updates) < self.min_updates:
            reasons = "; ".join(f"client {client}: {reason}" for client, reason in sorted(excluded.items())[:3])
            raise TooFewUpdates(
                f"round {round}: {len(updates)} usable models of {len(drawn)}, "
                f"at least {self.min_updates} needed ({reasons})"
            )

        with phase("search"), arithmetic("fp32", self.model.device):
            selection = self.filter.select(self._candidates(updates, models, logits, drawn))
        kept = [updates[position] for position in selection.kept]
        with phase("average"), single_thread():
            coefficients = self._coefficients(kept, selection, drawn)
            self.model = combine(self.model, [models[position] for position in selection.kept], coefficients)

        if self.watch_models and not logits.numel():
            with phase("score"):
                logits = self.engine.logits(models, "validation")
        losses = {update.client: update.loss for update in updates}
        kept_ids = [update.client for update in kept]
        with phase("sample"):
            self.sampler.observe(
                Feedback(round, sampled, kept_ids, losses, {update.client: update.seconds for update in updates})
            )
        return Round(
            round=round,
            sampled=sampled,
            kept=kept_ids,
            coefficients=coefficients,
            score=selection.score,
            search=_search_record(selection),
            train_loss=float(np.mean(list(losses.values()))),
            excluded=dict(sorted(excluded.items())),
            per_class=_per_class(updates, logits, self.engine.labels("validation")) if logits.numel() else None,
            beliefs=self.sampler.beliefs(round),
            seconds=time.perf_counter() - began,
        )

    def _usable(
        self, updates: Sequence[Update], drawn: Counter[int]
    ) -> tuple[list[Update], list[Tensor], dict[int, str]]:
        """The updates with a model that can be averaged, in the order of ids, their models, and why others are out."""
        good: list[Update] = []
        models: list[Tensor] = []
        excluded = dict.fromkeys(set(drawn).difference(update.client for update in updates), "no answer")
        for update in sorted(updates, key=lambda update: update.client):
            if update.error is not None or update.model is None:
                excluded[update.client] = update.error or "returned no model"
            elif update.model.shape != self.model.shape:
                shape, expected = tuple(update.model.shape), tuple(self.model.shape)
                excluded[update.client] = f"model of shape {shape}, expected {expected}"
            elif not _is_finite(update.model):
                excluded[update.client] = "model with NaN or infinity"
            elif not math.isfinite(update.loss):
                excluded[update.client] = f"training loss {update.loss}"
            else:
                good.append(update)
                models.append(update.model)
        return good, models, excluded

    def _score(
        self, updates: list[Update], models: list[Tensor], excluded: dict[int, str]
    ) -> tuple[Tensor, list[Update], list[Tensor]]:
        """Validation logits [models, examples, classes] where the filter reads them; who has none to show is out."""
        if not self.filter.needs_logits or not updates:
            return torch.empty(len(updates), 0, 0), updates, models
        logits = self.engine.logits(models, "validation")
        finite = logits.isfinite().flatten(1).all(1).tolist()
        excluded.update(
            {
                update.client: "validation logits with NaN or infinity"
                for update, ok in zip(updates, finite, strict=True)
                if not ok
            }
        )
        good = [position for position, ok in enumerate(finite) if ok]
        return logits[good], [updates[position] for position in good], [models[position] for position in good]

    def _candidates(
        self, updates: list[Update], models: list[Tensor], logits: Tensor, drawn: Counter[int]
    ) -> Candidates:
        who = self._kept(updates, drawn)
        candidates = Candidates(
            logits=logits,
            labels=self.engine.labels("validation"),
            weights=torch.from_numpy(who.weights),
            counts=torch.from_numpy(who.counts),
        )
        if not self.filter.needs_models:
            return candidates

        def average(kept: Sequence[int]) -> Tensor:
            coefficients = self.averaging(self._kept([updates[position] for position in kept], drawn))
            return combine(self.model, [models[position] for position in kept], coefficients)

        return replace(
            candidates,
            models=models,
            average=average,
            predict=lambda model: self.engine.logits([model], "validation")[0],
            score_and_gradient=self.engine.score_and_gradient,
        )

    def _coefficients(self, kept: list[Update], selection: Selection, drawn: Counter[int]) -> Coefficients:
        if not kept:
            raise InvalidSetting("kept", (), f"at least one model kept by {type(self.filter).__name__}")
        if selection.weights is None:
            return self.averaging(self._kept(kept, drawn))
        return Coefficients(0.0, np.array([float(selection.weights[position]) for position in selection.kept]))

    def _kept(self, updates: list[Update], drawn: Counter[int]) -> Kept:
        return Kept(
            weights=self.weights[np.searchsorted(self.clients, [update.client for update in updates])],
            population=len(self.clients),
            counts=np.array([drawn[update.client] for update in updates], dtype=np.int64),
            losses=np.array([update.loss for update in updates]),
        )


def _per_class(updates: list[Update], logits: Tensor, labels: Tensor) -> dict[int, list[float]]:
    """For each client its model's accuracy on the validation examples of each class (the paper's Figure 5)."""
    right = (logits.argmax(-1) == labels).double()  # [models, examples]
    member = torch.nn.functional.one_hot(labels, logits.shape[-1]).double()
    shares = (right @ member / member.sum(0).clamp(min=1)).tolist()
    return {update.client: of_class for update, of_class in zip(updates, shares, strict=True)}


def _is_finite(model: Tensor) -> bool:
    """Whether all numbers are: a sum is quick, and is finite only then; it may also be too large."""
    return math.isfinite(float(model.sum())) or bool(model.isfinite().all())


def _search_record(selection: Selection) -> dict[str, int | bool | float | None] | None:
    """How a filter that searched found its subset, and what others score: all together, and the best single model."""
    if selection.looked_at is None:
        return None
    return {name: getattr(selection, name) for name in ("looked_at", "optimal", "bound", "all", "single")}
