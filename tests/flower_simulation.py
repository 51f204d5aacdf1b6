"""Strategies in Flower's simulation engine, one after the other: `python flower_simulation.py FOLDER-FOR-RESULTS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.simulation import run_simulation

import fedsieve as fs
from fedsieve import data
from fedsieve.engines import SequentialEngine
from fedsieve.flower import FedCM, FedPdp, FedSieve, client_app
from fedsieve.runs import assemble
from fedsieve.runs.assembly import split_data

NODES = 12
STRATEGIES = ("fedcm-ts", "fedcm-ucb", "fedsieve", "fedsieve-ts", "fedpdp", "flower")


def config(algorithm: str) -> fs.Config:
    """The clients that all strategies here have."""
    return fs.Config(
        algorithm=algorithm,
        dataset="digits",
        clients=NODES,
        alpha=0.5,
        ratio=0.5,
        lr=0.05,
        batch_size=16,
        local_epochs=1,
        rounds=10,
        seed=4,
        device="cpu",
        workers=1,
    )


def make(what: str, engine: SequentialEngine) -> tuple[Strategy, int]:
    """A strategy and its rounds."""
    if what in ("flower", "fedpdp"):
        # Flower counts the nodes before it waits for them, so that in a first round it may ask fewer than all.
        return (FedAvg if what == "flower" else FedPdp)(min_train_nodes=NODES, min_available_nodes=NODES), 2
    dataset = data.load("digits")
    places, _ = split_data(config("fedca"), dataset)
    x, y = dataset.prepare(dataset.train_inputs[places]), dataset.train_labels[places]
    bandit: Any = {"ts": "thompson", "ucb": "ucb"}.get(what.rpartition("-")[2])
    kind = FedSieve if what.startswith("fedsieve") else FedCM
    strategy = kind(
        model=engine.module,
        validation=(x, y),
        bandit=bandit,
        fraction_train=0.5,
        fraction_evaluate=0.0,
        min_available_nodes=NODES,
        client_ids="ask",
        device="cpu",
        seed=4,
    )
    return strategy, 10


def main() -> None:
    """Simulate, and write what came of it."""
    folder = Path(sys.argv[1])
    settings = config("fedca")
    _, engine = assemble(settings)
    assert isinstance(engine, SequentialEngine)
    engine.layout.write(engine.initial_model(), engine.module)
    arrays = ArrayRecord(engine.module.state_dict())
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        for what in STRATEGIES:
            strategy, rounds = make(what, engine)
            models: list[list[float]] = []

            def look(_: int, arrays: ArrayRecord, models: list[list[float]] = models) -> None:
                models.append(np.concatenate([array.numpy().reshape(-1) for array in arrays.values()]).tolist())

            result = strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=look)
            found = {
                "train": {number: dict(metrics) for number, metrics in result.train_metrics_clientapp.items()},
                "evaluate": {number: dict(metrics) for number, metrics in result.evaluate_metrics_clientapp.items()},
                "names": list(result.arrays),
                "models": models[-3:],
            }
            (folder / what).write_text(json.dumps(found))

    own_ray: Any = {"init_args": {"address": "local"}}  # else it waits for a cluster that a killed Ray left a note of
    run_simulation(app, client_app(settings), num_supernodes=NODES, backend_config=own_ray)


if __name__ == "__main__":
    main()
