"""The workloads on pfl: two processes, each with one thread, that share the clients of a round.

python with_pfl.py --workload cnn|mlp [--rounds 10]

The script starts itself twice, with the environment by which pfl tells its processes apart.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Measurement, parser, report
from workload import BATCH_SIZE, LEARNING_RATE, WORKLOADS, Workload, load, save

PROCESSES = 2


def train(workload: Workload, rounds: int, folder: str) -> dict[str, Any]:
    """What one of the processes does, and what it reports."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy
    from torch_parts import build, count_steps, loss, tensors

    class Network(nn.Module):
        """The network with the two methods that pfl asks for."""

        def __init__(self) -> None:
            super().__init__()
            self.network = build(workload)

        def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(self.network(inputs), labels)

        @torch.no_grad()
        def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(inputs, labels)) * len(labels), len(labels))}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """Takes the time after each round."""

        def __init__(self) -> None:
            self.measurement = Measurement(rounds, root=os.getppid())

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            self.measurement.end()
            return False, Metrics()

    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - pfl draws from NumPy's global state, the same in all processes
    data = load(folder)
    users = {
        client: PyTorchTensorDataset(tensors(workload.of_client(data, client)), user_id=str(client))
        for client in range(workload.clients)
    }
    federation = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    network = Network()
    batches = count_steps(network.network)
    first = loss(network.network, data)
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=clock.measurement.total,
            evaluation_frequency=clock.measurement.total,  # only in the first round, which is to warm up
            train_cohort_size=workload.clients_per_round,
            val_cohort_size=None,
        ),
        SimulatedBackend(federation, federation, [WeightByDatapoints()]),
        PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH_SIZE),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return {
        "results": clock.measurement.results(),
        "losses": (first, loss(network.network, data)),
        "steps": len(batches) / clock.measurement.total,
    }


def start(folder: str) -> list[subprocess.Popen[str]]:
    """Run this script again, once per process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    # pfl connects to the first address; it only counts the others.
    addresses = ",".join([f"localhost:{port}"] * PROCESSES)
    common = {"PFL_WORKER_ADDRESSES": addresses, "PFL_DATA": folder, "PFL_PYTORCH_DEVICE": "cpu"}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | common | {"PFL_WORKER_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]


def wait(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each process reports; when one fails, the others are ended."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
        time.sleep(0.05)
    if any(process.returncode for process in processes):
        sys.exit(f"pfl's processes ended with {[process.returncode for process in processes]}")
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    workload = WORKLOADS[arguments.workload]
    if "PFL_WORKER_RANK" in os.environ:
        print(json.dumps(train(workload, arguments.rounds, os.environ["PFL_DATA"])), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        save(workload.data(), Path(folder))
        ranks = wait(start(folder))
    report(
        peer="pfl",
        package="pfl",
        framework="torch",
        workload=workload,
        results=ranks[0]["results"],
        losses=ranks[0]["losses"],
        steps=sum(rank["steps"] for rank in ranks),
    )


if __name__ == "__main__":
    main()
