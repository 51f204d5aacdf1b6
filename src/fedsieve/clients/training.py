"""How a client learns: SGD on its own examples, starting from the model it was sent (lines 5-7 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsieve.clients.augmentation import crop_and_flip, draw_crops_and_flips
from fedsieve.clients.objective import Objective, Plain
from fedsieve.clients.schedule import Schedule, constant
from fedsieve.randomness import generator
from fedsieve.vector import Layout


@dataclass(frozen=True)
class LocalTraining:
    """The settings of a client's training; the same for every client and every engine.

    A client makes `epochs` passes over its examples or, when `steps` is given, exactly that many steps. `rounds` is
    the length of the run, for schedules that end with it.
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 64
    epochs: int = 5
    steps: int | None = None
    schedule: Schedule = constant
    rounds: int = 1
    augment: bool = False
    objective: Objective = field(default_factory=Plain)

    def batches(self, examples: int, seed: int, round: int, client: int) -> Iterator[NDArray[np.int64]]:
        """The positions of each step's examples [batch]: a new order every pass, the last batch perhaps smaller."""
        random = generator(seed, "batches", round, client)
        passes, step = 0, 0
        while examples and (passes < self.epochs if self.steps is None else step < self.steps):
            order = random.permutation(examples)
            for start in range(0, examples, self.batch_size):
                if step == self.steps:
                    return
                yield order[start : start + self.batch_size]
                step += 1
            passes += 1


def train(
    module: nn.Module,
    layout: Layout,
    received: Tensor,
    inputs: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    seed: int,
    round: int,
    client: int,
) -> tuple[Tensor, float]:
    """One client's local update: the trained model [size] and the mean loss over the examples it went through.

    `received` [size] is the model it was sent, `inputs` [examples, ...] and `labels` [examples] its data. The module
    is only scratch space. SGD is PyTorch's: v ← momentum · v + g + weight_decay · w, then w ← w - lr · v.
    """
    layout.write(received, module)
    model = received.clone()
    weights, start = model[: layout.parameters], received[: layout.parameters]
    gradient, velocity = torch.zeros_like(weights), torch.zeros_like(weights)
    layout.bind(model, gradient, module)
    augmentation = generator(seed, "augmentation", round, client)
    lr = settings.lr * settings.schedule(round, settings.rounds)
    total_loss, seen = torch.zeros((), dtype=torch.float64, device=model.device), 0

    module.train()
    for positions in settings.batches(len(labels), seed, round, client):
        batch = torch.from_numpy(positions).to(inputs.device)
        images = inputs[batch]
        if settings.augment:
            images = crop_and_flip(images, torch.from_numpy(draw_crops_and_flips(augmentation, len(batch))))
        gradient.zero_()
        loss = cross_entropy(module(images), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            settings.objective.add_gradient(gradient, weights, start)
            gradient.add_(weights, alpha=settings.weight_decay)
            velocity.mul_(settings.momentum).add_(gradient)
            weights.add_(velocity, alpha=-lr)
        total_loss += loss.detach() * len(batch)
        seen += len(batch)
    return layout.read(module), float(total_loss) / max(seen, 1)
