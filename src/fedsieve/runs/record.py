"""A finished run as one small JSON file: what tables and figures are made of, without models and checkpoints.

Records of runs made on different days and machines lie in one folder and add up.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsieve.errors import InvalidSetting
from fedsieve.runs.config import PLACE, Config
from fedsieve.runs.directory import write_whole
from fedsieve.runs.experiment import SIMULATED, VALIDATED, History

FORMAT = "fedsieve run 1"
SERIES = ("sampled", "kept", "score", "test_accuracy", "test_loss", "train_loss", "seconds")
SOMETIMES = (*VALIDATED, "backdoor_success", "unsmoothed_accuracy")
DIGITS = 6


def record_name(config: Config) -> str:
    """A name that tells what a run is and can't be another run's."""
    digest = hashlib.sha256(json.dumps(_what(config), sort_keys=True).encode()).hexdigest()[:8]
    setting = f"{config.heterogeneity}-{config.alpha:g}-of-{config.ratio:g}-e{config.local_epochs}"
    return f"{config.dataset}-{setting}-{_method(config)}-seed{config.seed}-{digest}"


def _method(config: Config) -> str:
    parts = [part for part in (config.sampler, config.filter) if part != "own"]
    attack = [] if config.attack == "none" else [config.attack, f"{config.hostile:g}"]
    return "-".join([config.algorithm, config.score, *parts, *attack])


def write_record(history: History, folder: Path) -> Path:
    """Write a run's record into `folder`."""
    path = folder / f"{record_name(history.config)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, (_lines(_record(history, _what(history.config))) + "\n").encode())
    return path


def read_record(path: Path) -> History:
    """The run in a record; its rows hold what the record has."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"no {FORMAT!r}")
        rounds = int(record["summary"]["rounds"])
        series = record["rounds"]
        if any(len(values) != rounds for values in series.values()):
            raise ValueError(f"not {rounds} rounds of each series")
        history = History(Config(**record["config"]), _rows(series, rounds), record["summary"])
        if history.config.rounds != rounds:
            raise ValueError(f"{rounds} of {history.config.rounds} rounds")
        for number, excluded in record["excluded"].items():
            history.rows[int(number) - 1]["excluded"] = excluded
        for number, per_class in record["per_class"].items():
            history.rows[int(number) - 1]["per_class"] = per_class
        if record["bandit"]:
            history.rows[-1]["bandit"] = record["bandit"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise InvalidSetting("record", path.name, f"the record of a run ({problem})") from None
    return history


def _what(config: Config) -> dict[str, Any]:
    """All that a run computes follows from this."""
    return config.model_dump(mode="json", exclude=set(PLACE))


def _record(history: History, what: Mapping[str, Any]) -> dict[str, Any]:
    rows = history.rows
    series: dict[str, list[Any]] = {name: [_short(row[name]) for row in rows] for name in SERIES}
    if any(row["search"] for row in rows):
        for name in ("all", "single"):
            series[f"score_of_{name}"] = [_short((row["search"] or {}).get(name)) for row in rows]
    if all("simulated" in row for row in rows):
        for name in SIMULATED:
            series[f"simulated_{name}"] = [_short(row["simulated"][name]) for row in rows]
    for name in SOMETIMES:
        if all(name in row for row in rows):
            series[name] = [_short(row[name]) for row in rows]
    return {
        "format": FORMAT,
        "config": what,
        "summary": history.summary,
        "rounds": series,
        "excluded": {str(row["round"]): row["excluded"] for row in rows if row["excluded"]},
        "per_class": _half_way(rows) if history.config.watch_models else {},
        "bandit": rows[-1].get("bandit"),
    }


def _half_way(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Accuracy per class of every client's model, of the last time it was asked in the first half of the run.

    By the end of a run whose learning rate decays, clients change the model no more and all look alike.
    """
    last = {
        client: (row["round"], shares)
        for row in rows[: math.ceil(len(rows) / 2)]
        for client, shares in row.get("per_class", {}).items()
    }
    found: dict[str, dict[str, list[float]]] = {}
    for client, (number, shares) in last.items():
        found.setdefault(str(number), {})[client] = shares
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _rows(series: Mapping[str, Sequence[Any]], rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for place in range(rounds):
        row = {"round": place + 1, **{name: series[name][place] for name in SERIES}, "excluded": {}, "search": None}
        if "score_of_all" in series:
            row["search"] = {name: series[f"score_of_{name}"][place] for name in ("all", "single")}
        if "simulated_seconds" in series:
            row["simulated"] = {name: series[f"simulated_{name}"][place] for name in SIMULATED}
        row |= {name: series[name][place] for name in SOMETIMES if name in series}
        rows.append(row)
    return rows


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _lines(record: Mapping[str, Any]) -> str:
    """JSON with a line per series, so that people can look at it and version control at what changed."""
    parts = []
    for name, value in record.items():
        if name in ("rounds", "per_class") and value:
            inner = ",\n".join(f"    {json.dumps(key)}: {_compact(series)}" for key, series in value.items())
            parts.append(f'  "{name}": {{\n{inner}\n  }}')
        else:
            parts.append(f'  "{name}": {_compact(value)}')
    return "{\n" + ",\n".join(parts) + "\n}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": ") if isinstance(value, dict) else (",", ":"))
