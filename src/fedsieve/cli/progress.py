"""Progress of runs: a bar with rounds, accuracy and time left on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round is done."""
        self.bars.update(self.task, advance=1, accuracy=f"{100 * row['test_accuracy']:.1f} %")
