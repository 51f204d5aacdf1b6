"""Does what the paper claims hold? Runs with the same seed share data, partition and initial model: they are paired."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fedsieve.reproduction.paper import HETEROGENEITIES, SCORES, SERVER_ONLY, Cell
from fedsieve.reproduction.results import Results

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Claim:
    """That the first of each pair is better than the second: by points of accuracy, or by needing fewer rounds."""

    text: str
    pairs: Sequence[tuple[Cell, Cell]]
    by: str = "points"
    of_the_paper: bool = True


@dataclass(frozen=True)
class Interval:
    """A mean of differences between runs with the same seed, and where it lies with 95 % confidence (Student's t)."""

    seeds: int
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval:
        """Over at least one difference; one alone says nothing about the spread."""
        from scipy import stats

        n, mean = len(differences), float(np.mean(differences))
        if n == 1:
            return cls(1, mean, -float("inf"), float("inf"))
        error = float(np.std(differences, ddof=1)) / n**0.5
        width = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * error
        return cls(n, mean, mean - width, mean + width)


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim; `parts` has the interval of each pair. A positive difference is for the claim."""

    claim: Claim
    overall: Interval | None
    parts: Mapping[tuple[Cell, Cell], Interval | None]

    @property
    def word(self) -> str:
        """holds, doesn't hold, or can't tell."""
        if self.overall is None:
            return "not all runs yet"
        if self.overall.low > 0:
            return "holds"
        return "doesn't hold" if self.overall.high < 0 else f"can't tell with n = {self.overall.seeds}"


def _everywhere(better: Sequence[str], worse: str) -> list[tuple[Cell, Cell]]:
    """An algorithm with a filter against one with the same filter, or without any."""
    filtered = worse in ("fedca", "fedprox-ca")
    return [
        (Cell(name, where, score=score), Cell(worse, where, score=score if filtered else ""))
        for where, score, name in product(HETEROGENEITIES, SCORES, better)
    ]


FEDCM = ("fedcm-ucb", "fedcm-ts")
FILTERED = ("fedprox-ca", "fedca", *FEDCM)

CLAIMS = [
    Claim("Combinatorial averaging improves FedPdp (FedCA > FedPdp)", _everywhere(["fedca"], "fedpdp")),
    Claim("Combinatorial averaging improves FedProx", _everywhere(["fedprox-ca"], "fedprox")),
    Claim(
        "Cross-entropy is the better score",
        [
            (Cell(name, where, score="cross-entropy"), Cell(name, where, score="accuracy"))
            for where, name in product(HETEROGENEITIES, FILTERED)
        ],
    ),
    Claim("FedCM beats FedCA", _everywhere(FEDCM, "fedca")),
    Claim("FedCM beats FedPdp", _everywhere(FEDCM, "fedpdp")),
    Claim("FedCM beats FedProx", _everywhere(FEDCM, "fedprox")),
    Claim("FedCM beats FedAvg", _everywhere(FEDCM, "fedavg")),
    Claim("FedPdp beats FedAvg", [(Cell("fedpdp", where), Cell("fedavg", where)) for where in HETEROGENEITIES]),
    Claim("FedCM needs fewer rounds than FedAvg", _everywhere(FEDCM, "fedavg"), by="rounds"),
    Claim("FedCM needs fewer rounds than FedPdp", _everywhere(FEDCM, "fedpdp"), by="rounds"),
    Claim(
        "FedCM beats the server's validation data alone",
        [
            (Cell(name, where, score=score), SERVER_ONLY)
            for where, score, name in product(HETEROGENEITIES, SCORES, FEDCM)
        ],
        of_the_paper=False,
    ),
]


def judge(claim: Claim, results: Results) -> Verdict:
    """Each seed's mean difference over all pairs, then an interval over seeds; a seed counts if it has every pair."""
    value = _rounds_saved if claim.by == "rounds" else _points
    by_pair = {pair: _differences(*pair, results, value) for pair in claim.pairs}
    complete = set.intersection(*(set(differences) for differences in by_pair.values()))
    means = [float(np.mean([by_pair[pair][seed] for pair in by_pair])) for seed in sorted(complete)]
    parts = {pair: Interval.of(list(found.values())) if found else None for pair, found in by_pair.items()}
    return Verdict(claim, Interval.of(means) if means else None, parts)


Value = Callable[[Results, Cell], Mapping[int, float]]


def _differences(better: Cell, worse: Cell, results: Results, value: Value) -> dict[int, float]:
    first, second = value(results, better), value(results, worse)
    return {seed: first[seed] - second[seed] for seed in sorted(set(first) & set(second))}


def _points(results: Results, cell: Cell) -> Mapping[int, float]:
    return results.final(cell)


def _rounds_saved(results: Results, cell: Cell) -> Mapping[int, float]:
    """Rounds to FedAvg's final accuracy, counted down; a run that never reaches it needs one more than it had."""
    never = int(results.study.settings["rounds"]) + 1
    return {seed: -float(never if rounds is None else rounds) for seed, rounds in results.rounds(cell).items()}
