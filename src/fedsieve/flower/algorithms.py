"""Named algorithms as Flower strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from torch import nn

from fedsieve.errors import InvalidSetting, unknown_name
from fedsieve.filtering import CombinatorialFilter, FineTuning, KeepAll, LearnedAveraging, ModelFilter
from fedsieve.filtering.scores import Score
from fedsieve.flower.strategy import SieveStrategy
from fedsieve.sampling import ClientSampler, ThompsonSampler, UCBSampler, UniformSampler

Bandit = Literal["thompson", "ucb"]
BANDITS: dict[str, Callable[[], ClientSampler]] = {"thompson": ThompsonSampler, "ucb": UCBSampler}


class FedPdp(SieveStrategy):
    """Clients drawn uniformly, models averaged by their examples: Flower calls it FedAvg, the paper FedPdp.

    With `finetune` the server then trains on the `validation` data, as `FedSieve` may: the best there is where all
    clients can be trusted. It takes a `model`, and `augment`.
    """

    def __init__(self, *, finetune: bool = False, augment: bool = False, **settings: Any) -> None:
        super().__init__(UniformSampler(), _fine_tuned(KeepAll(), finetune, augment), **settings)
        _check_images(augment, settings.get("validation"))


class FedCA(SieveStrategy):
    """Clients drawn uniformly; of their models those are averaged that do best together on the validation data."""

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        validation: tuple[Any, Any],
        score: Score = "accuracy",
        **settings: Any,
    ) -> None:
        super().__init__(UniformSampler(), CombinatorialFilter(score), model=model, validation=validation, **settings)


class FedCM(SieveStrategy):
    """As FedCA, with a bandit that learns whom to ask: "thompson" sampling or "ucb"."""

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        validation: tuple[Any, Any],
        bandit: Bandit = "thompson",
        score: Score = "accuracy",
        **settings: Any,
    ) -> None:
        sampler, filter = _bandit(bandit), CombinatorialFilter(score)
        super().__init__(sampler, filter, model=model, validation=validation, **settings)


class FedSieve(SieveStrategy):
    """Clients drawn uniformly, or by a bandit; their models are mixed with weights learned on the validation data.

    With `finetune` the server then trains on the validation data, in each round alike: it knows of no schedule that
    clients may have. With `augment` it crops and flips the images there, as clients should do with theirs.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        validation: tuple[Any, Any],
        bandit: Bandit | None = None,
        finetune: bool = False,
        augment: bool = False,
        **settings: Any,
    ) -> None:
        sampler = UniformSampler() if bandit is None else _bandit(bandit)
        filter = _fine_tuned(LearnedAveraging(), finetune, augment)
        super().__init__(sampler, filter, model=model, validation=validation, **settings)
        _check_images(augment, validation)


def _fine_tuned(filter: ModelFilter, finetune: bool, augment: bool) -> ModelFilter:
    """The filter itself, or with training afterwards."""
    if augment and not finetune:
        raise InvalidSetting("augment", augment, "true with finetune=True alone: nothing else changes images")
    return FineTuning(filter, augment=augment) if finetune else filter


def _check_images(augment: bool, validation: tuple[Any, Any] | None) -> None:
    """Raise if inputs that are no images are to be cropped and flipped."""
    if augment and validation is not None and len(shape := np.shape(validation[0])[1:]) != 3:
        raise InvalidSetting("augment", augment, f"false for inputs {tuple(shape)}, which are no images")


def _bandit(name: str) -> ClientSampler:
    if name not in BANDITS:
        raise unknown_name("bandit", name, BANDITS)
    return BANDITS[name]()
