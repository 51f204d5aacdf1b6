"""What FedSieve's strategies cost on Flower, against Flower's own FedAvg in the same run.

    python benchmarks/flower.py                       # writes docs/results/flower.json

1. A round's `aggregate_train` with 20 replies of VGG11 (37 MB each) and 5,000 × 10 validation logits: seconds and peak
   memory, each strategy in a process of its own. The forward passes are left out (their logits are drawn): they are the
   same work for whoever wants to know what models predict.
2. Flower's simulation with 500 nodes, FedCM with a small model, 10 rounds: seconds and memory of the server per round.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr.supercore.task_identity import TaskIdentity

import fedsieve as fs
from fedsieve import data, models
from fedsieve.flower import FedCA, FedCM, client_app
from fedsieve.runs import assemble
from fedsieve.runs.assembly import split_data
from fedsieve.runs.directory import write_whole
from fedsieve.runs.environment import environment

REPLIES, EXAMPLES, CLASSES = 20, 5000, 10
NODES, ROUNDS = 500, 10


def mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now_mebibytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def replies() -> list[Message]:
    """Twenty different models, as Flower holds them."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    messages = []
    for node in range(1, REPLIES + 1):
        torch.manual_seed(node)
        asked = Message(RecordDict(), node, "train")
        asked.metadata.__dict__["_message_id"] = str(node)
        arrays = ArrayRecord(models.build("vgg11", (3, 32, 32), CLASSES).state_dict())
        metrics = MetricRecord({"num-examples": 100 * node, "train_loss": 1.0})
        messages.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=asked))
    return messages


def aggregate(what: str) -> dict[str, float]:
    """Three rounds of aggregation; the best time, and the peak memory above what the replies take."""
    held = replies()
    strategy: FedAvg
    if what == "fedavg":
        strategy = FedAvg(fraction_evaluate=0.0)
    else:
        labels = np.arange(EXAMPLES) % CLASSES
        inputs = np.zeros((EXAMPLES, 3, 32, 32), dtype=np.float32)
        net = models.build("vgg11", (3, 32, 32), CLASSES)
        sieve = FedCA(
            model=net, validation=(inputs, labels), score="accuracy" if what == "fedca" else "cross-entropy",
            fraction_evaluate=0.0, device="cpu",
        )  # fmt: skip
        drawn = torch.Generator().manual_seed(0)
        truth = torch.nn.functional.one_hot(torch.from_numpy(labels), CLASSES).float()

        def no_forward(models: Sequence[torch.Tensor], split: str) -> torch.Tensor:
            return truth + 2 * torch.randn(len(models), EXAMPLES, CLASSES, generator=drawn)

        sieve.judge.engine.logits = no_forward  # type: ignore[method-assign, union-attr]
        sieve._open(ArrayRecord(net.state_dict()))
        strategy = sieve
    before = now_mebibytes()
    seconds = []
    for round in range(1, 4):
        if isinstance(strategy, FedCA):
            strategy._asked = {node: strategy.roster.arm(node) for node in range(1, REPLIES + 1)}
            strategy._sampled = list(strategy._asked.values())
        began = time.perf_counter()
        arrays, _ = strategy.aggregate_train(round, held)
        seconds.append(time.perf_counter() - began)
        assert arrays
    return {"seconds": min(seconds), "peak_mib": mebibytes(), "peak_above_replies_mib": mebibytes() - before}


def simulate() -> dict[str, Any]:
    """FedCM with 500 nodes in Flower's simulation."""
    config = fs.Config(
        algorithm="fedcm-ts", dataset="digits", heterogeneity="iid", clients=NODES, local_epochs=1, batch_size=4,
        device="cpu", workers=1, rounds=ROUNDS,
    )  # fmt: skip
    _, engine = assemble(config)
    dataset = data.load("digits")
    places, _ = split_data(config, dataset)
    x, y = dataset.prepare(dataset.train_inputs[places]), dataset.train_labels[places]
    module: torch.nn.Module = engine.module  # type: ignore[attr-defined]
    memory: list[float] = []
    times: list[float] = []

    def note(round: int, arrays: ArrayRecord) -> None:
        memory.append(round and now_mebibytes())
        times.append(time.perf_counter())

    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedCM(
            model=module, validation=(x, y), fraction_train=0.1, fraction_evaluate=0.0, min_available_nodes=NODES,
            client_ids="ask", device="cpu",
        )  # fmt: skip
        strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=ROUNDS, evaluate_fn=note)

    run_simulation(app, client_app(config), num_supernodes=NODES)
    return {
        "nodes": NODES,
        "asked_per_round": NODES // 10,
        "seconds_per_round": [round(value, 2) for value in np.diff(times)],
        "server_mib_after_round": [round(value, 1) for value in memory[1:]],
    }


def in_its_own_process(what: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--part", what], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("docs/results/flower.json"))
    given = parser.parse_args()
    if given.part:
        found = simulate() if given.part == "simulation" else aggregate(given.part)
        print(json.dumps(found))
        return
    parts = {what: in_its_own_process(what) for what in ("fedavg", "fedca", "fedca-cross-entropy")}
    for what, found in parts.items():
        over = found["seconds"] - parts["fedavg"]["seconds"]
        ratio = found["peak_mib"] / parts["fedavg"]["peak_mib"]
        print(
            f"{what}: {found['seconds']:.2f} s ({over:+.2f}), peak {found['peak_mib']:.0f} MiB ({ratio:.2f} x FedAvg)"
        )
    simulation = in_its_own_process("simulation")
    print(f"{NODES} nodes: {simulation['seconds_per_round']} s, {simulation['server_mib_after_round']} MiB")
    record = {"aggregate_train": parts, "simulation": simulation, **environment(torch.device("cpu"))}
    write_whole(given.out, (json.dumps(record, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
