"""Which runs the paper's tables and figures are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fedsieve import algorithms
from fedsieve.reproduction.study import Study
from fedsieve.runs import Config

SETTLED: dict[str, Any] = {
    "model": "vgg11",
    "lr": 0.05,
    "batch_size": 64,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "schedule": "cosine",
}
"""What the paper leaves open, as our search settled it for CIFAR-10: docs/paper.md has the evidence."""

FULL: dict[str, Any] = {"dataset": "cifar10", "rounds": 100}
QUICK: dict[str, Any] = {"dataset": "digits", "rounds": 20, "batch_size": 16, "lr": 0.05}

HETEROGENEITIES = ("client", "class")
SCORES = ("accuracy", "cross-entropy")


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a run but for its seed. `score` is "" where the algorithm has no filter."""

    algorithm: str
    heterogeneity: str
    alpha: float = 0.1
    ratio: float = 0.4
    score: str = ""
    local_epochs: int = 5
    coefficients: str = "normalised"
    refresh: str = "fresh"
    server_momentum: float = 0.0
    smoothing: float = 0.0

    @property
    def title(self) -> str:
        """The algorithm as people write it."""
        return algorithms.find(self.algorithm).title

    def config(self, study: Study, seed: int) -> Config:
        """The run of this cell with a seed."""
        return Config(
            **study.settings,
            algorithm=self.algorithm,
            heterogeneity=self.heterogeneity,
            alpha=self.alpha,
            ratio=self.ratio,
            score=self.score or "accuracy",
            local_epochs=self.local_epochs,
            coefficients=self.coefficients,
            refresh=self.refresh,
            server_momentum=self.server_momentum,
            smoothing=self.smoothing,
            seed=seed,
            watch_models=self.algorithm == "fedpdp",  # for Figure 5
        )


def _filtered(names: Iterable[str], heterogeneity: str) -> list[Cell]:
    return [Cell(name, heterogeneity, score=score) for score in SCORES for name in names]


def _plain(names: Iterable[str], heterogeneity: str) -> list[Cell]:
    return [Cell(name, heterogeneity) for name in names]


TABLE_4 = [
    cell
    for heterogeneity in HETEROGENEITIES
    for cell in (
        *_plain(("fedavg", "fedprox", "fedpdp"), heterogeneity),
        *_filtered(("fedprox-ca", "fedca", "fedcm-ucb", "fedcm-ts"), heterogeneity),
    )
]
TABLE_3 = [cell for cell in TABLE_4 if cell.algorithm in ("fedprox", "fedpdp", "fedprox-ca", "fedca")]
TABLE_2 = [
    Cell(algorithm, "class", alpha, ratio, score)
    for alpha in (0.1, 5.0)
    for algorithm, score in (("fedpdp", ""), ("fedca", "accuracy"), ("fedca", "cross-entropy"))
    for ratio in (0.2, 0.4, 0.6)
]
SERVER_ONLY = Cell("server-only", "class")
FIGURE_3 = [cell for cell in TABLE_4 if cell.algorithm in ("fedavg", "fedprox", "fedpdp", "fedcm-ucb", "fedcm-ts")]
FIGURE_5 = [
    Cell("fedpdp", heterogeneity, alpha, local_epochs=epochs)
    for heterogeneity in HETEROGENEITIES
    for alpha in (0.1, 5.0)
    for epochs in (1, 5)
]
FIGURE_6 = [Cell("fedpdp", heterogeneity, alpha) for heterogeneity in HETEROGENEITIES for alpha in (0.1, 1.0, 5.0)]
AS_PRINTED = [  # where clients hold equally much (class heterogeneity), the printed coefficients are ours
    Cell("fedpdp", "client", coefficients="literal"),  # FedCA with them ends in overflow
    *(
        Cell(name, heterogeneity, score="accuracy", refresh="stale")
        for heterogeneity in HETEROGENEITIES
        for name in ("fedcm-ucb", "fedcm-ts")
    ),
]
READINGS = {printed: replace(printed, coefficients="normalised", refresh="fresh") for printed in AS_PRINTED}
"""What the paper prints, and the cell of Table 4 that reads it as we do."""
