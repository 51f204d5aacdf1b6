"""The field compared: pictures of samplers, and of defences under attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsieve.attacks import ATTACKS
from fedsieve.parts import SAMPLERS
from fedsieve.report.style import GRID, INK, KEPT, LEFT_OUT, new_figure, quiet
from fedsieve.reproduction.field import DEFENCES, KEEPERS, SHARES, Battle, Choice, can_stand
from fedsieve.reproduction.field_tables import SAID
from fedsieve.reproduction.paper import HETEROGENEITIES
from fedsieve.reproduction.results import Results, mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def samplers_figure(results: Results) -> Figure | None:
    """Final accuracy by sampler, all kept and the best subset kept."""
    panels = {
        f"{where} heterogeneity": {
            f"{SAID[keep]} kept": {
                sampler: list(found.values())
                for sampler in SAMPLERS
                if (found := results.final(Choice(sampler, keep, where)))
            }
            for keep in KEEPERS
        }
        for where in HETEROGENEITIES
    }
    if not results.all():
        return None
    return _dots(panels, "final test accuracy (%)", f"Ways to choose clients, {results.study.on}")


def attacks_figure(results: Results) -> Figure | None:
    """Accuracy as a map: defences × attacks, one for each share of hostile clients."""
    if not results.all():
        return None
    maps, left_out = {}, {}
    for share in SHARES:
        name = f"{100 * share:.0f} % of the clients hostile"
        cells = [[Battle(defence), *(Battle(defence, attack, share) for attack in ATTACKS)] for defence in DEFENCES]
        values = [[mean_of(results.final(cell)) if cell in results.runs else None for cell in line] for line in cells]
        maps[name] = np.array(values, dtype=np.float64)
        left_out[name] = [line for line, defence in enumerate(DEFENCES) if not can_stand(defence, share)]
    return _maps(
        maps,
        [Battle(defence).title for defence in DEFENCES],
        ["nobody", *ATTACKS],
        "final test accuracy (%)",
        f"Defences and attacks, {results.study.on}",
        left_out,
    )


def _dots(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], unit: str, title: str) -> Figure:
    """A line for every name, a dot for every kind: mean, and a bar of one standard deviation to either side.

    `panels` maps a panel's title to kinds, these to names, these to values. The best come first.
    """
    figure = new_figure(10, 1.4 + 0.29 * len(SAMPLERS))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, kinds) in zip(grid, panels.items(), strict=True):
        best = {
            one: max(np.mean(kind[one]) for kind in kinds.values() if one in kind)
            for kind in kinds.values()
            for one in kind
        }
        order = sorted(best, key=best.__getitem__)
        for (kind, values), shade, marker in zip(kinds.items(), (LEFT_OUT, KEPT), ("o", "D"), strict=True):
            there = [one for one in order if one in values]
            axes.errorbar(
                [float(np.mean(values[one])) for one in there],
                [order.index(one) for one in there],
                xerr=[float(np.std(values[one], ddof=1)) if len(values[one]) > 1 else 0.0 for one in there],
                fmt=marker, markersize=5, color=shade, ecolor=shade, elinewidth=1.2, label=kind,
            )  # fmt: skip
        axes.set_yticks(range(len(order)), order)
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        axes.set_xlabel(unit)
        quiet(axes)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure


def _maps(
    maps: Mapping[str, NDArray[np.float64]],
    lines: Sequence[str],
    columns: Sequence[str],
    unit: str,
    title: str,
    left_out: Mapping[str, Sequence[int]],
) -> Figure:
    """Numbers [lines, columns] as maps, one over the other; what there is none of is NaN, and left white.

    `left_out` has, for each map, the lines that can have no numbers but the first column's.
    """
    figure = new_figure(10, 0.9 + len(maps) * (1.3 + 0.28 * len(lines)))
    grid = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    best = np.nanmax([*maps.values()], initial=1.0)
    for axes, (name, values) in zip(grid, maps.items(), strict=True):
        image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=best)
        for (line, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                shade = "white" if value < best / 2 else "black"
                axes.text(column, line, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=8)
        for line in left_out[name]:
            axes.text(len(columns) / 2, line, "too few honest models for it", ha="center", va="center", fontsize=8)
        axes.set_yticks(range(len(lines)), lines)
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor")
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        quiet(axes)
        axes.axvline(0.5, color="white", linewidth=3)
    bar = figure.colorbar(image, ax=list(grid), shrink=0.4, pad=0.01, anchor=(0.0, 1.0))
    bar.set_label(unit, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure
