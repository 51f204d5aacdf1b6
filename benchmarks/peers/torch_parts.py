"""What the simulators built on PyTorch share: the networks, a count of steps, and the loss that is reported."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import BATCH_SIZE, CLASSES, EVALUATED, Arrays, Workload


def build(workload: Workload) -> nn.Sequential:
    """The workload's network, with the same first weights whenever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(workload.input_shape) if workload.name == "mlp" else cnn(workload.image)


def mlp(input_shape: tuple[int, ...]) -> nn.Sequential:
    """Two hidden layers of 200."""
    return nn.Sequential(
        nn.Linear(math.prod(input_shape), 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, CLASSES),
    )


def cnn(image: tuple[int, int, int]) -> nn.Sequential:
    """FedAvg's CNN: two 5 × 5 convolutions, each pooled, and a dense layer of 512."""
    channels, height, width = image
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    )


def tensors(arrays: Arrays) -> tuple[Tensor, Tensor]:
    """Inputs and labels as tensors that share the arrays' memory."""
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


def count_steps(module: nn.Module) -> list[int]:
    """A list to which the module, or a copy of it, adds the size of each batch that it is trained with."""
    batches: list[int] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            batches.append(len(inputs[0]))

    module.register_forward_pre_hook(note)
    return batches


@torch.no_grad()
def loss(module: nn.Module, data: Arrays) -> float:
    """The mean loss on the training examples that are evaluated, in batches so small that memory does not show them."""
    inputs, labels = tensors((data[0][:EVALUATED], data[1][:EVALUATED]))
    batches = zip(torch.split(inputs, BATCH_SIZE), torch.split(labels, BATCH_SIZE), strict=True)
    return sum(float(cross_entropy(module(x), y, reduction="sum")) for x, y in batches) / EVALUATED
