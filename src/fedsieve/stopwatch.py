"""Where the time of a round goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("sample", "train", "score", "search", "average", "evaluate", "write")


class Stopwatch:
    """Seconds per phase of each round. A GPU is waited for, so that its work counts where it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rounds: list[dict[str, float]] = []

    def next_round(self) -> None:
        """From now on time counts for a new round."""
        self.rounds.append(dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, time counts as `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self.rounds[-1][name] += time.perf_counter() - began
