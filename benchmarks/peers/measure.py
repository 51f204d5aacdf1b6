"""FedSieve and its peers on the same workloads, one after the other, in turns.

    python benchmarks/peers/measure.py [--workloads cnn,mlp] [--peers fedsieve,pfl] [--passes 2] [--rounds 10]
                                       [--where .peers] [--out FILE.json]

The environments of the peers come from install.py; FedSieve and the plain loop run with the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedsieve.runs.environment import environment

HERE = Path(__file__).parent
WHERE = HERE.parent.parent / ".peers"
LIMIT_S = 1800
WORKLOADS = ("cnn", "mlp")

SCRIPTS = {
    "fedsieve": ("with_fedsieve.py",),
    "fedsieve-ray": ("with_fedsieve.py", "--actors", "2"),
    "pfl": ("with_pfl.py",),
    "fedjax": ("with_fedjax.py",),
    "fedlab": ("with_fedlab.py",),
    "flower": ("with_flower.py",),
    "plain-loop-1": ("plain_loop.py", "--threads", "1"),
    "plain-loop-2": ("plain_loop.py", "--threads", "2"),
}
OURS = ("fedsieve", "fedsieve-ray", "plain-loop-1", "plain-loop-2")


def measure(
    peers: Sequence[str], workloads: Sequence[str], passes: int, rounds: int, where: Path
) -> list[dict[str, Any]]:
    """Every measurement: what the scripts print, with its pass; or an "error" in its place.

    All peers have their first turn before any has its second, so that a slow spell of the machine meets them all.
    """
    results = []
    for turn in range(1, passes + 1):
        for workload in workloads:
            for peer in peers:
                result = {"pass": turn, "peer": peer, "workload": workload} | run(peer, workload, rounds, where)
                print(f"pass {turn}/{passes}  {workload}  {peer:<13} {outcome(result)}", flush=True)
                results.append(result)
    return results


def run(peer: str, workload: str, rounds: int, where: Path) -> dict[str, Any]:
    """One measurement in processes of its own."""
    python = Path(sys.executable) if peer in OURS else where.absolute() / peer / "bin" / "python"
    if not python.exists():
        return {"error": f"not installed in {where}: run install.py"}
    script, *options = SCRIPTS[peer]
    # Each script sets the threads of its processes itself; those of one process take what its framework chooses.
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    process = subprocess.Popen(
        [python, HERE / script, "--workload", workload, "--rounds", str(rounds), *options],
        env={name: value for name, value in os.environ.items() if name not in threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"not done after {LIMIT_S} s"}
    if process.returncode:
        return {"error": next(reversed(errors.split("\n")[:-1]), f"ended with {process.returncode}").strip()}
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def outcome(result: dict[str, Any]) -> str:
    """A measurement in words."""
    if "error" in result:
        return f"failed: {result['error']}"
    return f"{result['median_seconds']:.3f} s per round, {result['memory_mib']} MiB"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Over all passes: the median and range of the rounds' seconds, the most memory, the losses of the last pass."""
    lines = [f"{'':<4} {'':<13} {'version':<11} {'s per round':>11} {'(range)':>17} {'MiB':>6}   loss"]
    for workload, peer in dict.fromkeys((result["workload"], result["peer"]) for result in results):
        own = [result for result in results if (result["workload"], result["peer"]) == (workload, peer)]
        good = [result for result in own if "error" not in result]
        if not good:
            lines.append(f"{workload:<4} {peer:<13} {outcome(own[-1])}")
            continue
        seconds = [value for result in good for value in result["seconds_per_round"]]
        spread = f"({min(seconds):.3f}–{max(seconds):.3f})"
        memory = max(result["memory_mib"] for result in good)
        lines.append(
            f"{workload:<4} {peer:<13} {good[-1]['version']:<11} {statistics.median(seconds):>11.3f} {spread:>17} "
            f"{memory:>6}   {good[-1]['train_loss_first']:.3f} → {good[-1]['train_loss_last']:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--peers", default=",".join(SCRIPTS))
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of a measurement")
    parser.add_argument("--where", type=Path, default=WHERE, help="folder of the peers' environments")
    parser.add_argument("--out", type=Path, help="write everything there, as JSON")
    arguments = parser.parse_args()
    peers, workloads = arguments.peers.split(","), arguments.workloads.split(",")
    for given, known in ((peers, tuple(SCRIPTS)), (workloads, WORKLOADS)):
        if strangers := set(given).difference(known):
            parser.error(f"no {min(strangers)}: choose from {', '.join(known)}")
    results = measure(peers, workloads, arguments.passes, arguments.rounds, arguments.where)
    print(f"\n{table(results)}")
    if arguments.out:
        record = {**environment(torch.device("cpu")), "measurements": results}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
