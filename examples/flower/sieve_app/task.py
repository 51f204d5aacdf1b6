"""The model, its training, and the data of each site: 8 × 8 handwritten digits, of which a site sees few classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsieve import data


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.layers(images)
        return outputs


def site_data(node_config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A site's own examples: the file `data` of its node, or its share of the digits in a simulation."""
    if "data" in node_config:
        with np.load(str(node_config["data"])) as file:
            return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    return shares(int(node_config["num-partitions"]))[int(node_config["partition-id"])]


def shares(sites: int) -> list[tuple[Tensor, Tensor]]:
    """The training digits without the server's validation examples, split over sites by class."""
    digits = data.load("digits")
    _, rest = data.validation_split(digits.train_labels, 20, digits.classes, seed=0)
    split = data.partition(digits.train_labels, sites, "class", alpha=0.5, seed=0, candidates=rest)
    return [
        (digits.prepare(digits.train_inputs[part]), torch.from_numpy(digits.train_labels[part].astype(np.int64)))
        for part in split
    ]


def validation_data() -> tuple[Tensor, Tensor]:
    """The server's 20 validation examples of each class."""
    digits = data.load("digits")
    places, _ = data.validation_split(digits.train_labels, 20, digits.classes, seed=0)
    return digits.prepare(digits.train_inputs[places]), torch.from_numpy(digits.train_labels[places].astype(np.int64))


def test_data() -> tuple[Tensor, Tensor]:
    """Digits that nobody trained on."""
    digits = data.load("digits")
    return digits.prepare(digits.test_inputs), torch.from_numpy(digits.test_labels.astype(np.int64))


def train(net: Net, examples: tuple[Tensor, Tensor], epochs: int, lr: float) -> float:
    """Train in place; the mean loss of the last epoch."""
    torch.set_num_threads(1)
    x, y = examples
    optimiser = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for batch in torch.split(torch.randperm(len(y)), 16):
            optimiser.zero_grad()
            loss = cross_entropy(net(x[batch]), y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.item())
    return float(np.mean(losses))


def evaluate(net: Net, examples: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Accuracy and loss."""
    x, y = examples
    with torch.no_grad():
        logits = net(x)
    return float((logits.argmax(1) == y).float().mean()), float(cross_entropy(logits, y))
