"""What a study is: cells of tables, each a run but for its seed, and what all its runs have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fedsieve.errors import InvalidSetting
from fedsieve.runs import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsieve.reproduction.results import Results
    from fedsieve.reproduction.tables import Table


class AnyCell(Protocol):
    """A cell of some table."""

    @property
    def title(self) -> str:
        """What people call it."""

    def config(self, study: Study, seed: int) -> Config:
        """The run of this cell with a seed."""

    def __hash__(self) -> int:
        """Cells that say the same are the same."""


@dataclass(frozen=True)
class Target:
    """What people ask for: the cells it needs, with how many seeds unless told otherwise, and what is made of them."""

    title: str
    cells: Sequence[AnyCell]
    seeds: int
    tables: Sequence[Callable[[Results], Table]] = ()
    figure: Callable[[Results], Figure | None] | None = None


@dataclass(frozen=True)
class Study:
    """What all runs that are compared have in common."""

    settings: Mapping[str, Any]

    @property
    def on(self) -> str:
        """The data set, as people write it."""
        name = str(self.settings["dataset"])
        return {"cifar10": "CIFAR-10", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}.get(name, name)


@dataclass(frozen=True)
class Plan:
    """Targets that share a setting: `full`, or `quick` on bundled data; `suited` has what goes with a data set.

    With `quick_seeds` every run is made with so many seeds where it is to be quick. Where there are too many kinds of
    runs for one, no interactive `page` about all of them is written. `prepare` makes what a run needs.
    """

    name: str
    title: str
    targets: Mapping[str, Target]
    full: Mapping[str, Any]
    quick: Mapping[str, Any]
    suited: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quick_seeds: int | None = None
    page: bool = True
    prepare: Callable[[Config, Study], None] = lambda config, study: None

    def study(self, quick: bool, rounds: int | None, dataset: str | None, device: str, **more: Any) -> Study:
        """The setting with rounds and data set of one's own, if given."""
        given = {name: value for name, value in (("dataset", dataset), ("rounds", rounds)) if value is not None}
        settings = {**(self.quick if quick else self.full), **given}
        return Study({**settings, **self.suited.get(settings["dataset"], {}), "device": device, **more})

    def find(self, names: Sequence[str]) -> list[str]:
        """The names of targets, "all" and the plan's own name standing for each of them."""
        return list(self.targets) if {"all", self.name}.intersection(names) else list(dict.fromkeys(names))

    def jobs(self, names: Sequence[str], seeds: int | None) -> list[tuple[AnyCell, int]]:
        """Every run that the targets need, once; seed by seed, so that what is done first is already a table."""
        if seeds is not None and seeds < 1:
            raise InvalidSetting("seeds", seeds, "a whole number of at least 1")
        wanted: dict[AnyCell, int] = {}
        for name in names:
            target = self.targets[name]
            count = target.seeds if seeds is None or name == "figure5" else seeds  # Figure 5 shows one run of each
            for cell in target.cells:
                wanted[cell] = max(wanted.get(cell, 0), count)
        most = max(wanted.values(), default=0)
        return [(cell, seed) for seed in range(most) for cell, count in wanted.items() if seed < count]
