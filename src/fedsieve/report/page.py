"""One web page about any number of runs: a single file with everything in it, to open, send or print."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fedsieve import algorithms, data
from fedsieve.errors import FedSieveError, InvalidSetting
from fedsieve.filtering import KeepAll
from fedsieve.report.figures import participation_map
from fedsieve.report.style import colours_of
from fedsieve.report.tables import PHASE_MEANINGS
from fedsieve.runs import Config, History, Line, Spread, summarise
from fedsieve.runs.assembly import split_data
from fedsieve.runs.config import PLACE
from fedsieve.runs.experiment import SIMULATED

MOST_CLIENTS = 200
"""Above this, what is shown client by client would be thinner than a hair and is left out."""

MOST_DETAIL = 500_000
"""Numbers about single clients that a page takes (about 3 MB); beyond it, fewer runs and rounds have theirs."""

WHAT_FILTERS_READ = frozenset({"score", "scored_by", "search"})
WHAT_RUNS_MAY_DIFFER_IN = PLACE | {"algorithm", "sampler", "filter", "seed"}


@dataclass(frozen=True)
class Setting:
    """Runs that differ in algorithm, with the parts in place of its own, and seed only, by the name of the former."""

    fields: dict[str, Any]
    runs: dict[str, list[History]] = field(default_factory=dict)

    def all_runs(self) -> list[History]:
        """Algorithm by algorithm."""
        return [run for runs in self.runs.values() for run in runs]


def write_page(histories: Sequence[History], path: Path, title: str | None = None) -> Path:
    """Write the page about these runs, finished or not, of any mix of algorithms, seeds and settings.

    Only runs that differ in nothing but algorithm (with other parts, if so) and seed are put together; each other
    setting has its own part.
    """
    if not histories:
        raise InvalidSetting("runs", [], "at least one run")
    settings = _by_setting(histories)
    if title is None:
        title = "FedSieve: runs on " + ", ".join(dict.fromkeys(str(setting.fields["dataset"]) for setting in settings))
    folder = files("fedsieve.report") / "page"
    page = Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        style=_without_indents((folder / "page.css").read_text(encoding="utf-8")),
        script=_without_indents((folder / "page.js").read_text(encoding="utf-8")),
        data=_json_for_html(_report(settings)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _without_indents(code: str) -> str:
    """They are for those who write it, and a tenth of its length."""
    return "".join(line.lstrip(" ") for line in code.splitlines(keepends=True))


def _by_setting(histories: Sequence[History]) -> list[Setting]:
    """Runs put together; one without a filter fits every setting that differs from its own in the filter alone."""
    settings: dict[str, Setting] = {}
    for history in sorted(histories, key=lambda history: not _has_filter(history)):
        fields = _fields(history)
        if _has_filter(history) or not any(_fits(history, setting) for setting in settings.values()):
            settings.setdefault(json.dumps(fields, sort_keys=True), Setting(fields))
    order: dict[int, Setting] = {}
    for history in histories:
        name = _algorithm(history)
        for setting in (setting for setting in settings.values() if _fits(history, setting)):
            order.setdefault(id(setting), setting)
            runs = setting.runs.setdefault(name, [])
            if any(run.config.seed == history.config.seed for run in runs):
                raise InvalidSetting("runs", f"{name}, seed {history.config.seed}, twice", "every run once")
            runs.append(history)
    return sorted(order.values(), key=lambda setting: -len(setting.runs))  # the fullest first


def _fits(history: History, setting: Setting) -> bool:
    unread = set() if _has_filter(history) else WHAT_FILTERS_READ
    fields = _fields(history)
    return all(fields.get(name) == value for name, value in setting.fields.items() if name not in unread)


def _has_filter(history: History) -> bool:
    config = history.config
    if config.filter != "own":
        return config.filter != "all"
    known = algorithms.find(config.algorithm).filter(config.options())
    return "filter" in history.summary.get("own_parts", {}) or not isinstance(known, KeepAll)


def _fields(history: History) -> dict[str, Any]:
    """What has to be equal for runs to be put together."""
    own = history.summary.get("own_parts", {})
    fields = history.config.model_dump(mode="json", exclude=set(WHAT_RUNS_MAY_DIFFER_IN))
    return fields | {part: own[part] for part in ("model", "dataset") if part in own}


def _algorithm(history: History) -> str:
    """The algorithm's name, with the parts that someone put in place of its own."""
    config = history.config
    named = {part: name for part, name in (("sampler", config.sampler), ("filter", config.filter)) if name != "own"}
    own = named | history.summary.get("own_parts", {})
    parts = [own[part] for part in ("sampler", "filter", "averaging") if part in own]
    return " with ".join([config.algorithm, ", ".join(parts)]) if parts else config.algorithm


def _report(settings: Sequence[Setting]) -> dict[str, Any]:
    """Everything that the page's script draws."""
    differing = [
        name
        for name in settings[0].fields
        if any(setting.fields[name] != settings[0].fields[name] for setting in settings)
    ]
    colours = colours_of(dict.fromkeys(name for setting in settings for name in setting.runs))
    detail = _Detail(settings)
    return {
        "algorithms": {name: {"title": _title(name), "colour": own} for name, own in colours.items()},
        "fields": {name: Config.model_fields[name].description for name in settings[0].fields},
        "differing": differing,
        "phases": PHASE_MEANINGS,
        "runs": len({id(run) for setting in settings for run in setting.all_runs()}),
        "mostClients": MOST_CLIENTS,
        "detailNote": detail.note,
        "settings": [_setting(setting, differing, detail) for setting in settings],
    }


def _title(name: str) -> str:
    algorithm, *parts = name.split(" with ")
    known = algorithms.ALGORITHMS.get(algorithm)
    return " with ".join([known.title if known else algorithm, *parts])


def _setting(setting: Setting, differing: Sequence[str], detail: _Detail) -> dict[str, Any]:
    examples, missing = _examples(setting)
    finished = {name: [run for run in runs if "final_accuracy" in run.summary] for name, runs in setting.runs.items()}
    return {
        "name": ", ".join(f"{name} {_shown(setting.fields[name])}" for name in differing),
        "config": {name: _shown(value) for name, value in setting.fields.items()},
        "rounds": setting.fields["rounds"],
        "clients": setting.fields["clients"],
        "score": setting.fields["score"],
        "lines": [_line(line) for line in summarise(finished)],
        "unfinished": [
            f"{_title(name)}, seed {run.config.seed} ({len(run.rows)} of {run.config.rounds} rounds)"
            for name, runs in setting.runs.items()
            for run in runs
            if not _is_finished(run)
        ],
        "runs": {name: [_run(run, detail) for run in runs] for name, runs in setting.runs.items()},
        "examples": examples,
        "examplesMissing": missing,
        "environments": _environments(setting),
        "commands": list(
            dict.fromkeys(run.summary["command"] for run in setting.all_runs() if "command" in run.summary)
        ),
    }


def _is_finished(history: History) -> bool:
    return "final_accuracy" in history.summary


def _line(line: Line) -> dict[str, Any]:
    def pair(spread: Spread | None) -> list[float | None] | None:
        return None if spread is None else [_number(spread.mean), _number(spread.std)]

    not_always_known = {
        "seconds": pair(line.seconds_to_target),
        "bytes": pair(line.bytes_to_target),
        "gini": pair(line.requests_gini),
        "hostileAsked": pair(line.hostile_sampled),
        "hostileKept": pair(line.hostile_kept),
        "backdoor": pair(line.backdoor_success),
    }
    return {
        "algorithm": line.algorithm,
        "seeds": line.seeds,
        "final": pair(line.final),
        "best": pair(line.best),
        "last": pair(line.mean_last_10),
        "rounds": pair(line.rounds_to_target),
        "reached": line.reached,
        **{name: value for name, value in not_always_known.items() if value is not None},
    }


def _run(history: History, detail: _Detail) -> dict[str, Any]:
    rows = history.rows
    searches = [row.get("search") or {} for row in rows]
    record: dict[str, list[float | None]] = {
        "accuracy": [_number(row["test_accuracy"]) for row in rows],
        "testLoss": [_number(row["test_loss"]) for row in rows],
        "trainLoss": [_number(row["train_loss"]) for row in rows],
        "score": [_number(row.get("score")) for row in rows],
        "scoreOfAll": [_number(search.get("all")) for search in searches],
        "scoreOfSingle": [_number(search.get("single")) for search in searches],
        "backdoor": [_number(row.get("backdoor_success")) for row in rows],
        **{what: [_number(value) for value in history.simulated(what) or ()] for what in SIMULATED},
    }
    record = {name: values for name, values in record.items() if any(value is not None for value in values)}
    run: dict[str, Any] = {"seed": history.config.seed, **record}
    if rows and history.config.clients <= MOST_CLIENTS:
        run["participation"] = _participation(history)
    if phases := [row["phases"] for row in rows if row.get("phases")] or history.profile:
        later = phases[1:] or phases
        run["phases"] = [
            _number(1000 * float(np.mean([round.get(phase, 0.0) for round in later]))) for phase in PHASE_MEANINGS
        ]
    if detail.of(history):
        chosen = rows[:: detail.every]
        if bandit := _bandit([row for row in chosen if row.get("bandit")]):
            run["bandit"] = bandit
        if per_class := [row for row in chosen if row.get("per_class")]:
            run["perClass"] = {
                "rounds": [row["round"] for row in per_class],
                "clients": [
                    {client: [_number(share, 3) for share in shares] for client, shares in row["per_class"].items()}
                    for row in per_class
                ],
            }
    return run


def _participation(history: History) -> str:
    """A digit per client, round after round, as in `participation_map`."""
    cells = participation_map(history.rows, history.config.clients, history.summary.get("hostile", ()))
    return (cells.T + ord("0")).astype(np.uint8).tobytes().decode("ascii")


def _bandit(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the bandit believed, as [rounds][clients]."""
    clients = sorted({client for row in rows for client in row["bandit"]["clients"]})
    if not clients or len(clients) > MOST_CLIENTS:
        return None
    tables: dict[str, list[list[float | None]]] = {"mean": [], "low": [], "high": []}
    for row in rows:
        for name, table in tables.items():
            known = dict(zip(row["bandit"]["clients"], row["bandit"][name], strict=True))
            table.append([_number(known.get(client), 4) for client in clients])
    return {"rounds": [row["round"] for row in rows], "clients": clients, **tables}


class _Detail:
    """Which runs show what they knew of every single client, and every how many rounds.

    All of them as long as that is no more than `MOST_DETAIL` numbers, else one run per algorithm and setting.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        runs = [run for setting in settings for run in setting.all_runs()]
        firsts = [runs[0] for setting in settings for runs in setting.runs.values()]
        self.every = 1
        self.note = ""
        if sum(map(_detail_size, runs)) > MOST_DETAIL:
            runs = firsts
            self.every = math.ceil(sum(map(_detail_size, runs)) / MOST_DETAIL)
            rounds = "" if self.every == 1 else f", every {self.every} rounds"
            self.note = f"To keep this page small, it has this for the first run of each algorithm only{rounds}."
        self.runs = {id(run) for run in runs}

    def of(self, history: History) -> bool:
        """Whether this run is one of them."""
        return id(history) in self.runs


def _detail_size(history: History) -> int:
    """How many numbers there are about single clients."""
    bandits = sum(3 * len(row["bandit"]["clients"]) for row in history.rows if row.get("bandit"))
    return bandits + sum(len(shares) for row in history.rows for shares in (row.get("per_class") or {}).values())


def _examples(setting: Setting) -> tuple[dict[str, Any] | None, str]:
    """Examples per client and class for every seed, or a sentence that says why there are none."""
    config = setting.all_runs()[0].config
    if config.clients > MOST_CLIENTS:
        return None, f"Left out: {config.clients} clients are more than the {MOST_CLIENTS} that can be told apart."
    if config.dataset != setting.fields["dataset"]:
        return None, "Left out: the runs were given a data set of their own, which only they know."
    try:
        dataset = data.load(config.dataset, config.data_dir)
        seeds = sorted({run.config.seed for run in setting.all_runs()})
        return {"classes": dataset.classes, "seeds": {seed: _counts(config, dataset, seed) for seed in seeds}}, ""
    except FedSieveError:
        return None, f"Left out: the data set {config.dataset} was not at hand where this page was made."


def _counts(config: Config, dataset: data.Dataset, seed: int) -> list[list[int]]:
    """Examples [clients][classes], split as a run with this seed splits them."""
    _, partition = split_data(config.model_copy(update={"seed": seed}), dataset)
    counts: list[list[int]] = partition.class_counts(dataset.train_labels, dataset.classes).tolist()
    return counts


def _environments(setting: Setting) -> list[dict[str, Any]]:
    """Every different combination of versions and hardware, with the number of runs it was used for."""
    known = Counter(
        json.dumps(run.summary["versions"] | run.summary["hardware"])
        for run in setting.all_runs()
        if "versions" in run.summary and "hardware" in run.summary
    )
    return [
        {"runs": runs, "values": {name: _shown(value) for name, value in json.loads(values).items()}}
        for values, runs in known.items()
    ]


def _shown(value: object) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None, digits: int = 5) -> float | None:
    """With as many significant digits as can be seen; JSON knows no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _json_for_html(content: object) -> str:
    """JSON that can lie in a script element: no character in it can end the element or begin another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
