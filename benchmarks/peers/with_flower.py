"""The workloads on Flower's simulation: two Ray actors, each with one core and one thread.

python with_flower.py --workload cnn|mlp [--rounds 10]
"""

from __future__ import annotations

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"

import logging
import tempfile
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from harness import Measurement, parser, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch_parts import build, count_steps, loss, tensors
from workload import BATCH_SIZE, LEARNING_RATE, WORKLOADS, Workload, load, save

ACTORS = 2

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's round: the model comes in, is trained, and goes back."""
    torch.set_num_threads(1)
    config = message.content.config_records["config"]
    workload = WORKLOADS[str(config["workload"])]
    own = workload.of_client(load(str(config["folder"])), int(context.node_config["partition-id"]))
    model = build(workload)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    batches = count_steps(model)
    optimiser = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for inputs, labels in DataLoader(TensorDataset(*tensors(own)), BATCH_SIZE, shuffle=True):
        optimiser.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    metrics = MetricRecord({"num-examples": sum(batches), "steps": len(batches)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def steps_of(metrics: MetricRecord) -> float:
    steps = metrics["steps"]
    assert not isinstance(steps, list)
    return steps


def sum_steps(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """The steps that all clients of a round made together."""
    return MetricRecord({"steps": sum(steps_of(reply.metric_records["metrics"]) for reply in replies)})


class Server:
    """Flower's FedAvg, with the time taken where it would evaluate, and what it left."""

    def __init__(self, workload: Workload, rounds: int, folder: str) -> None:
        self.workload = workload
        self.measurement = Measurement(rounds)
        self.folder = folder
        self.model = build(workload)
        self.steps = 0.0

    def run(self, grid: Grid, context: Context) -> None:
        """All rounds."""
        strategy = FedAvg(
            fraction_train=self.workload.clients_per_round / self.workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=self.workload.clients_per_round,  # in the first round not all clients are there yet
            min_available_nodes=self.workload.clients,
            train_metrics_aggr_fn=sum_steps,
        )
        result = strategy.start(
            grid,
            ArrayRecord(self.model.state_dict()),
            num_rounds=self.measurement.total,
            train_config=ConfigRecord({"workload": self.workload.name, "folder": self.folder}),
            evaluate_fn=self.take_time,
        )
        self.model.load_state_dict(result.arrays.to_torch_state_dict())
        steps = sum(map(steps_of, result.train_metrics_clientapp.values()))
        self.steps = steps / self.measurement.total

    def take_time(self, round: int, arrays: ArrayRecord) -> None:
        """Flower calls it before the first round, too."""
        if round > 0:
            self.measurement.end()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    workload = WORKLOADS[arguments.workload]
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        save(workload.data(), Path(folder))
        data = load(folder)
        server = Server(workload, arguments.rounds, folder)
        first = loss(server.model, data)
        server_app = ServerApp()
        server_app.main()(server.run)
        run_simulation(
            server_app,
            client_app,
            num_supernodes=workload.clients,
            backend_config={
                "init_args": {"num_cpus": ACTORS},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
        report(
            peer="flower",
            package="flwr",
            framework="torch",
            workload=workload,
            results=server.measurement.results(),
            losses=(first, loss(server.model, data)),
            steps=server.steps,
        )


if __name__ == "__main__":
    main()
