"""The paper's tables with its value beside ours, for the terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable

from fedsieve.reproduction import published
from fedsieve.reproduction.claims import CLAIMS, Interval, judge
from fedsieve.reproduction.paper import READINGS, SERVER_ONLY, TABLE_2, TABLE_3, TABLE_4, Cell
from fedsieve.reproduction.results import Results
from fedsieve.runs import Spread

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table as text: the first `left` columns name a row, the others numbers. Some are too wide for a terminal.

    What stands at the places `best`, of row and column, is marked.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    left: int
    wide: bool = False
    best: Collection[tuple[int, int]] = ()

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(title=self.title, caption=self.note, header_style="bold")
        table.title_justify = table.caption_justify = "left"
        for place, heading in enumerate(self.headings):
            short = all(len(row[place]) < (30 if place < self.left else 16) for row in self.rows)
            table.add_column(heading, justify="left" if place < self.left else "right", no_wrap=short)
        marked = self._marked("[bold]", "[/bold]")
        for row, following in zip(marked, [*marked[1:], None], strict=True):
            table.add_row(*row, end_section=self.left > 1 and following is not None and following[0] != row[0])
        return table

    def markdown(self) -> str:
        """For a page."""
        bars = ["---" if place < self.left else "---:" for place in range(len(self.headings))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.headings, bars, *self._marked("**", "**"))]
        return "\n".join([f"### {self.title}", "", *lines, "", self.note, ""])

    def _marked(self, before: str, after: str) -> list[list[str]]:
        return [
            [f"{before}{cell}{after}" if (line, column) in self.best else cell for column, cell in enumerate(row)]
            for line, row in enumerate(self.rows)
        ]


def table2(results: Results) -> Table:
    """Sampling ratio × α."""
    return Table(
        "Table 2: accuracy by sampling ratio, class heterogeneity",
        ("α", "Algorithm", "Score", "Ratio", "Paper", "Ours", "Difference", "Last 10 rounds"),
        [
            (
                f"{cell.alpha:g}",
                cell.title,
                cell.score or NOTHING,
                f"{cell.ratio:g}",
                *_accuracy(results, cell, published.TABLE_2),
            )
            for cell in TABLE_2
        ],
        _note(results, TABLE_2),
        left=4,
    )


def table3(results: Results) -> Table:
    """Combinatorial averaging on FedProx and FedPdp."""
    return _by_heterogeneity("Table 3: combinatorial averaging on FedProx and FedPdp", TABLE_3, results)


def table4(results: Results) -> Table:
    """All algorithms."""
    return _by_heterogeneity("Table 4: all algorithms", TABLE_4, results)


def _by_heterogeneity(title: str, cells: Sequence[Cell], results: Results) -> Table:
    return Table(
        title,
        ("Heterogeneity", "Algorithm", "Score", "Paper", "Ours", "Difference", "Last 10 rounds"),
        [
            (cell.heterogeneity, cell.title, cell.score or NOTHING, *_accuracy(results, cell, published.TABLE_4))
            for cell in cells
        ],
        _note(results, cells),
        left=3,
    )


def table5(results: Results) -> Table:
    """Rounds to FedAvg's final accuracy."""
    rows = []
    for cell in TABLE_4:
        theirs = published.TABLE_5.get(cell)
        found = results.rounds(cell)
        reached = [float(rounds) for rounds in found.values() if rounds is not None]
        total, absent = int(results.study.settings["rounds"]), "never" if found else NOTHING
        rows.append(
            (
                cell.heterogeneity,
                cell.title,
                cell.score or NOTHING,
                f"{theirs} ({100 / theirs:.2f}×)" if theirs else "never",
                f"{spread_of(reached)} ({total * len(reached) / sum(reached):.2f}×)" if reached else absent,
                f"{len(reached)} of {len(found)}" if found else NOTHING,
            )
        )
    targets = ", ".join(
        f"{target:.1f} % ({where})" for where in ("client", "class") if (target := results.target(where)) is not None
    )
    return Table(
        "Table 5: rounds to FedAvg's final accuracy",
        ("Heterogeneity", "Algorithm", "Score", "Paper", "Ours", "Seeds that reach it"),
        rows,
        f"Target: FedAvg's mean final accuracy, {targets or NOTHING}; the paper's 63.97 % (client), 40.24 % (class). "
        "(×): rounds of the whole run over rounds needed. The paper counts FedAvg's whole run; ours is the first round "
        "that is as good as its last.",
        left=3,
    )


def readings(results: Results) -> Table:
    """What the paper prints, beside what we take it to mean."""
    rows = []
    for printed, ours in READINGS.items():
        there, here = results.final(printed), results.final(ours)
        both = there.keys() & here.keys()
        difference = sum(there[seed] - here[seed] for seed in both) / len(both) if both else None
        rows.append(
            (
                printed.heterogeneity,
                printed.title,
                "coefficients: literal" if printed.coefficients == "literal" else "refresh: stale",
                spread_of([there[seed] for seed in sorted(both)]),
                spread_of([here[seed] for seed in sorted(both)]),
                NOTHING if difference is None else f"{difference:+.1f}",
            )
        )
    return Table(
        "As printed, and as we read it",
        ("Heterogeneity", "Algorithm", "As printed", "Accuracy", "Our reading", "Difference"),
        rows,
        "Final test accuracy in % of the same seeds, score: accuracy. Difference in points.",
        left=3,
    )


def claims(results: Results) -> Table:
    """A verdict on each claim."""
    rows = []
    for verdict in (judge(claim, results) for claim in CLAIMS):
        claim = verdict.claim
        decided = [part for part in verdict.parts.values() if part is not None]
        positive = sum(part.mean > 0 for part in decided)
        rows.append(
            (
                claim.text + ("" if claim.of_the_paper else " (not in the paper)"),
                f"{interval(verdict.overall)} {claim.by if verdict.overall else ''}".strip(),
                f"{positive} of {len(decided)}",
                verdict.word,
            )
        )
    alone = spread_of(results.final(SERVER_ONLY).values())
    return Table(
        "Claims",
        ("Claim", "Mean difference [95 % interval]", "Cells for it", "Verdict"),
        rows,
        "Runs with the same seed are compared, so that data, partition and initial model are the same; a seed's "
        "difference is the mean over all cells of a claim, the interval is Student's t over seeds. Points of final "
        "accuracy, or rounds saved on the way to FedAvg's final accuracy, where a run that never gets there counts as "
        f"one round more than it had. Server only: {alone} %.",
        left=1,
    )


def _accuracy(results: Results, cell: Cell, theirs: Mapping[Cell, tuple[float, float]]) -> tuple[str, str, str, str]:
    """The paper's final accuracy, ours, the difference in points, and our mean of the last 10 rounds."""
    mean, std = theirs[cell]
    ours, last_10 = results.final(cell).values(), results.last_10(cell).values()
    difference = f"{sum(ours) / len(ours) - mean:+.1f}" if ours else NOTHING
    return f"{mean:.1f} ± {std:.1f}", spread_of(ours), difference, spread_of(last_10)


def _note(results: Results, cells: Sequence[Cell]) -> str:
    counts = sorted({len(results.runs[cell]) for cell in cells})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    settings = results.study.settings
    return (
        f"Test accuracy in %, mean ± standard deviation over seeds (the paper: 2; ours: {seeds}), after "
        f"{settings['rounds']} rounds on {results.study.on}; the paper's are after 100 rounds on CIFAR-10. "
        "Difference in points."
    )


def spread_of(values: Collection[float], digits: int = 1) -> str:
    """Mean ± standard deviation; one value has none."""
    if not values:
        return NOTHING
    spread = Spread.of(list(values))
    mean, std = f"{spread.mean:.{digits}f}", f"{spread.std:.{digits}f}"
    return f"{mean} ± {std}" if len(values) > 1 else mean


def interval(found: Interval | None) -> str:
    """A mean difference and where it lies; of one seed, the difference alone."""
    if found is None:
        return NOTHING
    if math.isinf(found.low):
        return f"{found.mean:+.1f}"
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"
