"""The runs there are, by the cell they belong to."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from fedsieve.reproduction.paper import Cell
from fedsieve.reproduction.study import AnyCell, Study
from fedsieve.runs import Config, History, rounds_to
from fedsieve.runs.config import PLACE

log = logging.getLogger("fedsieve")


class Results:
    """Finished runs of a study. Only runs that differ in nothing but their seed are put together."""

    def __init__(self, study: Study, cells: Iterable[AnyCell], histories: Iterable[History]) -> None:
        self.study = study
        self.runs: dict[AnyCell, dict[int, History]] = {cell: {} for cell in cells}
        places = {_what(cell.config(study, 0)): cell for cell in self.runs}
        others = 0
        for history in histories:
            cell = places.get(_what(history.config))
            if cell is None or history.summary.get("own_parts"):
                others += 1
            elif history.config.seed in self.runs[cell]:
                log.warning("%s, seed %d: there are two records; the first is taken", cell.title, history.config.seed)
            else:
                self.runs[cell][history.config.seed] = history
        if others:
            log.info("%d records are of other settings, or not asked for, and left out", others)

    def of(self, cell: AnyCell) -> list[History]:
        """The runs of a cell in the order of their seeds."""
        return [history for _, history in sorted(self.runs.get(cell, {}).items())]

    def all(self) -> list[History]:
        """Every run."""
        return [history for cell in self.runs for history in self.of(cell)]

    def final(self, cell: AnyCell) -> dict[int, float]:
        """Final accuracy in % by seed."""
        return {seed: 100 * float(history.summary["final_accuracy"]) for seed, history in self.runs[cell].items()}

    def last_10(self, cell: AnyCell) -> dict[int, float]:
        """Mean accuracy of the last 10 rounds in % by seed."""
        return {seed: 100 * float(history.summary["mean_last_10"]) for seed, history in self.runs[cell].items()}

    def target(self, heterogeneity: str) -> float | None:
        """FedAvg's mean final accuracy in %, which the others race to."""
        return mean_of(self.final(Cell("fedavg", heterogeneity)))

    def rounds(self, cell: Cell, heterogeneity: str | None = None) -> dict[int, int | None]:
        """By seed, the first round whose accuracy is at least FedAvg's final one; None if none is.

        FedAvg's is that of the cell's heterogeneity, or of another, which a run without clients may be compared with.
        """
        target = self.target(heterogeneity or cell.heterogeneity)
        if target is None:
            return {}
        return {seed: rounds_to(target / 100, history.accuracy) for seed, history in self.runs[cell].items()}


def mean_of(values: dict[int, float]) -> float | None:
    """The mean over seeds, if there are any."""
    return sum(values.values()) / len(values) if values else None


def _what(config: Config) -> str:
    """What runs of a cell have in common; FAVOR has an agent for each seed."""
    return json.dumps(config.model_dump(mode="json", exclude={*PLACE, "seed", "favor_agent"}), sort_keys=True)
