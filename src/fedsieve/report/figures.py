"""The pictures: accuracy curves, who was sampled and kept, data per client. Each returns a Matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsieve import algorithms
from fedsieve.report.style import (
    GRID,
    HOSTILE_KEPT,
    HOSTILE_LEFT_OUT,
    INK,
    KEPT,
    LEFT_OUT,
    colours_of,
    new_figure,
    quiet,
)
from fedsieve.report.units import SIZE, TIME, unit_for
from fedsieve.runs.experiment import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Sequence[float]]]
"""Runs of accuracies in [0, 1] by the name of their algorithm."""

Timed = Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]
"""Runs by the name of their algorithm: what they had taken by the end of each round, and accuracies in [0, 1]."""

NOT_ASKED, ASKED, TAKEN, HOSTILE_ASKED, HOSTILE_TAKEN = range(5)
MARKS = {
    "not asked": "#f4f4f4",
    "asked, left out": LEFT_OUT,
    "asked and kept": KEPT,
    "hostile, left out": HOSTILE_LEFT_OUT,
    "hostile, kept": HOSTILE_KEPT,
}


def accuracy_curves(curves: Curves, title: str = "") -> Figure:
    """Test accuracy over rounds: for each algorithm the mean over its runs, and a band of one standard deviation.

    `curves` maps algorithm names to runs of accuracies in [0, 1].
    """
    figure = new_figure(8, 4.6)
    axes = figure.add_subplot()
    _label_ends(axes, _draw_curves(axes, curves, colours_of(curves)))
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy (%)")
    if title:
        axes.set_title(title, loc="left", fontsize=11, color=INK)
    return figure


def accuracy_over(what: Simulated, curves: Timed, title: str = "") -> Figure:
    """Test accuracy over simulated seconds or bytes sent, as steps: what was known by then.

    For each algorithm the mean over its runs and a band of one standard deviation, from where all of them have an
    accuracy to where the first of them ends.
    """
    axis, units = {"seconds": ("simulated time", TIME), "bytes": ("bytes sent", SIZE)}[what]
    unit, size = unit_for(max(taken[-1] for runs in curves.values() for taken, _ in runs), units)
    figure = new_figure(8, 4.6)
    axes = figure.add_subplot()
    ends, colours = [], colours_of(curves)
    for name, runs in curves.items():
        places, values = common_steps(runs)
        if not len(places):
            continue
        mean, own = 100 * values.mean(0), colours[name]
        axes.step(places / size, mean, where="post", color=own, linewidth=1.8, label=_title(name))
        if len(runs) > 1:
            spread = 100 * values.std(0, ddof=1)
            low, high = mean - spread, mean + spread
            axes.fill_between(places / size, low, high, step="post", color=own, alpha=0.13, linewidth=0)
        ends.append((float(mean[-1]), _title(name), own))
    _calm(axes)
    axes.set_xlim(left=0)
    _label_ends(axes, ends)
    axes.set_xlabel(f"{axis} ({unit})")
    axes.set_ylabel("test accuracy (%)")
    if title:
        axes.set_title(title, loc="left", fontsize=11, color=INK)
    return figure


def common_steps(
    runs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Step functions on common places [n] and their values [runs, n], where all are known: `runs` of (where, value)."""
    first, last = max(taken[0] for taken, _ in runs), min(taken[-1] for taken, _ in runs)
    places = np.unique(np.concatenate([np.asarray(taken, dtype=np.float64) for taken, _ in runs]))
    places = places[(places >= first) & (places <= last)]
    return places, np.array([np.asarray(values)[np.searchsorted(taken, places, "right") - 1] for taken, values in runs])


def accuracy_panels(
    panels: Mapping[str, Curves], columns: int = 2, title: str = "", colours: Mapping[str, str] | None = None
) -> Figure:
    """Accuracy curves side by side on the same scale, each panel as in `accuracy_curves`, with one legend for all."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colours = colours or colours_of(names)
    lines = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns, 0.9 + 3.0 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
        _draw_curves(axes, curves, colours)
        axes.set_title(name, fontsize=10, color=INK, loc="left")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    for axes in grid[-1, :]:
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
    handles = [Line2D([], [], color=colours[name], linewidth=2, label=_title(name)) for name in names]
    columns_of_legend = len(names) if len(names) <= 6 else -(-len(names) // 2)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns_of_legend, frameon=False, fontsize=9, labelcolor=INK
    )
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def _draw_curves(axes: Axes, curves: Curves, colours: Mapping[str, str]) -> list[tuple[float, str, str]]:
    """Draw mean and band of each algorithm; the last mean, title and colour of each."""
    ends: list[tuple[float, str, str]] = []
    for name, runs in curves.items():
        shortest = min(len(run) for run in runs)
        values = 100 * np.array([run[:shortest] for run in runs])
        mean, rounds = values.mean(0), np.arange(1, shortest + 1)
        own = colours[name]
        axes.plot(rounds, mean, color=own, linewidth=1.8, label=_title(name))
        if len(runs) > 1:
            spread = values.std(0, ddof=1)
            axes.fill_between(rounds, mean - spread, mean + spread, color=own, alpha=0.13, linewidth=0)
        ends.append((float(mean[-1]), _title(name), own))
    _calm(axes)
    return ends


def _calm(axes: Axes) -> None:
    quiet(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.set_ylim(bottom=0)


def class_accuracy(panels: Mapping[str, NDArray[np.float64]], columns: int = 4, title: str = "") -> Figure:
    """The paper's Figure 5: how well each client's model does on each class, as a map of shares [clients, classes].

    Clients of which nothing is known are NaN, and left white.
    """
    lines = -(-len(panels) // columns)
    figure = new_figure(2.9 * columns + 0.8, 0.9 + 2.1 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, shares) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(100 * shares.T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=100)
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        quiet(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_yticks(range(0, shares.shape[1], 1 if shares.shape[1] <= 10 else 5))
        axes.tick_params(labelsize=7)
    for axes in grid[:, 0]:
        axes.set_ylabel("class")
    for axes in grid[-1, :]:
        axes.set_xlabel("client")
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.01)
    bar.set_label("accuracy (%)", color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def participation(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    clients: int,
    title: str = "",
    hostile: Mapping[str, Sequence[int]] = {},
) -> Figure:
    """Who was sampled and who was kept, round by round: one panel per algorithm, one row of cells per client.

    `rows` maps algorithm names to the rows of one run each, `hostile` to the clients that are hostile in it.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure = new_figure(3.6 * columns, 0.8 + 2.5 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(rows) :]:
        axes.set_visible(False)
    for axes, (name, run) in zip(panels.flat, rows.items(), strict=False):
        axes.imshow(
            participation_map(run, clients, hostile.get(name, ())),
            aspect="auto",
            interpolation="nearest",
            cmap=ListedColormap(list(MARKS.values())),
            vmin=NOT_ASKED,
            vmax=HOSTILE_TAKEN,
            extent=(0.5, len(run) + 0.5, clients - 0.5, -0.5),
        )
        axes.set_title(_title(name), fontsize=10, color=INK, loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        quiet(axes)
    for axes in panels[:, 0]:
        axes.set_ylabel("client")
    for axes in panels[-1, :]:
        axes.set_xlabel("round")
    patches = [Patch(facecolor=shade, edgecolor=GRID, label=label) for label, shade in MARKS.items()]
    patches = patches[: None if any(map(len, hostile.values())) else HOSTILE_ASKED]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def participation_map(rows: Sequence[Mapping[str, Any]], clients: int, hostile: Sequence[int] = ()) -> NDArray[np.int8]:
    """[clients, rounds] of 0 (not asked), 1 (left out) and 2 (kept); of hostile clients 3 (left out) and 4 (kept)."""
    cells = np.zeros((clients, len(rows)), dtype=np.int8)
    for column, row in enumerate(rows):
        cells[row["sampled"], column] = ASKED
        cells[row["kept"], column] = TAKEN
    of_hostile = cells[list(hostile)]
    cells[list(hostile)] = np.where(of_hostile, of_hostile + TAKEN, NOT_ASKED)
    return cells


def data_per_client(panels: Mapping[str, NDArray[np.int64]], title: str = "") -> Figure:
    """The paper's Figure 1: how many examples of each class every client holds, as stacked bars.

    `panels` maps a panel's title to counts [clients, classes].
    """
    from matplotlib import colormaps

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(max(6.0, 3.8 * columns), 0.9 + 2.7 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    palette = colormaps["tab10" if next(iter(panels.values())).shape[1] <= 10 else "tab20"]
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, counts) in zip(grid.flat, panels.items(), strict=False):
        clients, classes = counts.shape
        bottoms = np.zeros(clients)
        for label in range(classes):
            shade = palette(label % palette.N)
            axes.bar(np.arange(clients), counts[:, label], 0.85, bottoms, color=shade, label=str(label))
            bottoms += counts[:, label]
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        quiet(axes)
        axes.margins(x=0.01)
        axes.set_ylim(top=1.05 * bottoms.max())
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("examples")
    for axes in grid[-1, :]:
        axes.set_xlabel("client")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    if len(labels) <= 20:
        figure.legend(
            handles, labels, title="class", loc="outside right upper", frameon=False, fontsize=8, labelcolor=INK
        )
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def _title(name: str) -> str:
    known = algorithms.ALGORITHMS.get(name)
    return known.title if known else name


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names at the right end of their curves, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.052 * (high - min(low, 0))
    place = float("inf")
    for value, name, own in sorted(ends, reverse=True):
        place = min(value, place - gap)
        axes.annotate(
            name,
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            color=own,
            va="center",
            fontsize=9.5,
            annotation_clip=False,
        )
