"""Runs of variants of a method: the same seeds, both heterogeneities, beside the algorithms they have to beat.

A script gives `compare` its variants by name. Each is run with class and client heterogeneity (α = 0.1, 8 of 20
clients). The file (JSON) gets a line per run as it ends; what it has is not run again. At the end a table: mean test
accuracy of the last ten rounds, and the difference from the first line, seed by seed, with its 95 % interval. With
--stop only the first N rounds of a run are played, for what is to be seen early. With --smoothing the table says what
it is to hand out an average over rounds: mean accuracy of the rounds in the middle of the run and of the last ten, and
the first round that is as good as `fedavg` in the end.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import fedsieve as fs
from fedsieve import data
from fedsieve.filtering.base import ModelFilter
from fedsieve.report import figures, style
from fedsieve.reproduction.claims import Interval
from fedsieve.reproduction.tables import spread_of
from fedsieve.runs import Callback, rounds_to
from fedsieve.runs.environment import environment

SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": {
        "dataset": "fashion-mnist", "rounds": 30, "local_epochs": 1, "lr": 0.05, "validation_per_class": 200,
    },
    "cnn": {"dataset": "cifar10", "rounds": 60, "local_epochs": 2, "lr": 0.02, "precision": "bf16"},
    "vgg11": {
        "dataset": "cifar10", "rounds": 100, "local_epochs": 5, "lr": 0.05, "batch_size": 64, "weight_decay": 5e-4,
        "precision": "bf16",
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "clients": 20, "ratio": 0.4, "alpha": 0.1, "schedule": "cosine", "score": "cross-entropy", "algorithm": "fedpdp",
}  # fmt: skip


Make = Callable[[str, str, int], tuple[ModelFilter | None, Any, float] | None]
"""From a name, a model and a number of rounds to a filter, a sampler and a momentum; None if it names an algorithm.

It must be a script's own function, so that other processes can find it.
"""

WITH_MOMENTUM = ", server momentum 0.5"
NAMED = (
    *("fedavg", "fedpdp", "fedca", "fedcm-ucb", "fedcm-ts"),
    *("server-only", "fedpdp-finetune", "fedpdp-server-client", "fedsieve-finetune"),
    *(name + WITH_MOMENTUM for name in ("fedpdp-finetune", "fedsieve-finetune")),
)
"""The library's own, as they are or with momentum at the server."""


def stem(name: str) -> str:
    """A name without what is done at the server."""
    return name.removesuffix(WITH_MOMENTUM)


def momentum_of(name: str) -> float:
    """Of the server."""
    return 0.5 if name.endswith(WITH_MOMENTUM) else 0.0


class Stopped(Exception):
    """The rounds that were asked for are played."""


class Stop(Callback):
    """Ends a run early, with the learning rates of a whole one."""

    def __init__(self, after: int | None) -> None:
        self.after, self.rows = after, list[Mapping[str, Any]]()

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.rows.append(row)
        if row["round"] == self.after:
            raise Stopped


def play(
    make: Make, name: str, model: str, where: str, seed: int, changed: dict[str, Any], stop: int | None = None
) -> dict[str, Any]:
    """One run: its accuracies and what it took."""
    settings = COMMON | SETTINGS[model] | {"model": model, "heterogeneity": where, "seed": seed} | changed
    made = make(name, model, settings["rounds"])
    filter, sampler, settings["server_momentum"] = made or (None, None, momentum_of(name))
    if made is None:
        settings["algorithm"] = stem(name)
    began = time.perf_counter()
    watch = Stop(stop)
    with suppress(Stopped):
        fs.run(fs.Config(**settings, workers=1), filter=filter, sampler=sampler, callbacks=[watch])
    search = [row["phases"].get("search", 0.0) for row in watch.rows]
    return {
        "name": name,
        "model": model,
        "heterogeneity": where,
        "seed": seed,
        "rounds": len(watch.rows),
        "accuracy": [round(row["test_accuracy"], 5) for row in watch.rows],
        **(
            {"unsmoothed": [round(row["unsmoothed_accuracy"], 5) for row in watch.rows]}
            if "smoothing" in changed
            else {}
        ),
        "seconds": round(time.perf_counter() - began, 1),
        "search_seconds_per_round": round(float(np.median(search)), 4),
        **({"steps": round(float(np.mean(taken)), 1)} if (taken := getattr(filter, "taken", None)) else {}),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Mean ± spread of the last ten rounds, and the paired difference from the first line."""
    first = runs[0]["name"]
    last = {
        (run["name"], run["heterogeneity"], run["seed"]): 100 * float(np.mean(run["accuracy"][-10:])) for run in runs
    }
    lines = ["| | class | | client | |", "|---|---:|---:|---:|---:|"]
    for name in dict.fromkeys(run["name"] for run in runs):
        cells = []
        for where in ("class", "client"):
            seeds = [seed for (who, het, seed) in last if who == name and het == where]
            cells.append(spread_of([last[name, where, seed] for seed in seeds]))
            known = [seed for seed in seeds if name != first and (first, where, seed) in last]
            differences = [last[name, where, seed] - last[first, where, seed] for seed in known]
            found = Interval.of(differences) if differences else None
            cells.append("" if found is None else f"{found.mean:+.1f} ± {found.high - found.mean:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def smoothing_table(runs: Sequence[dict[str, Any]]) -> str:
    """What the last model and the average over rounds come to: in the middle, at the end, and on the way."""
    lines = []
    for where in ("class", "client"):
        names = dict.fromkeys(run["name"] for run in runs)
        of = {name: [run for run in runs if (run["name"], run["heterogeneity"]) == (name, where)] for name in names}
        ends = [run["unsmoothed"][-1] for run in of.get("fedavg", [])]
        target = float(np.mean(ends)) if ends else math.inf
        lines += [
            f"| {where} | middle | smoothed | last 10 | smoothed | rounds to {100 * target:.1f} % | smoothed |",
            "|---" + "|---:" * 6 + "|",
        ]
        for name, some in of.items():
            rounds = len(some[0]["accuracy"])
            cells = []
            for part in (slice(rounds * 2 // 5, rounds * 3 // 5), slice(-10, None)):
                for what in ("unsmoothed", "accuracy"):
                    cells.append(spread_of([100 * float(np.mean(run[what][part])) for run in some]))
            for what in ("unsmoothed", "accuracy"):
                reached = [first for run in some if (first := rounds_to(target, run[what])) is not None]
                cells.append(f"{spread_of(reached)} ({len(reached)} of {len(some)})")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def smoothing_figure(runs: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy over rounds of the last model and of the average over rounds."""
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for where in ("class", "client"):
        for what, title in (("unsmoothed", "last model"), ("accuracy", "average over rounds")):
            panel = panels.setdefault(f"{where} heterogeneity, {title}", {})
            for run in runs:
                name = {"batch 200": "fedsieve"}.get(run["name"], run["name"])
                if run["heterogeneity"] == where and name in ("fedpdp", "fedca", "fedcm-ts", "fedsieve"):
                    panel.setdefault(name, []).append(run[what])
    figure = figures.accuracy_panels(panels, title="Handing out an average over rounds")
    figure.axes[0].set_ylim(bottom=50)
    return figure


def compare(make: Make, names: Sequence[str], about: str | None, model: str = "mlp", more: Sequence[str] = ()) -> None:
    """Run what is missing of a script's variants and the library's own, print the table.

    There may be `more` names, which are run when they are asked for.
    """
    known_names = list(dict.fromkeys([*names, *NAMED, *more]))

    def known_name(name: str) -> str:
        if name not in known_names:
            nearest = difflib.get_close_matches(name, known_names, n=1, cutoff=0) or known_names
            raise argparse.ArgumentTypeError(f"there is no {name!r}; nearest is {nearest[0]!r}")
        return name

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SETTINGS), default=model)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--stop", type=int, metavar="N", help="play the first N rounds alone")
    parser.add_argument("--smoothing", type=float, help="hand out an average over rounds")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--only", nargs="+", type=known_name, metavar="NAME", help="some of the lines")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{Path(sys.argv[0]).stem}.json")
    given = parser.parse_args()
    try:
        data.load(SETTINGS[given.model]["dataset"])
    except fs.FedSieveError as error:
        parser.error(str(error))
    known = json.loads(given.out.read_text()) if given.out.exists() else {"runs": []}
    done = {(run["name"], run["model"], run["heterogeneity"], run["seed"]) for run in known["runs"]}
    jobs = [
        (name, given.model, where, seed)
        for seed in range(given.first_seed, given.first_seed + given.seeds)
        for where in ("class", "client")
        for name in given.only or [*names, *NAMED]
        if (name, given.model, where, seed) not in done
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known |= {"command": shlex.join(["python", *sys.argv]), "environment": environment(device)}
    changed = {name: value for name in ("rounds", "smoothing") if (value := getattr(given, name)) is not None}
    known["setting"] = COMMON | SETTINGS[given.model] | changed
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.at_once, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(play, make, *job, changed, given.stop) for job in jobs]
        for number, future in enumerate(as_completed(waiting), start=1):
            known["runs"].append(future.result())
            given.out.write_text(json.dumps(known) + "\n")
            run = known["runs"][-1]
            what = f"{run['name']}, {run['heterogeneity']}, seed {run['seed']}"
            print(f"{number}/{len(jobs)} {what}: {run['accuracy'][-1]:.3f}, {run['seconds']} s", flush=True)
    given.out.write_text(json.dumps(known) + "\n")
    order = {name: place for place, name in enumerate(known_names)}
    runs = [run for run in known["runs"] if run["model"] == given.model]
    runs.sort(key=lambda run: order.get(run["name"], len(order)))
    if given.smoothing is None:
        print(table(runs))
    else:
        print(smoothing_table(runs))
        print(style.save(smoothing_figure(runs), given.out.with_suffix(".png")))
