"""What filters cost in data: accuracy by validation data, and validation beside test accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    some = (SIZES[0], SIZES[len(SIZES) // 2], SIZES[-1])
    said = {supply: f"{supply.per_class(results.study)} per class" for supply in some}
    panels = {
        Case(algorithm, BALANCED).title: {said[supply]: results.of(Case(algorithm, supply)) for supply in some}
        for algorithm in READERS
    }
    return beside_test(panels, f"Validation and test accuracy of the model handed out, {results.study.on}", columns=5)


def beside_test(panels: Mapping[str, Mapping[str, Sequence[History]]], title: str, columns: int) -> Figure | None:
    """Mean validation and test accuracy over rounds: titled panels, in which each kind of runs has a colour.

    None where no run knows its validation accuracy.
    """
    from matplotlib.lines import Line2D

    knowing = {
        name: {kind: [run for run in runs if "validation_accuracy" in run.rows[-1]] for kind, runs in kinds.items()}
        for name, kinds in panels.items()
    }
    if not any(runs for kinds in knowing.values() for runs in kinds.values()):
        return None
    shades = dict(zip(dict.fromkeys(kind for kinds in panels.values() for kind in kinds), BY_SIZE, strict=False))
    lines = -(-len(panels) // columns)
    figure = new_figure(2.6 * columns, 0.6 + 2.8 * lines)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, kinds) in zip(grid.flat, knowing.items(), strict=True):
        for kind, runs in kinds.items():
            for what, line in (("validation_accuracy", DASHES), ("test_accuracy", "-")):
                if runs:
                    mean = 100 * np.mean([[row[what] for row in run.rows] for run in runs], axis=0)
                    axes.plot(range(1, len(mean) + 1), mean, color=shades[kind], linestyle=line, linewidth=1.5)
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        _calm(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy (%)")
    for axes in grid[-1, :]:
        axes.set_xlabel("round")
    handles = [Line2D([], [], color=shade, linewidth=2, label=kind) for kind, shade in shades.items()]
    handles.append(Line2D([], [], color=INK, linewidth=1.5, label="test"))
    handles.append(Line2D([], [], color=INK, linewidth=1.5, linestyle=DASHES, label="validation"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9, labelcolor=INK)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


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
