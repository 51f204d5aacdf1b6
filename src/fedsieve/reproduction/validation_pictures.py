"""What filters cost in data: accuracy by validation data, and validation beside test accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from fedsieve import algorithms
from fedsieve.report.style import COLOURS, GRID, HOSTILE_LEFT_OUT, INK, KEPT, LEFT_OUT, new_figure, quiet
from fedsieve.reproduction.results import Results
from fedsieve.reproduction.validation import (
    BALANCED,
    EVENED,
    FAMILIES,
    IMBALANCED,
    READERS,
    REFERENCE,
    SIZES,
    WRONG,
    Case,
)
from fedsieve.runs import History, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BY_SIZE = ("#D55E00", "#009E73", "#0072B2")
KINDS = {
    BALANCED: ("balanced", KEPT, "o"),
    IMBALANCED: (f"{IMBALANCED.imbalance:g} : 1 imbalanced", LEFT_OUT, "D"),
    EVENED: ("the same, evened out", BY_SIZE[1], "^"),
    WRONG: (f"{100 * WRONG.errors:g} % wrong labels", HOSTILE_LEFT_OUT, "s"),
}
DASHES: tuple[float, tuple[float, float]] = (0, (3, 1.5))


def validation_figure(results: Results) -> Figure | None:
    """Accuracy over validation images per class, a panel for each use of them; and what flaws in them do."""
    if not results.all():
        return None
    figure = new_figure(11, 8.0)
    panels = figure.subplot_mosaic([[*FAMILIES], ["flaws"] * len(FAMILIES)], height_ratios=(1.3, 1))
    first = panels[next(iter(FAMILIES))]
    first.set_ylabel("final test accuracy (%)")
    for family, names in FAMILIES.items():
        panels[family].sharey(first)
        panels[family].set_title(family, fontsize=10, color=INK, loc="left")
        _draw_sizes(panels[family], [*names, REFERENCE], results)
    _look_at_those_with_clients([panels[family] for family in FAMILIES], results)
    _draw_flaws(panels["flaws"], results)
    figure.suptitle(f"What it costs in validation data, {results.study.on}", fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def overfitting_figure(results: Results) -> Figure | None:
    """Validation and test accuracy over rounds: a panel for each algorithm, a colour for each of three sizes."""
    from matplotlib.lines import Line2D

    supplies = dict(zip((SIZES[0], SIZES[len(SIZES) // 2], SIZES[-1]), BY_SIZE, strict=True))
    if not any(results.of(Case(algorithm, supply)) for algorithm in READERS for supply in supplies):
        return None
    figure = new_figure(13, 6.2)
    grid = figure.subplots(2, 5, sharex=True, sharey=True)
    for axes, algorithm in zip(grid.flat, READERS, strict=True):
        for supply, shade in supplies.items():
            runs = results.of(Case(algorithm, supply))
            for name, line in (("validation_accuracy", DASHES), ("test_accuracy", "-")):
                if curves := [found for run in runs if (found := _series(run, name))]:
                    mean = 100 * np.mean(curves, axis=0)
                    axes.plot(range(1, len(mean) + 1), mean, color=shade, linestyle=line, linewidth=1.5)
        axes.set_title(Case(algorithm, BALANCED).title, fontsize=10, color=INK, loc="left")
        _calm(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy (%)")
    for axes in grid[-1, :]:
        axes.set_xlabel("round")
    handles = [
        Line2D([], [], color=shade, linewidth=2, label=f"{supply.per_class(results.study)} per class")
        for supply, shade in supplies.items()
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.5, label="test"))
    handles.append(Line2D([], [], color=INK, linewidth=1.5, linestyle=DASHES, label="validation"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9, labelcolor=INK)
    title = f"Validation and test accuracy of the new model, {results.study.on}"
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def _series(run: History, name: str) -> list[float]:
    """A value of every round; none where the run has it not."""
    return [float(row[name]) for row in run.rows if name in row]


def _draw_sizes(axes: Axes, names: Sequence[str], results: Results) -> None:
    """A line for each algorithm: the mean over seeds, and a band of one standard deviation to either side."""
    for name in names:
        spreads = _by_size(name, results)
        mean, std = (np.array([getattr(spread, what) for spread in spreads.values()]) for what in ("mean", "std"))
        line = "--" if name == REFERENCE else "-"
        axes.plot(
            list(spreads), mean, line, color=COLOURS[name], linewidth=1.8, marker="o", markersize=4,
            label=Case(name, BALANCED).title,
        )  # fmt: skip
        axes.fill_between(list(spreads), mean - std, mean + std, color=COLOURS[name], alpha=0.13, linewidth=0)
    sizes = [supply.per_class(results.study) for supply in SIZES]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("validation images per class")
    _calm(axes)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor="linecolor",
        columnspacing=1.2,
        handlelength=1.5,
    )


def _look_at_those_with_clients(panels: Sequence[Axes], results: Results) -> None:
    """A few images alone would set the scale: below all that is reached with clients a number takes a mark's place."""
    reached = [
        spread.mean - spread.std
        for name in (REFERENCE, *READERS)
        if not algorithms.find(name).at_server
        for spread in _by_size(name, results).values()
    ]
    if not reached:
        return
    bottom, top = min(reached) - 1, panels[0].get_ylim()[1]
    panels[0].set_ylim(bottom, top)
    for axes, names in zip(panels, FAMILIES.values(), strict=True):
        for name in names:
            for size, spread in _by_size(name, results).items():
                if spread.mean < bottom:
                    axes.text(
                        size, bottom + 0.02 * (top - bottom), f"{spread.mean:.0f} ↓",
                        color=COLOURS[name], fontsize=9, ha="center",
                    )  # fmt: skip


def _by_size(algorithm: str, results: Results) -> dict[int, Spread]:
    return {
        supply.per_class(results.study): Spread.of(list(found.values()))
        for supply in SIZES
        if (found := results.final(Case(algorithm, supply)))
    }


def _draw_flaws(axes: Axes, results: Results) -> None:
    """A column for each algorithm, a mark for each kind of validation data."""
    names = [REFERENCE, *READERS]
    for (supply, (kind, shade, marker)), shift in zip(KINDS.items(), (-0.27, -0.09, 0.09, 0.27), strict=True):
        found = {
            name: Spread.of(list(values.values())) for name in names if (values := results.final(Case(name, supply)))
        }
        axes.errorbar(
            [names.index(name) + shift for name in found],
            [spread.mean for spread in found.values()],
            yerr=[spread.std for spread in found.values()],
            fmt=marker, markersize=5, color=shade, elinewidth=1.2, label=kind,
        )  # fmt: skip
    axes.set_xticks(range(len(names)), [fill(Case(name, BALANCED).title, 12) for name in names])
    axes.set_ylabel("final test accuracy (%)")
    title = f"{BALANCED.per_class(results.study)} validation images per class"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    _calm(axes)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=9, labelcolor=INK)


def _calm(axes: Axes) -> None:
    quiet(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
