"""The workloads on FedLab's standalone pipeline: one process, one client after the other, PyTorch's default threads.

python with_fedlab.py --workload cnn|mlp [--rounds 10]
"""

from __future__ import annotations

import random
import sys
from unittest.mock import MagicMock

import torch
from harness import Measurement, parser, report
from torch.utils.data import DataLoader
from torch_parts import build, count_steps, loss, tensors
from workload import BATCH_SIZE, LEARNING_RATE, WORKLOADS, Arrays, Workload

# FedLab imports torchvision for data sets that are not used here.
for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
    sys.modules[name] = MagicMock()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402


class Clients(FedDataset):  # type: ignore[misc]
    """The clients' examples, in FedLab's form."""

    def __init__(self, workload: Workload, data: Arrays) -> None:
        self.num = workload.clients
        self.datasets = [BaseDataset(*tensors(workload.of_client(data, client))) for client in range(workload.clients)]

    def get_dataset(self, id: int, type: str = "train") -> BaseDataset:
        """The examples of one client."""
        return self.datasets[id]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader[object]:
        """Its batches, in a new order each time."""
        return DataLoader(self.datasets[id], batch_size, shuffle=True)


class TimedPipeline(StandalonePipeline):  # type: ignore[misc]
    """Takes the time where FedLab would evaluate."""

    def __init__(self, handler: SyncServerHandler, trainer: SGDSerialClientTrainer, measurement: Measurement) -> None:
        super().__init__(handler, trainer)
        self.measurement = measurement

    def evaluate(self) -> None:
        """After each round."""
        self.measurement.end()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    workload = WORKLOADS[arguments.workload]
    random.seed(0)
    torch.manual_seed(0)
    data = workload.data()
    model = build(workload)
    batches = count_steps(model)
    first = loss(model, data)
    trainer = SGDSerialClientTrainer(model, workload.clients)
    trainer.setup_dataset(Clients(workload, data))
    trainer.setup_optim(epochs=1, batch_size=BATCH_SIZE, lr=LEARNING_RATE)
    # It averages without weights, which is the same where all clients hold equally much.
    ratio = workload.clients_per_round / workload.clients
    measurement = Measurement(arguments.rounds)
    handler = SyncServerHandler(model, measurement.total, ratio)
    TimedPipeline(handler, trainer, measurement).main()
    report(
        peer="fedlab",
        package="fedlab",
        framework="torch",
        workload=workload,
        results=measurement.results(),
        losses=(first, loss(handler.model, data)),
        steps=len(batches) / measurement.total,
    )


if __name__ == "__main__":
    main()
