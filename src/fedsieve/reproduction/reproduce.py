"""Make the runs that are missing, then the tables, figures and pages about all there are."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsieve.errors import InvalidSetting, MissingData
from fedsieve.locking import locked, made
from fedsieve.report import style
from fedsieve.report.page import write_page
from fedsieve.reproduction.numbers import numbers
from fedsieve.reproduction.results import Results
from fedsieve.reproduction.study import Plan, Study, Target
from fedsieve.reproduction.tables import Table
from fedsieve.runs import Callback, Config, History, find_runs, read_record, record_name, run_many, write_record
from fedsieve.runs.config import PLACE

FORMATS = ("png", "svg", "pdf")
SAVE_EVERY = 10.0
"""Seconds between a run's checkpoints: they are thrown away with its folder, and take much of a short round."""

log = logging.getLogger("fedsieve")


class Reproduction:
    """Targets of a plan in a folder: `records` of what is finished, `runs` that are under way, and what came out.

    Finished runs below the folders or files in `also` count too.
    """

    def __init__(
        self, plan: Plan, study: Study, targets: Sequence[str], seeds: int | None, out: Path, also: Sequence[Path] = ()
    ) -> None:
        self.plan, self.study, self.out, self.also = plan, study, out, also
        self.targets = plan.find(targets)
        self.jobs = plan.jobs(self.targets, seeds)
        self.records = out / "records"

    def results(self) -> Results:
        """What is finished, of any seed and of every target of the plan."""
        targets = sorted(self.plan.targets.values(), key=lambda target: -len(target.cells))  # Table 4's order first
        cells = dict.fromkeys(cell for target in targets for cell in target.cells)
        own = [self.records] if self.records.is_dir() else []
        return Results(self.study, cells, find_runs([*own, *self.also]))

    def missing(self) -> dict[Path, Config]:
        """The runs still to be made, by the folder they are made in."""
        finished = self.results().runs
        configs = [cell.config(self.study, seed) for cell, seed in self.jobs if seed not in finished[cell]]
        return {self.out / "runs" / record_name(config): config for config in configs}

    def run(
        self,
        callbacks: Sequence[Callback] = (),
        at_once: int | None = None,
        watch: Callable[[Path, Mapping[str, Any]], None] = lambda folder, event: None,
    ) -> None:
        """Make the missing runs; each becomes a record as it ends. Several processes may do so at once."""
        with made(self.out):
            run_many(self.missing(), callbacks, at_once, self._keep, watch, SAVE_EVERY, self._begin)
        if left := len(self.missing()):
            log.warning("%d of %d runs are missing: they failed, or another process is at them", left, len(self.jobs))

    def _begin(self, folder: Path, config: Config) -> bool:
        """Make what the run needs, unless another process has made the run."""
        try:
            read_record(self.records / f"{record_name(config)}.json")
        except InvalidSetting:  # not there, or damaged
            self.plan.prepare(config, self.study)
            return True
        return False

    def _keep(self, folder: Path, history: History) -> None:
        write_record(history, self.records)
        shutil.rmtree(folder)  # its checkpoints are large, and all else is in the record


@dataclass(frozen=True)
class Outcome:
    """What was written and what to print."""

    tables: list[Table]
    files: list[Path]


def write_up(reproduction: Reproduction) -> Outcome:
    """Tables as Markdown, all numbers as JSON, figures as PNG, SVG and PDF, and the page; one process at a time.

    The Markdown page has all that there are runs for in the folder, asked for now or before.
    """
    with locked(reproduction.out):
        return _write_up(reproduction)


def _write_up(reproduction: Reproduction) -> Outcome:
    results, out, plan = reproduction.results(), reproduction.out, reproduction.plan
    tables, files, pages, pictures = list[Table](), list[Path](), list[str](), list[str]()
    for name, target in plan.targets.items():
        asked = name in reproduction.targets
        if asked or any(results.of(cell) for cell in target.cells):
            made_now = [make(results) for make in target.tables]
            pages += [table.markdown() for table in made_now]
            tables += made_now if asked else []
        picture = out / "figures" / f"{name}.png"
        if asked and _draw(target, results, picture):
            files.append(picture)
        if target.figure is not None and picture.exists():
            pictures.append(f"### {target.title}\n\n![{target.title}](figures/{name}.png)\n")
    text = [f"# {plan.title} on {results.study.on}\n", _what_was_run(results)]
    summary = out / "results.md"
    summary.parent.mkdir(parents=True, exist_ok=True)
    summary.write_text("\n".join([*text, *pages, *pictures]), encoding="utf-8")
    files.append(summary)
    if results.all():
        raw = out / "results.json"
        raw.write_text(numbers(results), encoding="utf-8")
        files.append(raw)
    if results.all() and plan.page:
        files.append(write_page(results.all(), out / "report.html", f"{plan.title} on {results.study.on}"))
    return Outcome(tables, files)


def _draw(target: Target, results: Results, picture: Path) -> bool:
    """Whether the target's figure was drawn, in all formats."""
    if target.figure is None:
        return False
    try:
        figure = target.figure(results)
    except MissingData as error:  # Figure 1 shows the data set itself
        log.warning("%s is left out: %s", target.title, error)
        return False
    if figure is None:
        log.info("%s: no runs yet", target.title)
        return False
    for ending in FORMATS:
        style.save(figure, picture.with_suffix(f".{ending}"))
    return True


def _what_was_run(results: Results) -> str:
    runs = results.all()
    settings = {name: value for name, value in results.study.settings.items() if name not in PLACE}
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    minutes = sum(float(run.summary["duration"]) for run in runs) / 60
    where = sorted({_machine(run.summary["hardware"]) for run in runs})
    versions = sorted({f"{name} {number}" for run in runs for name, number in run.summary["versions"].items()})
    seeds = sorted({run.config.seed for run in runs})
    commands = sorted({f"`{run.summary['command']}`" for run in runs})
    return (
        f"{len(runs)} runs on {', '.join(where) or '–'}; their times add up to {minutes:.0f} minutes (runs that share "
        f"a GPU take longer each, and less together). Setting: {said}. Seeds: {', '.join(map(str, seeds)) or '–'}. "
        f"Made by {', '.join(commands) or '–'}. Versions: {', '.join(versions) or '–'}.\n"
    )


def _machine(hardware: Mapping[str, Any]) -> str:
    cores = f"{hardware['cores']} cores of {hardware['cpu']}"
    return cores if hardware["device"] == "cpu" else f"{hardware['device']} with {cores}"
