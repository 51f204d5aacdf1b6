"""The search for what the paper's text leaves open: model, learning rate, batch, weight decay, schedule.

Judged by FedAvg and FedPdp alone. First at α = 5, where the paper reports 82.6 %, then at α = 0.1:

    python benchmarks/setting.py --alpha 5 --rounds 30
    python benchmarks/setting.py --alpha 0.1 --rounds 30 --only vgg11-bn,0.01,64,0.0005,cosine ...

Results are added to docs/results/setting.json; what is in it is not run again. One GPU, CIFAR-10, bf16, seed 0.
`--table` prints it as Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import fedsieve as fs
from fedsieve.cli.progress import RunProgress
from fedsieve.runs import History, run_many
from fedsieve.runs.directory import write_whole

FIELDS = ("model", "lr", "batch_size", "weight_decay", "schedule")
SETTINGS: list[tuple[str, float, int, float, str]] = [
    ("vgg11", 0.003, 64, 5e-4, "constant"),
    ("vgg11", 0.01, 64, 5e-4, "constant"),
    ("vgg11", 0.01, 64, 1e-4, "constant"),
    ("vgg11", 0.01, 64, 5e-4, "cosine"),
    ("vgg11", 0.03, 64, 5e-4, "constant"),
    ("vgg11", 0.03, 128, 5e-4, "constant"),
    ("vgg11", 0.03, 64, 5e-4, "cosine"),
    ("vgg11", 0.05, 64, 5e-4, "cosine"),
    ("vgg11", 0.1, 128, 1e-4, "step"),
    ("vgg11-bn", 0.01, 64, 5e-4, "constant"),
    ("vgg11-bn", 0.01, 64, 5e-4, "cosine"),
    ("vgg11-bn", 0.03, 64, 5e-4, "constant"),
    ("vgg11-bn", 0.1, 128, 1e-4, "constant"),
    ("vgg11-bn", 0.1, 128, 1e-4, "step"),
    ("vgg11-bn", 0.1, 128, 5e-4, "cosine"),
]
CELLS = {
    5.0: [("class", "fedpdp")],
    0.1: [("class", "fedavg"), ("class", "fedpdp"), ("client", "fedavg"), ("client", "fedpdp")],
}
KEYS = (*FIELDS, "heterogeneity", "alpha", "algorithm", "rounds", "coefficients", "seed")


def configs(settings: Sequence[tuple[Any, ...]], alpha: float, rounds: int) -> list[fs.Config]:
    return [
        fs.Config(
            dataset="cifar10",
            heterogeneity=heterogeneity,
            alpha=alpha,
            algorithm=algorithm,
            rounds=rounds,
            precision="bf16",
            **dict(zip(FIELDS, setting, strict=True)),
        )
        for heterogeneity, algorithm in CELLS[alpha]
        for setting in settings
    ]


def entry(history: History) -> dict[str, Any]:
    config, summary = history.config.model_dump(mode="json"), history.summary
    return {
        **{name: config[name] for name in (*KEYS, "precision")},
        **{name: round(summary[name], 4) for name in ("final_accuracy", "best_accuracy", "mean_last_10")},
        "accuracy": [round(value, 4) for value in history.accuracy],
        **{name: summary[name] for name in ("duration", "versions", "hardware", "command")},
    }


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in KEYS)


def table(runs: Sequence[dict[str, Any]], rounds: int) -> str:
    """A line per setting: mean accuracy of the last 10 rounds in %, seed 0."""
    cells = [(5.0, "class", "fedpdp"), *((0.1, *cell) for cell in CELLS[0.1])]
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], float]] = {}
    for run in runs:
        if run["rounds"] == rounds and run["coefficients"] == "normalised" and run["seed"] == 0:
            line = found.setdefault(tuple(run[name] for name in FIELDS), {})
            line[run["alpha"], run["heterogeneity"], run["algorithm"]] = 100 * run["mean_last_10"]
    heads = [
        "Model", "lr", "Batch", "Weight decay", "Schedule", "α = 5 FedPdp",
        *(f"α = 0.1, {where}, {'FedAvg' if name == 'fedavg' else 'FedPdp'}" for _, where, name in cells[1:]),
        "mean at α = 0.1",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(FIELDS) + "|---:" * (len(heads) - len(FIELDS)) + "|"]
    for setting, values in sorted(found.items(), key=lambda item: (item[0][0], -item[1].get(cells[0], 0))):
        skewed = [values[cell] for cell in cells[1:] if cell in values]
        mean = f"{sum(skewed) / 4:.1f}" if len(skewed) == 4 else "–"
        numbers = [f"{values[cell]:.1f}" if cell in values else "–" for cell in cells]
        lines.append("| " + " | ".join([*(f"{value}" for value in setting), *numbers, mean]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, choices=tuple(CELLS), default=5.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="*", help="settings as MODEL,LR,BATCH,DECAY,SCHEDULE (default: all)")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    parser.add_argument("--out", type=Path, default=Path("docs/results/setting.json"))
    given = parser.parse_args()
    record: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"runs": []}
    if given.table:
        print(table(record["runs"], given.rounds))
        return
    wanted = [one for one in SETTINGS if not given.only or ",".join(map(str, one)) in given.only]
    done = {key(run) for run in record["runs"]}
    todo = [one for one in configs(wanted, given.alpha, given.rounds) if key(one.model_dump(mode="json")) not in done]

    def keep(folder: Path, history: History) -> None:
        record["runs"].append(entry(history))
        lines = ",\n".join(json.dumps(run) for run in record["runs"])
        head = {name: value for name, value in record.items() if name != "runs"}
        write_whole(given.out, (json.dumps(head)[:-1] + ("," if head else "") + f'"runs": [\n{lines}\n]}}\n').encode())

    with tempfile.TemporaryDirectory() as folder, RunProgress(sum(one.rounds for one in todo)) as progress:
        run_many({Path(folder) / str(n): one for n, one in enumerate(todo)}, [progress], given.at_once, keep)
    Console().print(table(record["runs"], given.rounds))


if __name__ == "__main__":
    main()
