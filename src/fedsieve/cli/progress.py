"""Progress of runs on a terminal, nothing elsewhere: a bar, or a table of those that a cluster has under way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedsieve.runs import Callback, Config


class RunProgress(Callback):
    """One bar for all runs of a command: `total_rounds` over all of them. Use it as a context."""

    def __init__(self, total_rounds: int) -> None:
        console = Console(stderr=True)
        self.bars = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            expand=True,
        )
        self.total_rounds = total_rounds

    def __enter__(self) -> Self:
        self.bars.start()
        self.task = self.bars.add_task("starting", total=self.total_rounds, accuracy="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def on_start(self, config: Config, done: int) -> None:
        """A run begins or goes on."""
        self.bars.update(self.task, description=f"{config.algorithm}, seed {config.seed}", advance=done, accuracy="")

    def show(self, what: str, done: int, accuracy: float) -> None:
        """So many rounds are done."""
        self.bars.update(self.task, description=what, completed=done, accuracy=f"{100 * accuracy:.1f} %")

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round is done."""
        self.bars.update(self.task, advance=1, accuracy=f"{100 * row['test_accuracy']:.1f} %")


class RunsTable:
    """What becomes of `runs` runs of `rounds` rounds each on a cluster, as a live table. Use it as a context."""

    def __init__(self, runs: int, rounds: int) -> None:
        self.runs, self.rounds = runs, rounds
        self.events: dict[Path, Mapping[str, Any]] = {}
        self.began = time.monotonic()
        console = Console(stderr=True)
        self.live = Live(console=console, get_renderable=self.table, refresh_per_second=2, transient=True)
        self.shown = console.is_terminal

    def __enter__(self) -> Self:
        if self.shown:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def __call__(self, folder: Path, event: Mapping[str, Any]) -> None:
        """Something happened to a run, as `run_many` tells it."""
        self.events[folder] = event

    def table(self) -> Table:
        """The runs that are under way, and how many there are of others."""
        states = [event["state"] for event in self.events.values()]
        under_way = {folder: event for folder, event in self.events.items() if event["state"] == "running"}
        done, failed = states.count("done"), states.count("failed")
        waiting = self.runs - done - failed - len(under_way)
        title = f"{done} of {self.runs} runs done, {len(under_way)} under way, {waiting} waiting"
        title += f", {failed} failed" if failed else ""
        table = Table(title=f"{title}; {self._left(done + failed, under_way)}", title_justify="left", box=None)
        for heading in ("Run", "Rounds", "", "Accuracy", "Node"):
            table.add_column(heading, justify="right" if heading in ("Rounds", "Accuracy") else "left")
        for folder, event in sorted(under_way.items()):
            accuracy = f"{100 * event['accuracy']:.1f} %" if "accuracy" in event else ""
            bar = ProgressBar(self.rounds, event["round"], width=30)
            table.add_row("/".join(folder.parts[-2:]), f"{event['round']}", bar, accuracy, str(event["node"]))
        return table

    def _left(self, ended: int, under_way: Mapping[Path, Mapping[str, Any]]) -> str:
        past = ended * self.rounds + sum(event["round"] for event in under_way.values())
        if not past:
            return "starting"
        left = (time.monotonic() - self.began) * (self.runs * self.rounds - past) / past
        return f"{timedelta(seconds=round(left))} left"
