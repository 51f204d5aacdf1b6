"""Which runs the paper's tables and figures are made of. What two of them share is run once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsieve import algorithms
from fedsieve.errors import InvalidSetting, unknown_name
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


@dataclass(frozen=True)
class Target:
    """A table or figure: the cells it needs, and with how many seeds unless told otherwise."""

    title: str
    cells: Sequence[Cell]
    seeds: int


TARGETS: dict[str, Target] = {
    "table2": Target("Table 2: sampling ratio and α", TABLE_2, 2),
    "table3": Target("Table 3: combinatorial averaging on FedProx and FedPdp", TABLE_3, 3),
    "table4": Target("Table 4: all algorithms", TABLE_4, 3),
    "table5": Target("Table 5: rounds to FedAvg's final accuracy", TABLE_4, 3),
    "claims": Target("The paper's claims", [*TABLE_4, SERVER_ONLY], 3),
    "figure1": Target("Figure 1: data per client", [], 0),
    "figure2": Target("Figure 2: combinatorial averaging", TABLE_3, 3),
    "figure3": Target("Figure 3: bandits", FIGURE_3, 3),
    "figure5": Target("Figure 5: accuracy per class of each client's model", FIGURE_5, 1),
    "figure6": Target("Figure 6: convergence by α", FIGURE_6, 1),
}


@dataclass(frozen=True)
class Study:
    """A reproduction: what all its runs have in common."""

    settings: dict[str, Any]

    @classmethod
    def of(cls, quick: bool, rounds: int | None, dataset: str | None, device: str, **more: Any) -> Study:
        """The paper's setting on CIFAR-10, or a small one on bundled data; both can be had on other data."""
        settings = QUICK if quick else {"dataset": "cifar10", "rounds": 100}
        given = {"dataset": dataset, "rounds": rounds}
        settings = settings | {name: value for name, value in given.items() if value is not None}
        if settings["dataset"] == "cifar10":
            settings = settings | SETTLED
        return cls(settings | {"device": device} | more)


def find_targets(names: Sequence[str]) -> list[str]:
    """The names of targets, "all" standing for each of them."""
    for name in names:
        if name not in (*TARGETS, "all"):
            raise unknown_name("target", name, (*TARGETS, "all"))
    return list(TARGETS) if "all" in names else list(dict.fromkeys(names))


def jobs(names: Sequence[str], seeds: int | None) -> list[tuple[Cell, int]]:
    """Every run that the targets need, once; seed by seed, so that what is done first is already a table."""
    if seeds is not None and seeds < 1:
        raise InvalidSetting("seeds", seeds, "a whole number of at least 1")
    wanted: dict[Cell, int] = {}
    for name in names:
        target = TARGETS[name]
        count = target.seeds if seeds is None or name == "figure5" else seeds  # Figure 5 shows one run of each
        for cell in target.cells:
            wanted[cell] = max(wanted.get(cell, 0), count)
    most = max(wanted.values(), default=0)
    return [(cell, seed) for seed in range(most) for cell, count in wanted.items() if seed < count]
