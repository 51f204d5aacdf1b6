"""The workloads on FedSieve, its engine and number of workers left at their defaults, or on a local Ray cluster.

python with_fedsieve.py --workload cnn|mlp [--rounds 10] [--actors N]
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Measurement, parser, report
from torch.nn.utils import vector_to_parameters
from torch_parts import build, loss
from workload import BATCH_SIZE, CLASSES, LEARNING_RATE, WORKLOADS, load, save

import fedsieve as fs


class Clock(fs.runs.Callback):
    """Takes the time after each round, and counts the clients whose models came back."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self.trained = 0

    def on_round(self, row: Mapping[str, Any]) -> None:
        """After a round, its evaluation and its record."""
        self.measurement.end()
        self.trained += len(row["sampled"]) - len(row["excluded"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--actors", type=int, help="train on so many Ray actors that share this machine's cores")
    arguments = options.parse_args()
    workload = WORKLOADS[arguments.workload]
    measurement = Measurement(arguments.rounds)
    config = fs.Config(
        # What the others call FedAvg: the average of the clients asked, weighted by their examples. Under "fedavg",
        # FedSieve has the formula in which clients that were not asked count as having kept the model.
        algorithm="fedpdp",
        model=workload.name,
        clients=workload.clients,
        ratio=workload.clients_per_round / workload.clients,
        rounds=measurement.total,
        local_epochs=1,
        batch_size=BATCH_SIZE,
        lr=LEARNING_RATE,
        schedule="constant",
        momentum=0,
        weight_decay=0,
        heterogeneity="iid",
        validation_per_class=0,
        augment=False,
        engine="ray" if arguments.actors else "auto",
        actors=arguments.actors,
    )
    with tempfile.TemporaryDirectory() as folder:
        save(workload.data(), Path(folder))
        data = load(folder)
    # FedSieve evaluates after every round: on 10 examples here, which the clock counts.
    test = data[0][:CLASSES], data[1][:CLASSES]
    model = build(workload)  # what config.model names, with the first weights of the other simulators
    first = loss(model, data)
    clock = Clock(measurement)
    history = fs.run(
        config,
        model=model,
        dataset=fs.data.Dataset.from_arrays(*data, *test, classes=CLASSES),
        callbacks=[clock],
    )
    assert history.model is not None
    vector_to_parameters(history.model, model.parameters())
    report(
        peer="fedsieve-ray" if arguments.actors else "fedsieve",
        package="fedsieve",
        framework="torch",
        workload=workload,
        results=measurement.results(),
        losses=(first, loss(model, data)),
        steps=clock.trained * -(-workload.examples // BATCH_SIZE) / config.rounds,
    )


if __name__ == "__main__":
    main()
