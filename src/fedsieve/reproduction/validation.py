"""Which runs show what filters cost in data: how much the server needs for validation, and how good it has to be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedsieve import algorithms
from fedsieve.reproduction.study import Study
from fedsieve.runs import Config

FULL: dict[str, Any] = {
    "dataset": "cifar10", "rounds": 60, "clients": 20, "ratio": 0.4, "heterogeneity": "class", "alpha": 0.1,
    "score": "cross-entropy", "sizes": (5, 20, 50, 100, 500),
}  # fmt: skip
QUICK: dict[str, Any] = {
    "dataset": "digits", "rounds": 20, "clients": 20, "ratio": 0.4, "heterogeneity": "class", "alpha": 0.1,
    "score": "cross-entropy", "sizes": (1, 2, 5, 10, 30), "batch_size": 16, "lr": 0.05, "schedule": "cosine",
}  # fmt: skip
MLP: dict[str, Any] = {"model": "mlp", "local_epochs": 1}
"""For Fashion-MNIST: half a minute a run on a CPU."""

REFERENCE = "fedpdp"
"""It never looks at validation data, but has as much less to train on as the others."""

FAMILIES = {
    "keeps the best subset": ("fedca", "fedcm-ucb", "fedcm-ts"),
    "learns weights": ("fedsieve", "fedsieve-ucb", "fedsieve-ts"),
    "trains on it": ("server-only", "fedpdp-finetune", "fedpdp-server-client", "fedsieve-finetune"),
}
"""What uses validation data, by what it does with it."""

READERS = [name for names in FAMILIES.values() for name in names]


@dataclass(frozen=True)
class Supply:
    """Validation data: `size` is a place among the study's sizes, which are images per class."""

    size: int
    imbalance: float = 1.0
    errors: float = 0.0
    evened: bool = False

    def per_class(self, study: Study) -> int:
        """Images per class, on average."""
        return int(study.settings["sizes"][self.size])


SIZES = [Supply(size) for size in range(5)]
BALANCED, IMBALANCED, WRONG = Supply(3), Supply(3, imbalance=10.0), Supply(3, errors=0.1)
EVENED = replace(IMBALANCED, evened=True)
SUPPLIES = [*SIZES, IMBALANCED, EVENED, WRONG]


@dataclass(frozen=True)
class Case:
    """An algorithm with some validation data."""

    algorithm: str
    supply: Supply

    @property
    def title(self) -> str:
        """The algorithm as people write it."""
        return algorithms.find(self.algorithm).title

    def config(self, study: Study, seed: int) -> Config:
        """Its run with a seed."""
        settings = {name: value for name, value in study.settings.items() if name != "sizes"}
        settings |= {
            "algorithm": self.algorithm,
            "validation_per_class": self.supply.per_class(study),
            "validation_imbalance": self.supply.imbalance,
            "even_classes": self.supply.evened,
            "validation_errors": self.supply.errors,
            "seed": seed,
        }
        return Config(**settings)


CASES = [Case(algorithm, supply) for algorithm in (REFERENCE, *READERS) for supply in SUPPLIES]
