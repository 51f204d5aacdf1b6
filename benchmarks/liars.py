"""Which liars FedCA believes, by its score: accuracy or cross-entropy, of mean logits or of mean weights.

    python benchmarks/liars.py [--seeds 8] [--json FILE]

Digits, 8 of 30 clients, class heterogeneity α = 1, 10 rounds, 40 % of the clients hostile or none. About half a minute.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import track

import fedsieve as fs
from fedsieve.reproduction.claims import Interval
from fedsieve.reproduction.tables import interval, spread_of
from fedsieve.runs.assembly import find_device
from fedsieve.runs.environment import environment

ATTACKS = ("none", "sign-flip", "noise")
SCORES = ("accuracy", "cross-entropy")
JUDGED = ("logits", "weights")


def play(attack: str, score: str, judged: str, seed: int) -> dict[str, Any]:
    """One run: its final accuracy and the share of liars among those kept whenever they were asked."""
    history = fs.run(
        fs.Config(
            dataset="digits",
            rounds=10,
            clients=30,
            ratio=0.27,
            heterogeneity="class",
            alpha=1.0,
            batch_size=16,
            lr=0.05,
            schedule="cosine",
            algorithm="fedca",
            score=score,
            scored_by=judged,
            attack=attack,
            hostile=0.0 if attack == "none" else 0.4,
            seed=seed,
            device="cpu",
        )
    )
    hostile = set(history.summary.get("hostile", []))
    asked, kept = (sum(len(hostile.intersection(row[what])) for row in history.rows) for what in ("sampled", "kept"))
    return {
        "attack": attack,
        "score": score,
        "scored_by": judged,
        "seed": seed,
        "accuracy": round(100 * history.accuracy[-1], 2),
        "liars_kept": round(100 * kept / asked, 1) if asked else None,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """A line per attack and score: accuracy by logits and by weights, their difference, and who was believed."""
    lines = ["| Attack | Score | by logits | by weights | difference | liars kept |", "|---|---|---:|---:|---:|---:|"]
    for attack in ATTACKS:
        for score in SCORES:
            found = {
                judged: [
                    run for run in runs if (run["attack"], run["score"], run["scored_by"]) == (attack, score, judged)
                ]
                for judged in JUDGED
            }
            accuracies = {judged: [run["accuracy"] for run in found[judged]] for judged in JUDGED}
            gap = Interval.of([b - a for a, b in zip(*accuracies.values(), strict=True)])
            believed = [
                f"{sum(run['liars_kept'] for run in found[judged]) / len(found[judged]):.0f} %"
                for judged in JUDGED
                if attack != "none"
            ]
            lines.append(
                f"| {attack} | {score} | {spread_of(accuracies['logits'])} | {spread_of(accuracies['weights'])} | "
                f"{interval(gap)} | {', '.join(believed) or '–'} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Make all runs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    jobs = [
        (attack, score, judged, seed)
        for attack in ATTACKS
        for score in SCORES
        for judged in JUDGED
        for seed in range(given.seeds)
    ]
    runs = [play(*job) for job in track(jobs, "runs")]
    print(table(runs))
    if given.json:
        record = {
            "command": "python benchmarks/liars.py",
            "environment": environment(find_device("cpu")),
            "runs": runs,
        }
        given.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
