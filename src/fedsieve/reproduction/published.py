"""The numbers that the paper prints (arXiv 2012.03270, Tables 2 to 5): top-1 accuracies in %, two seeds each."""

from __future__ import annotations

from fedsieve.reproduction.paper import Cell

CLIENT = {
    "fedavg": (63.97, 0.90),
    "fedprox": (62.75, 1.54),
    "fedpdp": (74.16, 0.83),
    "fedprox-ca accuracy": (62.83, 1.57),
    "fedca accuracy": (73.70, 0.26),
    "fedcm-ucb accuracy": (75.05, 0.46),
    "fedcm-ts accuracy": (75.06, 1.56),
    "fedprox-ca cross-entropy": (64.54, 1.94),
    "fedca cross-entropy": (74.73, 2.26),
    "fedcm-ucb cross-entropy": (72.05, 2.52),
    "fedcm-ts cross-entropy": (72.95, 3.28),
}

CLASS = {
    "fedavg": (40.24, 4.04),
    "fedprox": (44.34, 1.95),
    "fedpdp": (57.75, 3.44),
    "fedprox-ca accuracy": (50.73, 1.24),
    "fedca accuracy": (60.52, 4.73),
    "fedcm-ucb accuracy": (63.96, 0.74),
    "fedcm-ts accuracy": (61.29, 1.44),
    "fedprox-ca cross-entropy": (48.33, 2.13),
    "fedca cross-entropy": (62.78, 5.96),
    "fedcm-ucb cross-entropy": (61.76, 2.67),
    "fedcm-ts cross-entropy": (64.13, 0.60),
}

RATIOS = {
    ("fedpdp", 0.1): ((0.2, 54.12, 3.10), (0.4, 57.75, 3.44), (0.6, 59.20, 2.77)),
    ("fedca accuracy", 0.1): ((0.2, 52.51, 2.04), (0.4, 61.46, 4.78), (0.6, 71.11, 0.11)),
    ("fedca cross-entropy", 0.1): ((0.2, 55.48, 2.00), (0.4, 65.28, 1.71), (0.6, 69.72, 1.22)),
    ("fedpdp", 5.0): ((0.2, 82.26, 0.43), (0.4, 82.62, 0.13), (0.6, 83.08, 0.05)),
    ("fedca accuracy", 5.0): ((0.2, 82.26, 0.34), (0.4, 82.60, 0.21), (0.6, 83.03, 0.04)),
    ("fedca cross-entropy", 5.0): ((0.2, 82.43, 0.13), (0.4, 82.71, 0.25), (0.6, 82.91, 0.34)),
}

ROUNDS = {
    "client": {
        "fedavg": 100,
        "fedpdp": 52,
        "fedca accuracy": 57,
        "fedcm-ucb accuracy": 35,
        "fedcm-ts accuracy": 31,
        "fedprox-ca cross-entropy": 84,
        "fedca cross-entropy": 49,
        "fedcm-ucb cross-entropy": 53,
        "fedcm-ts cross-entropy": 51,
    },
    "class": {
        "fedavg": 100,
        "fedprox": 71,
        "fedpdp": 46,
        "fedprox-ca accuracy": 52,
        "fedca accuracy": 35,
        "fedcm-ucb accuracy": 27,
        "fedcm-ts accuracy": 24,
        "fedprox-ca cross-entropy": 59,
        "fedca cross-entropy": 34,
        "fedcm-ucb cross-entropy": 33,
        "fedcm-ts cross-entropy": 25,
    },
}


def _cell(name: str, heterogeneity: str, alpha: float = 0.1, ratio: float = 0.4) -> Cell:
    algorithm, _, score = name.partition(" ")
    return Cell(algorithm, heterogeneity, alpha, ratio, score)


TABLE_2: dict[Cell, tuple[float, float]] = {
    _cell(name, "class", alpha, ratio): (mean, std)
    for (name, alpha), cells in RATIOS.items()
    for ratio, mean, std in cells
}

TABLE_4: dict[Cell, tuple[float, float]] = {
    _cell(name, heterogeneity): value
    for heterogeneity, values in (("client", CLIENT), ("class", CLASS))
    for name, value in values.items()
}

TABLE_5: dict[Cell, int] = {
    _cell(name, heterogeneity): rounds for heterogeneity, values in ROUNDS.items() for name, rounds in values.items()
}
"""Rounds to reach FedAvg's final accuracy; what is not in it never did."""
