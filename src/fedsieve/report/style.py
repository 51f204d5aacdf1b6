"""One look for every picture: quiet axes, colours that colour-blind readers can tell apart (Okabe & Ito 2008)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#333333"
GRID = "#e4e4e4"
LEFT_OUT = "#E69F00"
KEPT = "#0072B2"
HOSTILE_LEFT_OUT = "#CC79A7"
HOSTILE_KEPT = "#000000"
COLOURS = {
    "fedavg": "#555555",
    "fedprox": "#E69F00",
    "fedpdp": "#56B4E9",
    "fedca": "#009E73",
    "fedprox-ca": "#CC79A7",
    "fedcm-ucb": "#D55E00",
    "fedcm-ts": "#0072B2",
    "fedsieve": "#8B4513",
    "fedsieve-ucb": "#6A3D9A",
    "fedsieve-ts": "#000000",
    "fedsieve-finetune": "#332288",
    "server-only": "#A0A0A0",
    "fedpdp-finetune": "#7F7F00",
    "fedpdp-server-client": "#B03060",
}
SPARE = ("#6A3D9A", "#8B4513", "#000000", "#B2A000")


def colours_of(names: Collection[str]) -> dict[str, str]:
    """An algorithm's own colour, the same in every picture; for others those that none of the names has."""
    taken = {COLOURS[name] for name in names if name in COLOURS}
    spare = cycle(dict.fromkeys(colour for colour in (*SPARE, *COLOURS.values()) if colour not in taken))
    return {name: COLOURS.get(name) or next(spare) for name in names}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that belongs to no window and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def quiet(axes: Axes) -> None:
    """Take away what is not data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(INK)
        text.set_fontsize(10)


def save(figure: Figure, path: Path) -> Path:
    """Write the picture; the ending of the name is its format (png, svg, pdf). The same picture is the same file."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "fedsieve"}):
        figure.savefig(path, dpi=150, metadata=undated.get(path.suffix))
    return path
