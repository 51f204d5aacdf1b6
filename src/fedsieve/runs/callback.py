"""Hooks into a run: progress bars, trackers and early looks are callbacks, not part of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsieve.runs.config import Config


class Callback:
    """Override what you need; the defaults do nothing."""

    def on_start(self, config: Config, done: int) -> None:
        """Before the first round, `done` rounds having been made before the run was interrupted."""

    def on_round(self, row: Mapping[str, Any]) -> None:
        """After each round, with its row of `metrics.jsonl`, which is on disk by then."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """After the last round."""
