"""Averaging that learns its weights, beside the paper's algorithms and the baselines that a sceptic asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fedsieve.report import figures
from fedsieve.reproduction.claims import Interval
from fedsieve.reproduction.paper import HETEROGENEITIES, SCORES, SERVER_ONLY, TABLE_4, Cell
from fedsieve.reproduction.results import Results
from fedsieve.reproduction.tables import NOTHING, Table, interval, spread_of
from fedsieve.reproduction.validation_pictures import beside_test
from fedsieve.runs import History, rounds_to

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEDCM = [(name, score) for name in ("fedcm-ts", "fedcm-ucb") for score in SCORES]
BEST_FEDCM = ("fedcm-ts", "accuracy")
"""Of the four kinds, that with the highest mean over the three seeds of Table 4, in both heterogeneities."""

SMOOTHING = 0.8
"""An average over some five rounds, beside the last model: a sceptic's answer to curves that swing."""

MOMENTUM = 0.5
"""At the server: of all changes to learned averaging that were tried, the one that helped.

docs/results/learned-averaging.md has them all.
"""

LEARNED = ("fedsieve", "fedsieve-finetune")

RIVALS = [
    cell
    for where in HETEROGENEITIES
    for cell in (
        Cell("fedsieve", where, server_momentum=MOMENTUM, smoothing=SMOOTHING),
        Cell("fedsieve-finetune", where, smoothing=SMOOTHING),
        Cell("fedpdp-finetune", where, smoothing=SMOOTHING),
        Cell("fedsieve", where, smoothing=SMOOTHING),
        Cell(BEST_FEDCM[0], where, score=BEST_FEDCM[1], smoothing=SMOOTHING),
        *(Cell(name, where, score=score) for name, score in FEDCM if (name, score) != BEST_FEDCM),
    )
]
SMOOTHED = ("fedpdp", "fedsieve-ucb", "fedpdp-server-client")
BASELINES = [
    *(
        cell
        for cell in TABLE_4
        if cell.algorithm not in ("fedprox", "fedprox-ca", *SMOOTHED)
        and (cell.algorithm, cell.score) != BEST_FEDCM
        and cell not in RIVALS
    ),
    *(Cell(name, where, smoothing=SMOOTHING) for where in HETEROGENEITIES for name in SMOOTHED),
    SERVER_ONLY,
]
UNSMOOTHED = list(dict.fromkeys(replace(cell, smoothing=0.0) for cell in (*RIVALS, *BASELINES) if cell.smoothing))
"""Who hands out no average trains as who does: where there are such runs, of the paper's tables say, they count."""


def ours_table(heterogeneity: str, results: Results) -> Table:
    """Accuracy, rounds to FedAvg's final accuracy, and how far ours are ahead with the same seeds."""
    target, rows = results.target(heterogeneity), []
    cells = [cell for cell in _in_order(heterogeneity) if _runs(results, cell)]
    ours = [next((cell for cell in cells if cell.algorithm == name), None) for name in LEARNED]
    for cell in cells:
        plain = [run.unsmoothed_accuracy for run in _runs(results, cell).values()]
        smooth = [run.accuracy for run in results.of(cell) if cell.smoothing]
        rows.append(
            (
                _title(cell),
                f"{len(plain)}",
                spread_of(_last(results, cell).values()),
                spread_of([100 * float(np.mean(curve[-10:])) for curve in plain]),
                _rounds(target, plain),
                spread_of([100 * curve[-1] for curve in smooth])
                + (f" ({len(smooth)} of {len(plain)})" if 0 < len(smooth) < len(plain) else ""),
                *(_ahead(results, one, cell) for one in ours),
            )
        )
    return Table(
        f"Averaging that learns its weights, {heterogeneity} heterogeneity",
        (
            *("Algorithm", "Seeds", "Accuracy", "Last 10", "Rounds", "Smoothed"),
            *("FedSieve ahead", "Fine-tuned ahead"),
        ),
        rows,
        "Test accuracy in %, of the last round and of the last 10, mean ± standard deviation over seeds. Rounds to "
        f"{NOTHING if target is None else f'{target:.1f} %'}, FedAvg's mean final accuracy, of the seeds that reach "
        f"it. Smoothed: of an average over rounds, in which all before the last weigh {SMOOTHING}, of the seeds that "
        "were run so. Ahead: the first line of FedSieve, and FedSieve, fine-tuned, by their mean "
        "difference in accuracy with the same seeds, in points [95 % interval, Student's t].",
        left=1,
    )


def _ahead(results: Results, ours: Cell | None, other: Cell) -> str:
    """By how many points."""
    if ours is None or ours == other:
        return NOTHING
    mine, its = _last(results, ours), _last(results, other)
    both = sorted(mine.keys() & its.keys())
    return interval(Interval.of([mine[seed] - its[seed] for seed in both]) if both else None)


TABLES = [partial(ours_table, where) for where in HETEROGENEITIES]


def ours_figure(results: Results) -> Figure | None:
    """Accuracy of the last model over rounds, a panel per heterogeneity; each algorithm once, as it comes first."""
    shown = ("fedavg", "fedpdp", "fedcm-ts", *LEARNED, "fedpdp-finetune", "server-only")
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for where in HETEROGENEITIES:
        first: dict[str, Cell] = {}
        for cell in _in_order(where):
            if cell.algorithm in shown and cell.score != "cross-entropy" and _runs(results, cell):
                first.setdefault(cell.algorithm, cell)
        panels[f"{where} heterogeneity"] = {
            _curve(cell): [run.unsmoothed_accuracy for run in _runs(results, cell).values()] for cell in first.values()
        }
    if not any(panels.values()):
        return None
    return figures.accuracy_panels(panels, title=f"FedSieve beside the paper's algorithms, {results.study.on}")


def overfitting_figure(results: Results) -> Figure | None:
    """Validation beside test accuracy over rounds, of who only chooses and of who trains on validation data."""
    panels: dict[str, dict[str, list[History]]] = {}
    for where in HETEROGENEITIES:
        first: dict[str, Cell] = {}
        for cell in _in_order(where):
            if cell.algorithm in ("fedcm-ucb", *LEARNED, "fedpdp-finetune") and _runs(results, cell):
                first.setdefault(cell.algorithm, cell)
        for cell in first.values():
            panels.setdefault(_title(cell), {})[f"{where} heterogeneity"] = list(_runs(results, cell).values())
    return beside_test(
        panels, f"Validation and test accuracy of the model handed out, {results.study.on}", max(1, len(panels))
    )


def _in_order(where: str) -> list[Cell]:
    """Ours first; what has no clients is the same in both heterogeneities."""
    return [cell for cell in (*RIVALS, *BASELINES) if cell.heterogeneity == where or cell == SERVER_ONLY]


def _curve(cell: Cell) -> str:
    """Its algorithm, which has a colour of its own, or what it is called."""
    return _title(cell) if cell.server_momentum else cell.algorithm


def _title(cell: Cell) -> str:
    more = [cell.score] if cell.score else [f"momentum {cell.server_momentum:g}"] if cell.server_momentum else []
    return ", ".join([cell.title, *more])


def _runs(results: Results, cell: Cell) -> dict[int, History]:
    """By seed, those without an average over rounds too."""
    runs = results.runs.get(replace(cell, smoothing=0.0), {}) | results.runs[cell]
    return dict(sorted(runs.items()))


def _last(results: Results, cell: Cell) -> dict[int, float]:
    """Accuracy of the last model in % by seed."""
    return {seed: 100 * run.unsmoothed_accuracy[-1] for seed, run in _runs(results, cell).items()}


def _rounds(target: float | None, curves: Sequence[Sequence[float]]) -> str:
    if target is None or not curves:
        return NOTHING
    there = [float(first) for curve in curves if (first := rounds_to(target / 100, curve)) is not None]
    if not there:
        return "never"
    return spread_of(there) + ("" if len(there) == len(curves) else f" ({len(there)} of {len(curves)})")
