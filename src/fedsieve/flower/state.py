"""A federation's state on disk, after each round: a ServerApp that is killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedsieve.errors import InvalidSetting
from fedsieve.runs.directory import SMOOTHED, VELOCITY, Checkpoint, RunDirectory, write_whole
from fedsieve.vector import Layout

METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class State:
    """Rows, checkpoints and results of a federation, in the files that runs are written in."""

    def __init__(self, folder: Path | str) -> None:
        self.directory = RunDirectory(folder)
        self.results_file = self.directory.path / "results.json"
        try:
            self.directory.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting("state_dir", str(folder), f"a folder that can be written to ({error})") from None

    def load(self, layout: Layout) -> Checkpoint | None:
        """The last whole round with its model and what else was saved; None before the first."""
        checkpoint, _ = self.directory.latest()
        if checkpoint is None:
            return None
        expected = {piece.name: piece.shape for piece in layout.pieces}
        beside = (SMOOTHED, VELOCITY)
        found = {name: tuple(one.shape) for name, one in checkpoint.tensors.items() if not name.startswith(beside)}
        if found != expected:
            raise InvalidSetting("state_dir", str(self.directory.path), "the state of a run of the same model")
        return checkpoint

    def save(
        self,
        row: Mapping[str, Any],
        model: Tensor,
        layout: Layout,
        parts: Mapping[str, Any],
        beside: Mapping[str, Tensor | None],
    ) -> None:
        """A round is done: its row, the model [size], the state of the parts, and vectors beside the model."""
        self.directory.append(row)
        self.directory.save(row["round"], model, layout, parts, beside)

    def save_results(self, result: Result) -> None:
        """What Flower collects, but for the model."""
        content = {
            name: {str(round): dict(record) for round, record in getattr(result, name).items()} for name in METRICS
        }
        write_whole(self.results_file, (json.dumps(content, indent=1) + "\n").encode())

    def load_results(self, rounds: int) -> Result:
        """What was collected up to a round."""
        result = Result()
        if self.results_file.exists():
            try:
                content = json.loads(self.results_file.read_text(encoding="utf-8"))
                for name in METRICS:
                    kept = {int(round): MetricRecord(record) for round, record in content[name].items()}
                    setattr(result, name, {round: record for round, record in kept.items() if round <= rounds})
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                problem = " ".join(f"{type(error).__name__}: {error}".split())
                allowed = f"one that is whole, or none: what was collected in earlier rounds is gone ({problem})"
                raise InvalidSetting("state_dir", str(self.results_file), allowed) from None
        return result
