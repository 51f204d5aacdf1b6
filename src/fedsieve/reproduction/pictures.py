"""The paper's figures from our runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsieve import data
from fedsieve.report import figures
from fedsieve.reproduction.paper import FIGURE_3, FIGURE_5, FIGURE_6, HETEROGENEITIES, SCORES, TABLE_3, Cell
from fedsieve.reproduction.results import Results
from fedsieve.runs import Config, History
from fedsieve.runs.assembly import split_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY_ALPHA = {"α = 0.1": "#D55E00", "α = 1": "#009E73", "α = 5": "#0072B2"}


def figure1(results: Results) -> Figure | None:
    """Data per client: both heterogeneities × three α."""
    panels = {
        f"{where}, α = {alpha:g}": class_counts(Cell("fedpdp", where, alpha).config(results.study, 0))
        for where in HETEROGENEITIES
        for alpha in (0.1, 1.0, 5.0)
    }
    return figures.data_per_client(panels, f"Examples per client and class, {results.study.on}")


def figure2(results: Results) -> Figure | None:
    """What combinatorial averaging does to FedProx and FedPdp."""
    return _curves(results, TABLE_3, "With and without combinatorial averaging")


def figure3(results: Results) -> Figure | None:
    """What bandits add."""
    return _curves(results, FIGURE_3, "FedCM and the algorithms it is compared with")


def figure5(results: Results) -> Figure | None:
    """Accuracy per class of each client's model under FedPdp."""
    panels = {}
    for cell in FIGURE_5:
        for history in results.of(cell)[:1]:
            panels[f"{cell.heterogeneity}, α = {cell.alpha:g}, E = {cell.local_epochs}"] = per_class(history)
    title = f"FedPdp: accuracy per class of each client's model half-way, {results.study.on}"
    return figures.class_accuracy(panels, title=title) if panels else None


def figure6(results: Results) -> Figure | None:
    """Convergence of FedPdp by α."""
    panels = {
        f"{where} heterogeneity": {
            f"α = {cell.alpha:g}": [history.accuracy for history in runs]
            for cell in FIGURE_6
            if cell.heterogeneity == where and (runs := results.of(cell))
        }
        for where in HETEROGENEITIES
    }
    if not any(panels.values()):
        return None
    return figures.accuracy_panels(panels, title=f"FedPdp by α, {results.study.on}", colours=BY_ALPHA)


def class_counts(config: Config) -> NDArray[np.int64]:
    """Examples [clients, classes] as a run splits them."""
    dataset = data.load(config.dataset, config.data_dir)
    return split_data(config, dataset)[1].class_counts(dataset.train_labels, dataset.classes)


def per_class(history: History) -> NDArray[np.float64]:
    """Shares [clients, classes] of the last time each client was asked in the first half of a run; NaN if never."""
    half = history.rows[: -(-len(history.rows) // 2)]
    known = {int(client): shares for row in half for client, shares in row.get("per_class", {}).items()}
    classes = max((len(shares) for shares in known.values()), default=1)
    table = np.full((history.config.clients, classes), np.nan)
    for client, shares in known.items():
        table[client] = shares
    return table


def _curves(results: Results, cells: Iterable[Cell], title: str) -> Figure | None:
    """A panel per heterogeneity and score; what has no filter is the same in both."""
    cells = list(cells)
    panels = {
        f"{where} heterogeneity, score: {score}": {
            cell.algorithm: [history.accuracy for history in runs]
            for cell in cells
            if cell.heterogeneity == where and cell.score in ("", score) and (runs := results.of(cell))
        }
        for where in HETEROGENEITIES
        for score in SCORES
    }
    if not any(panels.values()):
        return None
    return figures.accuracy_panels(panels, title=f"{title}, {results.study.on}")
