"""FedAvg as a researcher writes it: a PyTorch loop over the clients, without any simulator.

python plain_loop.py --workload cnn|mlp [--rounds 10] [--threads 1|2]
"""

from __future__ import annotations

import random

import torch
from harness import Measurement, parser, report
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch_parts import build, count_steps, loss, tensors
from workload import BATCH_SIZE, LEARNING_RATE, WORKLOADS


def main() -> None:
    arguments_of = parser(__doc__)
    arguments_of.add_argument("--threads", type=int, choices=(1, 2), default=1, help="threads of PyTorch")
    arguments = arguments_of.parse_args()
    torch.set_num_threads(arguments.threads)
    workload = WORKLOADS[arguments.workload]
    random.seed(0)
    torch.manual_seed(0)
    data = workload.data()
    clients = [
        DataLoader(TensorDataset(*tensors(workload.of_client(data, client))), BATCH_SIZE, shuffle=True)
        for client in range(workload.clients)
    ]
    model = build(workload)
    batches = count_steps(model)
    first = loss(model, data)
    measurement = Measurement(arguments.rounds)
    for _ in range(measurement.total):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        total: dict[str, Tensor] = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        examples = 0
        for client in random.sample(range(workload.clients), workload.clients_per_round):
            model.load_state_dict(before)
            optimiser = torch.optim.SGD(model.parameters(), LEARNING_RATE)
            for inputs, labels in clients[client]:
                optimiser.zero_grad()
                cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            for name, tensor in model.state_dict().items():
                total[name] += workload.examples * tensor
            examples += workload.examples
        model.load_state_dict({name: tensor / examples for name, tensor in total.items()})
        measurement.end()
    report(
        peer=f"plain-loop-{arguments.threads}",
        package="torch",
        framework="torch",
        workload=workload,
        results=measurement.results(),
        losses=(first, loss(model, data)),
        steps=len(batches) / measurement.total,
    )


if __name__ == "__main__":
    main()
