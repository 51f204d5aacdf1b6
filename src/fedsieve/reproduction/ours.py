"""Averaging that learns its weights, beside the paper's algorithms and the baselines that a sceptic asks for."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from fedsieve.report import figures
from fedsieve.reproduction.claims import Interval
from fedsieve.reproduction.paper import HETEROGENEITIES, SERVER_ONLY, TABLE_4, Cell
from fedsieve.reproduction.results import Results
from fedsieve.reproduction.tables import NOTHING, Table, interval, spread_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_FEDCM = ("fedcm-ts", "accuracy")
"""Of the four kinds of FedCM, that with the highest mean in Table 4, in both heterogeneities."""

RIVALS = [
    cell
    for where in HETEROGENEITIES
    for cell in (Cell("fedsieve", where), Cell("fedsieve-ucb", where), Cell(BEST_FEDCM[0], where, score=BEST_FEDCM[1]))
]
BASELINES = [
    *(cell for cell in TABLE_4 if cell.algorithm not in ("fedprox", "fedprox-ca") and cell not in RIVALS),
    *(Cell(name, where) for where in HETEROGENEITIES for name in ("fedpdp-finetune", "fedpdp-server-client")),
    SERVER_ONLY,
]


def ours_table(heterogeneity: str, results: Results) -> Table:
    """Accuracy, rounds to FedAvg's final accuracy, and how far FedSieve is ahead with the same seeds."""
    target, ours = results.target(heterogeneity), results.final(Cell("fedsieve", heterogeneity))
    rows = []
    for cell in _in_order(heterogeneity):
        final = results.final(cell)
        both = sorted(ours.keys() & final.keys())
        ahead = Interval.of([ours[seed] - final[seed] for seed in both]) if both else None
        rows.append(
            (
                cell.title + (f", {cell.score}" if cell.score else ""),
                f"{len(final)}",
                spread_of(final.values()),
                spread_of(results.last_10(cell).values()),
                _rounds(results.rounds(cell, heterogeneity).values()),
                NOTHING if cell.algorithm == "fedsieve" else interval(ahead),
            )
        )
    return Table(
        f"Averaging that learns its weights, {heterogeneity} heterogeneity",
        ("Algorithm", "Seeds", "Accuracy", "Last 10", "Rounds", "FedSieve is ahead by"),
        rows,
        "Test accuracy in %, of the last round and of the last 10, mean ± standard deviation over seeds. Rounds to "
        f"{NOTHING if target is None else f'{target:.1f} %'}, FedAvg's mean final accuracy, of the seeds that reach "
        "it. Ahead: mean difference in final accuracy between runs with the same seed, in points [95 % interval, "
        "Student's t].",
        left=1,
    )


TABLES = [partial(ours_table, where) for where in HETEROGENEITIES]


def ours_figure(results: Results) -> Figure | None:
    """Accuracy over rounds, a panel per heterogeneity."""
    shown = ("fedavg", "fedpdp", "fedcm-ts", "fedsieve", "fedsieve-ucb", "server-only")
    panels = {
        f"{where} heterogeneity": {
            cell.algorithm: [history.accuracy for history in runs]
            for cell in _in_order(where)
            if cell.algorithm in shown and cell.score != "cross-entropy" and (runs := results.of(cell))
        }
        for where in HETEROGENEITIES
    }
    if not any(panels.values()):
        return None
    return figures.accuracy_panels(panels, title=f"FedSieve beside the paper's algorithms, {results.study.on}")


def _in_order(where: str) -> list[Cell]:
    """Ours first; what has no clients is the same in both heterogeneities."""
    return [cell for cell in (*RIVALS, *BASELINES) if cell.heterogeneity == where or cell == SERVER_ONLY]


def _rounds(reached: Collection[int | None]) -> str:
    there = [float(rounds) for rounds in reached if rounds is not None]
    if not there:
        return "never" if reached else NOTHING
    return spread_of(there) + ("" if len(there) == len(reached) else f" ({len(there)} of {len(reached)})")
