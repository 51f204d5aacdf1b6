"""Clients that lie or are broken. What each attack does is one function of data or of models.

An attack on data changes what hostile clients learn from before the run begins. An attack on updates changes what they
send back: they train as everyone does, then send something else. Who is hostile, and all that is random, follows from
the run's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import floor
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.data import Dataset
from fedsieve.errors import InvalidSetting
from fedsieve.randomness import generator, keys


@dataclass(frozen=True)
class Sent:
    """A round's models as they would honestly be: `models` [size] by client, trained from `previous` [size].

    `hostile` are those among them that lie. Unless an attack is on the `whole` model, only what is trained comes here.
    """

    previous: Tensor
    models: Mapping[int, Tensor]
    hostile: frozenset[int]
    seed: int
    round: int

    def update(self, client: int) -> Tensor:
        """What a client learned [size]: its model less the one it was sent."""
        return self.models[client] - self.previous

    def mean_update(self, clients: frozenset[int]) -> Tensor:
        """The mean [size] over some clients."""
        total = torch.zeros_like(self.previous, dtype=torch.float64)
        for client in sorted(clients):
            total += self.update(client)
        return (total / len(clients)).to(self.previous.dtype)


class Attack:
    """What hostile clients do; by default nothing.

    What is not trained, such as batch norm's statistics, they send as they learned it, unless they lie about the
    `whole` model: a variance turned round would give anybody away.
    """

    whole = False

    def poison(self, dataset: Dataset, held: NDArray[np.int64], seed: int) -> Dataset:
        """The data set after hostile clients changed the training examples that they hold, at the places `held`."""
        return dataset

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """What hostile clients send instead of their models, by client."""
        return {}

    def triggered(self, dataset: Dataset) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Test inputs that should fool the model and the labels it should then give, where there are any."""
        return None


class LabelFlip(Attack):
    """Label y becomes classes - 1 - y (Fang et al. 2020)."""

    def poison(self, dataset: Dataset, held: NDArray[np.int64], seed: int) -> Dataset:
        """Flip all labels held."""
        labels = np.array(dataset.train_labels)
        labels[held] = dataset.classes - 1 - labels[held]
        return replace(dataset, train_labels=labels)


@dataclass(frozen=True)
class Backdoor(Attack):
    """A bright corner means class `target` (Gu et al. 2017): on a `share` of what hostile clients hold."""

    target: int = 0
    share: float = 0.5

    def poison(self, dataset: Dataset, held: NDArray[np.int64], seed: int) -> Dataset:
        """Mark and relabel some of the examples held."""
        order = np.argsort(keys(seed, "backdoor", 0, held), kind="stable")
        chosen = held[order[: round(self.share * len(held))]]
        inputs, labels = np.array(dataset.train_inputs), np.array(dataset.train_labels)
        inputs[chosen] = self.mark(dataset, inputs[chosen])
        labels[chosen] = self.target
        return replace(dataset, train_inputs=inputs, train_labels=labels)

    def triggered(self, dataset: Dataset) -> tuple[NDArray[Any], NDArray[Any]]:
        """All test examples of other classes, marked."""
        others = np.flatnonzero(dataset.test_labels != self.target)
        inputs = self.mark(dataset, np.array(dataset.test_inputs[others]))
        return inputs, np.full(len(others), self.target, dtype=dataset.test_labels.dtype)

    def mark(self, dataset: Dataset, inputs: NDArray[Any]) -> NDArray[Any]:
        """Inputs [n, ...] as they are stored, with the brightest value in the corner: an eighth of each side."""
        if inputs.ndim < 3:
            raise InvalidSetting("attack", "backdoor", f"images, or another attack: inputs are {dataset.input_shape}")
        brightest = 255 if inputs.dtype == np.uint8 else dataset.train_inputs.max()
        # Bytes are stored [n, height, width] or [n, height, width, channels], floats [n, channels, height, width].
        height, width = (1, 2) if inputs.dtype == np.uint8 or inputs.ndim == 3 else (2, 3)
        corner = [slice(None)] * inputs.ndim
        for side in (height, width):
            corner[side] = slice(-max(1, inputs.shape[side] // 8), None)
        marked = inputs.copy()
        marked[tuple(corner)] = brightest
        return marked


@dataclass(frozen=True)
class Scaled(Attack):
    """`factor` times the update: -1 is the sign flip, 10 what Bagdasaryan et al. 2020 do to a model with a backdoor."""

    factor: float

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """Each its own."""
        return {client: sent.previous + self.factor * sent.update(client) for client in sent.hostile}


@dataclass(frozen=True)
class Noise(Attack):
    """Gaussian noise instead of an update, `factor` times as long; Blanchard et al. 2017 have noise of a fixed size."""

    factor: float = 10.0

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """Each its own draws."""
        lies = {}
        for client in sent.hostile:
            draws = generator(sent.seed, "attack", sent.round, client).standard_normal(len(sent.previous))
            noise = torch.from_numpy(draws).to(sent.previous)
            lies[client] = sent.previous + noise * (self.factor * sent.update(client).norm() / noise.norm())
        return lies


class FreeRider(Attack):
    """The model that was sent, as if it had been trained (Fraboni et al. 2021)."""

    whole = True

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """All the same."""
        return dict.fromkeys(sent.hostile, sent.previous)


class NaNSender(Attack):
    """Not a number, as broken clients send."""

    whole = True

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """All the same."""
        return dict.fromkeys(sent.hostile, torch.full_like(sent.previous, float("nan")))


class ALittleIsEnough(Attack):
    """Together: their mean less z standard deviations, as far off as a crowd can be unnoticed (Baruch et al. 2019).

    Of n clients m are hostile; s = ⌊n/2 + 1⌋ - m honest ones have to be further off than they are, and z is such that
    this is to be expected: Φ(z) = (n - m - s) / (n - m). The source has gradients where we have models, which turns the
    sign round.
    """

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """All the same, from what the hostile ones learned themselves."""
        z = self.deviations(len(sent.models), len(sent.hostile))
        stacked = torch.stack([sent.models[client] for client in sorted(sent.hostile)])
        spread = stacked.std(0, correction=0)
        return dict.fromkeys(sent.hostile, stacked.mean(0) - z * spread)

    @staticmethod
    def deviations(clients: int, hostile: int) -> float:
        """z, at least 0; where the hostile are the majority it would be infinite, and is 3."""
        honest = clients - hostile
        needed = floor(clients / 2 + 1) - hostile
        if needed <= 0:
            return 3.0
        share = (honest - needed) / honest
        return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Together: `factor` times against what the honest ones learned on average (Xie et al. 2020)."""

    factor: float = 0.5

    def lies(self, sent: Sent) -> Mapping[int, Tensor]:
        """All the same; without honest clients, against themselves."""
        honest = frozenset(sent.models) - sent.hostile
        lie = sent.previous - self.factor * sent.mean_update(honest or sent.hostile)
        return dict.fromkeys(sent.hostile, lie)


ATTACKS: dict[str, Callable[[], Attack]] = {
    "label-flip": LabelFlip,
    "backdoor": Backdoor,
    "sign-flip": lambda: Scaled(-1.0),
    "scaled": lambda: Scaled(10.0),
    "noise": Noise,
    "a-little-is-enough": ALittleIsEnough,
    "inner-product": InnerProduct,
    "free-rider": FreeRider,
    "nan": NaNSender,
}

SOURCES: dict[str, str] = {
    "label-flip": "Fang et al. 2020",
    "backdoor": "Gu et al. 2017",
    "sign-flip": "–",
    "scaled": "after Bagdasaryan et al. 2020",
    "noise": "after Blanchard et al. 2017",
    "a-little-is-enough": "Baruch et al. 2019",
    "inner-product": "Xie et al. 2020",
    "free-rider": "Fraboni et al. 2021",
    "nan": "–",
}
"""Where each attack comes from."""


def hostile_clients(seed: int, clients: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """Which of the clients [n] are hostile: round(share · n) of them, the same ones with a larger share and more."""
    order = np.argsort(keys(seed, "hostile", 0, clients), kind="stable")
    return np.sort(clients[order[: floor(share * len(clients) + 0.5)]])
