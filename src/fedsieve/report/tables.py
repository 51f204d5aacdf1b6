"""Tables for the terminal, from comparisons and from the registry of algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedsieve import algorithms
from fedsieve.parts import Part
from fedsieve.report.units import SIZE, TIME, Units, written
from fedsieve.runs import Line, Spread


def comparison_table(lines: Sequence[Line]) -> Table:
    """Mean ± standard deviation over seeds of final, best and last-10 accuracy, and what the first's final one took.

    That is rounds and, where clients have devices, simulated time and bytes sent.
    """
    first = lines[0]
    simulated = any(line.seconds_to_target for line in lines)
    what = "rounds, simulated time and bytes sent" if simulated else "rounds"
    table = Table(
        title=f"Test accuracy in %, mean ± std over {max(line.seeds for line in lines)} seed(s)",
        caption=f"* {what} to reach {100 * first.final.mean:.1f} %, {_title(first)}'s final accuracy; (seeds that did)",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    table.add_column("Algorithm", no_wrap=True)
    costs = ("Rounds*", "Time*", "Bytes*") if simulated else ("Rounds to target*",)
    for heading in ("Final", "Best", "Last 10 rounds", *costs):
        table.add_column(heading, justify="right", no_wrap=True)
    best = max(line.mean_last_10.mean for line in lines)
    for line in lines:
        rounds = line.rounds_to_target
        cells = [
            _title(line),
            _percent(line.final),
            _percent(line.best),
            _percent(line.mean_last_10),
            "–" if rounds is None else f"{rounds.mean:.1f} ({line.reached}/{line.seeds})",
        ]
        if simulated:
            cells += [_amount(line.seconds_to_target, TIME), _amount(line.bytes_to_target, SIZE)]
        table.add_row(*cells, style="bold" if line.mean_last_10.mean == best else None)
    return table


def attack_table(lines: Sequence[Line]) -> Table:
    """Of runs with hostile clients: their share of requests and of models kept, and how well a backdoor works."""
    table = Table(
        title="Share of hostile clients in %",
        caption="Gini: how unevenly clients were asked, from 0 to 1",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    table.add_column("Algorithm", no_wrap=True)
    backdoor = any(line.backdoor_success for line in lines)
    for heading in ("Of those asked", "Of those kept", "Gini", *(("Backdoor works",) if backdoor else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        cells = [_title(line), _percent(line.hostile_sampled), _percent(line.hostile_kept)]
        cells.append("–" if line.requests_gini is None else f"{line.requests_gini.mean:.2f}")
        table.add_row(*cells, *([_percent(line.backdoor_success)] if backdoor else []))
    return table


PHASE_MEANINGS = {
    "sample": "choose clients, and learn from what was kept",
    "train": "the clients' local training",
    "score": "check the models, their outputs on validation data",
    "search": "which models to believe",
    "average": "one model out of those kept",
    "evaluate": "the new model on test and validation data",
    "write": "the round's row and checkpoint",
}


def profile_table(rounds: Sequence[Mapping[str, float]]) -> Table:
    """Where the time of rounds went: the first one, which warms up, and the mean of those after it."""
    later = rounds[1:] or rounds
    means = {phase: sum(round[phase] for round in later) / len(later) for phase in PHASE_MEANINGS}
    total = sum(means.values()) or 1.0
    table = Table(
        title=f"Milliseconds of a round (first, and mean of {len(later)})" if rounds[1:] else "Milliseconds of a round",
        title_justify="left",
        header_style="bold",
        show_footer=True,
    )
    table.add_column("Phase", "all")
    table.add_column("First", f"{1000 * sum(rounds[0].values()):,.1f}", justify="right")
    table.add_column("Mean", f"{1000 * sum(means.values()):,.1f}", justify="right")
    table.add_column("Share", "100 %", justify="right")
    table.add_column("", min_width=20, no_wrap=True)
    table.add_column("What")
    for phase, meaning in PHASE_MEANINGS.items():
        share = means[phase] / total
        bar = "█" * round(20 * share) or ("▏" if share else "")
        numbers = (f"{1000 * rounds[0][phase]:,.1f}", f"{1000 * means[phase]:,.1f}", f"{100 * share:.0f} %")
        table.add_row(phase, *numbers, bar, meaning)
    return table


def algorithms_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The paper's Table 1, from the code."""
    title = "Algorithms (Table 1 of the paper and more, from the code)"
    table = Table(header_style="bold", title=title, title_justify="left")
    for heading in ("Name", "Model filter", "Prior knowledge", "Sampling", "Objective", "Averaging"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            "yes" if row["model_filter"] else "no",
            "yes" if row["prior_knowledge"] else "no",
            row["sampling"],
            row["objective"],
            row["averaging"],
        )
    return table


def parts_table(title: str, parts: Mapping[str, Part[Any]]) -> Table:
    """Samplers or filters: name, source and needs."""
    table = Table(header_style="bold", title=title, title_justify="left")
    for heading in ("Name", "Source", "Needs"):
        table.add_column(heading, overflow="fold")
    for name, part in parts.items():
        table.add_row(name, part.source, part.needs)
    return table


def attacks_table(sources: Mapping[str, str]) -> Table:
    """Attacks: name and source."""
    table = Table(header_style="bold", title="Attacks, for --attack with --hostile", title_justify="left")
    for heading in ("Name", "Source"):
        table.add_column(heading, overflow="fold")
    for name, source in sources.items():
        table.add_row(name, source)
    return table


def _percent(spread: Spread | None) -> str:
    return "–" if spread is None else f"{100 * spread.mean:.1f} ± {100 * spread.std:.1f}"


def _amount(spread: Spread | None, units: Units) -> str:
    return "–" if spread is None else written(spread.mean, units)


def _title(line: Line) -> str:
    known = algorithms.ALGORITHMS.get(line.algorithm)
    return known.title if known else line.algorithm
