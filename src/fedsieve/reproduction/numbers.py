"""Every run of a study in one small file: what it was, what came out, and its curves."""

from __future__ import annotations

import json
from typing import Any

from fedsieve.reproduction.results import Results
from fedsieve.runs import History
from fedsieve.runs.config import PLACE
from fedsieve.runs.experiment import SIMULATED
from fedsieve.runs.participation import share_of

SUMMED_UP = ("final_accuracy", "mean_last_10", "requests_gini", "duration")
CURVES = ("test_accuracy", "unsmoothed_accuracy", "validation_accuracy", "backdoor_success")
DIGITS = 5


def numbers(results: Results) -> str:
    """JSON: what all runs have in common, the machines they were made on, and a line for each run.

    A run has the settings in which it differs from others, the position of its machine, and one number a round in each
    curve: accuracies, and simulated seconds and bytes so far.
    """
    runs = results.all()
    settings = [run.config.model_dump(mode="json", exclude={*PLACE, "favor_agent"}) for run in runs]
    common = {name: value for name, value in settings[0].items() if all(one[name] == value for one in settings)}
    machines = [{name: run.summary[name] for name in ("versions", "hardware")} for run in runs]
    places = list({json.dumps(machine): machine for machine in machines}.values())
    head = {
        "setting": common,
        "machines": places,
        "commands": sorted({str(run.summary["command"]) for run in runs if "command" in run.summary}),
    }
    own = [{name: value for name, value in one.items() if name not in common} for one in settings]
    lines = [
        json.dumps({**own[place], "machine": places.index(machines[place]), **_came_out(run)}, separators=(",", ":"))
        for place, run in enumerate(runs)
    ]
    top = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    return "{\n" + top + '  "runs": [\n' + ",\n".join(lines) + "\n  ]\n}\n"


def _came_out(run: History) -> dict[str, Any]:
    found: dict[str, Any] = {name: run.summary[name] for name in SUMMED_UP if name in run.summary}
    if hostile := run.summary.get("hostile"):
        found |= {f"hostile_{done}": share_of(hostile, run.rows, done) for done in ("sampled", "kept")}
    for name in CURVES:
        if all(name in row for row in run.rows):
            found[name] = [row[name] for row in run.rows]
    for what in SIMULATED:
        if (so_far := run.simulated(what)) is not None:
            found[f"simulated_{what}"] = so_far
    return {name: _short(value) for name, value in found.items()}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
