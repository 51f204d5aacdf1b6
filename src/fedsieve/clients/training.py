"""How a client learns: SGD on its own examples, starting from the model it was sent (lines 5-7 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsieve.clients.augmentation import crop_and_flip, draw_crops_and_flips
from fedsieve.clients.channels_last import channels_last
from fedsieve.clients.dense import DenseNetwork
from fedsieve.clients.large_linear import add_gradients_in_place
from fedsieve.clients.objective import Objective, Plain
from fedsieve.clients.schedule import Schedule, constant
from fedsieve.randomness import generator
from fedsieve.vector import Layout, Vectors


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

    def pace(self, round: int) -> float:
        """What the schedule has left of the learning rate in a round."""
        return self.schedule(round, self.rounds)

    def step_count(self, examples: int) -> int:
        """How many steps a client with so many examples makes in a round."""
        if self.steps is not None:
            return self.steps if examples else 0
        return self.epochs * -(-examples // self.batch_size)

    def example_count(self, examples: int) -> int:
        """How many examples a client with so many different ones trains on in a round, those seen again included."""
        if self.steps is None or not examples:
            return self.epochs * examples
        passes, rest = divmod(self.steps, -(-examples // self.batch_size))
        return passes * examples + min(examples, rest * self.batch_size)

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


class Trainer:
    """Trains clients, one after the other, in `module`.

    It takes the module over: from now on its trained parameters are views of the trainer's own vector. `vectors` is
    where trained models are put; `images_channels_last` is how images lie in memory when the module sees them. Without
    `own_layers` all are PyTorch's, as they must be where it casts what they compute with.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        settings: LocalTraining,
        vectors: Vectors | None = None,
        images_channels_last: bool = False,
        own_layers: bool = True,
    ) -> None:
        self.module = module
        self._layout = layout
        self._settings = settings
        self._vectors = vectors or Vectors()
        self._channels_last = images_channels_last
        self._model = layout.read(module)
        self._weights = self._model[: layout.parameters]
        self._gradient = torch.zeros_like(self._weights)
        # Without momentum the velocity is the gradient.
        self._velocity = torch.zeros_like(self._weights) if settings.momentum else self._gradient
        layout.bind(self._model, self._gradient, module)
        self._dense = DenseNetwork.of(module) if own_layers else None
        if own_layers and self._dense is None and self._model.device.type == "cpu":
            add_gradients_in_place(module)

    @torch.no_grad()
    def train(
        self,
        received: Tensor,
        inputs: Tensor,
        labels: Tensor,
        seed: int,
        round: int,
        client: int,
        batches: Iterable[NDArray[np.int64]] | None = None,
    ) -> tuple[Tensor, float]:
        """One client's local update: the trained model [size] and the mean loss over the examples it went through.

        `received` [size] is the model it was sent, `inputs` [examples, ...] and `labels` [examples] its data. The
        settings' `batches` are drawn here unless they have been already. SGD is PyTorch's:
        v ← momentum · v + g + weight_decay · w, then w ← w - lr · v.
        """
        settings = self._settings
        start = received[: self._layout.parameters]
        self._model.copy_(received)
        self._layout.write_untrained(received, self.module)
        if settings.momentum:
            self._velocity.zero_()
        lr = settings.lr * settings.pace(round)
        augmentation = generator(seed, "augmentation", round, client) if settings.augment else None
        losses, counts = [], []

        if self._dense is None:  # whose layers do the same in training
            self.module.train()
        for positions in batches or settings.batches(len(labels), seed, round, client):
            batch = torch.from_numpy(positions)
            if inputs.device.type != "cpu":
                batch = batch.to(inputs.device)
            images = inputs.index_select(0, batch)
            if augmentation is not None:
                images = crop_and_flip(images, torch.from_numpy(draw_crops_and_flips(augmentation, len(positions))))
            losses.append(self._backward(images, labels.index_select(0, batch)))
            counts.append(len(positions))
            self._descend(lr, start)
        self._layout.read_untrained(self.module, self._model)
        return self._vectors.copy(self._model), _mean_loss(losses, counts)

    def _backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss [] of a batch; its gradient is then in `self._gradient`."""
        if self._dense is not None and self._dense.takes(images):
            return self._dense.backward(images, labels)
        if self._channels_last:
            images = channels_last(images)
        self._gradient.zero_()
        with torch.enable_grad():
            logits = self.module(images)
            if not isinstance(logits, Tensor):
                raise TypeError(f"in training the model gives a {type(logits).__name__}, not logits [n, classes]")
            loss = cross_entropy(logits.to(self._layout.dtype), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _descend(self, lr: float, start: Tensor) -> None:
        settings, weights, gradient = self._settings, self._weights, self._gradient
        settings.objective.add_gradient(gradient, weights, start)
        if settings.weight_decay:
            gradient.add_(weights, alpha=settings.weight_decay)
        if settings.momentum:
            self._velocity.mul_(settings.momentum).add_(gradient)
        weights.add_(self._velocity, alpha=-lr)


def _mean_loss(losses: list[Tensor], counts: list[int]) -> float:
    """The mean over examples of batches' mean losses, given how many examples each had."""
    total = 0.0
    for loss, count in zip(losses, counts, strict=True):
        sum_of_batch = loss.item() * count
        total += float(np.float32(sum_of_batch)) if loss.dtype == torch.float32 else sum_of_batch
    return total / max(sum(counts), 1)
