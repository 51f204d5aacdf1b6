"""Which runs compare FedCM with the field: other ways to choose clients, other defences against clients that lie."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsieve import algorithms
from fedsieve.attacks import ATTACKS
from fedsieve.locking import locked
from fedsieve.parts import FILTERS, SAMPLERS
from fedsieve.reproduction.paper import HETEROGENEITIES
from fedsieve.reproduction.study import Study
from fedsieve.runs import Config, pretrain_favor, record_name
from fedsieve.runs.directory import write_whole

CNN: dict[str, Any] = {"model": "cnn", "lr": 0.02, "schedule": "cosine", "local_epochs": 2, "validation_per_class": 100}
"""A model small enough for a thousand runs."""

SAMPLERS_FULL: dict[str, Any] = {
    "dataset": "cifar10", "rounds": 100, "clients": 100, "ratio": 0.1, "alpha": 0.1, "system": "drawn",
    "deadline": 120.0, "favor_target": 0.6, "score": "cross-entropy",
}  # fmt: skip
SAMPLERS_QUICK: dict[str, Any] = {
    "dataset": "digits", "rounds": 20, "clients": 30, "ratio": 0.2, "alpha": 0.1, "system": "drawn", "deadline": 5.0,
    "favor_target": 0.9, "batch_size": 16, "lr": 0.05, "schedule": "cosine", "score": "cross-entropy",
}  # fmt: skip
ATTACKS_FULL: dict[str, Any] = {
    "dataset": "cifar10", "rounds": 30, "clients": 100, "ratio": 0.15, "heterogeneity": "class", "alpha": 1.0
}  # fmt: skip
ATTACKS_QUICK: dict[str, Any] = {
    "dataset": "digits", "rounds": 10, "clients": 30, "ratio": 0.5, "heterogeneity": "class", "alpha": 1.0,
    "batch_size": 16, "lr": 0.05, "schedule": "cosine",
}  # fmt: skip

KEEPERS = ("all", "combinatorial")
AGENTS, EPISODES = Path("runs/favor"), 20

log = logging.getLogger("fedsieve")


@dataclass(frozen=True)
class Choice:
    """A way to choose clients, with or without the combinatorial filter, everything else as in FedPdp.

    Where clients are chosen by size, models are averaged without regard to it, as the methods' sources do.
    """

    sampler: str
    filter: str
    heterogeneity: str

    @property
    def title(self) -> str:
        """The sampler's name."""
        return self.sampler

    def config(self, study: Study, seed: int) -> Config:
        """Its run with a seed; the deadline is for those that choose by it, and FAVOR has its agent."""
        settings = {name: value for name, value in study.settings.items() if name not in ("deadline", "favor_target")}
        if self.sampler == "fedcs":
            settings["deadline"] = study.settings["deadline"]
        settings |= {"algorithm": "fedpdp", "heterogeneity": self.heterogeneity, "seed": seed}
        if SAMPLERS[self.sampler].by_size:
            settings["coefficients"] = "mean"
        if self.sampler == "favor":
            settings["favor_agent"] = AGENTS / record_name(Config(**settings)) / "agent.safetensors"
        return Config(**settings, sampler=self.sampler, filter=self.filter)


def teach_favor(config: Config, study: Study) -> None:
    """Pre-train the agent of a run that needs one, unless it is there."""
    if config.favor_agent is None:
        return
    config.favor_agent.parent.mkdir(parents=True, exist_ok=True)
    with locked(config.favor_agent.parent):
        if config.favor_agent.exists():
            return
        log.info("seed %d, %s heterogeneity: pre-training FAVOR's agent", config.seed, config.heterogeneity)
        settings = config.model_dump() | {"sampler": "own", "filter": "own", "favor_agent": None}
        done = pretrain_favor(Config(**settings), EPISODES, study.settings["favor_target"])
        log.info("%d trainings of a client, %.0f s", done.trainings, done.seconds)
        write_whole(config.favor_agent, done.agent.to_bytes())


CHOICES = [Choice(sampler, keep, where) for where in HETEROGENEITIES for sampler in SAMPLERS for keep in KEEPERS]

BY_ACCURACY = "fedca-accuracy"
"""FedCA with the other score, which tells liars less well."""

ALGORITHMS = ("fedca", BY_ACCURACY, "fedcm-ucb", "fedcm-ts", "fedpdp-finetune", "fedsieve-finetune")
DEFENCES = ("none", *ALGORITHMS, *(name for name in FILTERS if name not in KEEPERS))
SHARES = (0.2, 0.4)
ASSUMED = 0.2
"""The share of liars that a defence assumes where there are none: nobody knows that there are none."""


@dataclass(frozen=True)
class Battle:
    """A defence against an attack by a share of the clients: an algorithm, or a filter on FedPdp."""

    defence: str
    attack: str = "none"
    hostile: float = 0.0

    @property
    def title(self) -> str:
        """What people call the defence."""
        if self.defence not in ALGORITHMS:
            return self.defence
        return algorithms.find(self.algorithm).title + (", by accuracy" if self.defence == BY_ACCURACY else "")

    @property
    def algorithm(self) -> str:
        """That of which the defence is a part."""
        return self.defence.removesuffix("-accuracy") if self.defence in ALGORITHMS else "fedpdp"

    def config(self, study: Study, seed: int) -> Config:
        """Its run with a seed."""
        filter = "all" if self.defence == "none" else "own" if self.defence in ALGORITHMS else self.defence
        assumes = filter in FILTERS and FILTERS[filter].assumes_liars
        per_round = study.settings["ratio"] * study.settings["clients"]
        return Config(
            **study.settings,
            algorithm=self.algorithm,
            score="accuracy" if self.defence == BY_ACCURACY else "cross-entropy",
            filter=filter,
            attack=self.attack,
            hostile=self.hostile,
            byzantine=None if self.hostile or not assumes else math.floor(ASSUMED * per_round + 0.5),
            seed=seed,
        )


def can_stand(defence: str, share: float) -> bool:
    """Whether there can be enough honest models: Bulyan wants more than three for each liar."""
    return defence not in FILTERS or FILTERS[defence].models[0] * share < 1


CLEAN = [Battle(defence) for defence in DEFENCES]
BATTLES = CLEAN + [
    Battle(defence, attack, share)
    for share in SHARES
    for attack in ATTACKS
    for defence in DEFENCES
    if can_stand(defence, share)
]
