"""An engine some of whose clients are hostile: it trains as another does, then lets them lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.attacks import Attack, Sent
from fedsieve.averaging import Coefficients
from fedsieve.engines.base import Engine, Trained, Update


class HostileEngine(Engine):
    """`engine` on data that `attack` has poisoned, with what its `hostile` clients send replaced by their lies.

    The test data of `engine` has `clean` examples, and after them those that should fool the model.
    """

    def __init__(self, engine: Engine, attack: Attack, hostile: frozenset[int], seed: int, clean: int) -> None:
        self.engine, self.attack, self.hostile, self.seed, self.clean = engine, attack, hostile, seed, clean
        self.layout, self.augments = engine.layout, engine.augments

    def initial_model(self) -> Tensor:
        """As `engine`."""
        return self.engine.initial_model()

    def train(self, model: Tensor, clients: Sequence[int], round: int) -> Sequence[Trained]:
        """All train; then the hostile ones send their lies. Who could not be trained has nothing to send."""
        updates = self.engine.train(model, clients, round)
        liars = self.hostile.intersection(clients)
        if not liars or type(self.attack).lies is Attack.lies:
            return updates
        models = {
            update.client: trained
            for update in updates
            if update.problem(model) is None and (trained := update.model) is not None
        }
        lies = self._lies(model, models, liars.intersection(models), round)
        sent = models | dict(lies)
        return [
            Update(update.client, sent[update.client], update.loss) if update.client in sent else update
            for update in updates
        ]

    def _lies(
        self, model: Tensor, models: Mapping[int, Tensor], hostile: frozenset[int], round: int
    ) -> Mapping[int, Tensor]:
        """What the hostile clients send, by client."""
        if not hostile:
            return {}
        size = len(model) if self.attack.whole else self.layout.parameters
        if size == len(model):
            return self.attack.lies(Sent(model, models, hostile, self.seed, round))
        of_size = {client: trained[:size] for client, trained in models.items()}
        lies = self.attack.lies(Sent(model[:size], of_size, hostile, self.seed, round))
        return {client: torch.cat([lie, models[client][size:]]) for client, lie in lies.items()}

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """As `engine`, on all its data."""
        return self.engine.logits(models, data)

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """As `engine`, of all its data."""
        return self.engine.labels(data)

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `engine`."""
        return self.engine.score_and_gradient(model, examples, crops)

    def combine(self, previous: Tensor, models: Sequence[Tensor], coefficients: Coefficients) -> Tensor:
        """As `engine`."""
        return self.engine.combine(previous, models, coefficients)

    def local_losses(
        self, model: Tensor, clients: Sequence[int], round: int, examples: int | None = None
    ) -> NDArray[np.float64]:
        """As `engine`: hostile clients tell the truth here, on the data that they have."""
        return self.engine.local_losses(model, clients, round, examples)

    def close(self) -> None:
        """As `engine`."""
        self.engine.close()
