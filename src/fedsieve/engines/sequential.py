"""The reference engine: one client after the other, in this process. Simple enough to believe and to debug."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedsieve.clients import LocalTraining, Trainer, channels_last, crop_and_flip, gains_from_channels_last
from fedsieve.data import Dataset, Partition
from fedsieve.engines.base import Engine, Update
from fedsieve.engines.heap import keep_freed_memory
from fedsieve.engines.precision import Precision, arithmetic
from fedsieve.errors import InvalidSetting
from fedsieve.randomness import generator, torch_draws
from fedsieve.threads import single_thread
from fedsieve.vector import Layout, Vectors

Batch = tuple[NDArray[np.int64], NDArray[np.int64] | None]
"""Where some examples [n] lie in the data set, and how their images are cropped and flipped [n, 3], if they are."""

log = logging.getLogger("fedsieve")


class SequentialEngine(Engine):
    """Trains the clients of a round one by one.

    `build` makes the module; `validation` [examples] are positions in the training data that no client holds.
    """

    evaluation_batch = 500
    evaluation_batch_of_convolutions = 100  # on a CPU, whose cache and memory their outputs would fill

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        partition: Partition,
        validation: NDArray[np.int64],
        settings: LocalTraining,
        seed: int,
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
    ) -> None:
        self.dataset = dataset
        self.partition = partition
        self.validation = validation
        self.settings = settings
        self.augments = settings.augment
        self.seed = seed
        self.device = torch.device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            _wake_autograd(self.device)
        self.precision = precision
        with torch_draws(seed, "initial model"):
            self.module = build()
        self.layout = Layout.of(self.module)
        self._initial = self.layout.read(self.module)
        self.module.to(self.device)
        self._channels_last = self.device.type == "cpu" and gains_from_channels_last(self.module, dataset.input_shape)
        if self.device.type == "cpu" and any(isinstance(layer, nn.Conv2d) for layer in self.module.modules()):
            self.evaluation_batch = self.evaluation_batch_of_convolutions
        self._vectors = Vectors()
        self._trainer = self._new_trainer(self.module)

    def initial_model(self) -> Tensor:
        """The freshly built module's state."""
        return self._initial.to(self.device)

    def train(self, model: Tensor, clients: Sequence[int], round: int) -> list[Update]:
        """One client after the other; an exception becomes that client's error."""
        updates = []
        with single_thread(), self._arithmetic():
            for client in clients:
                with torch_draws(self.seed, "local draws", round, client, self.device):
                    updates.append(self._train_one(self._trainer, model, client, round))
        return updates

    def _train_one(
        self,
        trainer: Trainer,
        model: Tensor,
        client: int,
        round: int,
        batches: Sequence[NDArray[np.int64]] | None = None,
    ) -> Update:
        try:
            inputs, labels = self._examples("train", np.sort(self.partition[client]))
            trained, loss = trainer.train(model, inputs, labels, self.seed, round, client, batches)
        except Exception as error:
            return Update(client, None, error=one_line(error))
        return Update(client, trained, loss)

    def _new_trainer(self, module: nn.Module) -> Trainer:
        own_layers = self.precision != "bf16"
        return Trainer(module, self.layout, self.settings, self._vectors, self._channels_last, own_layers)

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """A forward pass in batches, batch norm with its running statistics."""
        return self.logits_at(models, data, self.places(data))

    def logits_at(
        self, models: Sequence[Tensor], data: Literal["validation", "test"], places: NDArray[np.int64]
    ) -> Tensor:
        """The same for the examples at some `places` of the data set alone."""
        self.module.eval()
        outputs = []
        with torch.no_grad(), single_thread(), self._arithmetic():
            for model in models:
                self.layout.write(model, self.module)
                for start in range(0, len(places), self.evaluation_batch):
                    inputs = self._evaluation_inputs(data, places[start : start + self.evaluation_batch])
                    outputs.append(self.module(inputs).to(self.layout.dtype))
        return torch.cat(outputs).view(len(models), len(places), -1)

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """The labels of the test set or of the validation examples."""
        labels = self.dataset.test_labels if data == "test" else self.dataset.train_labels[self.validation]
        return torch.from_numpy(np.asarray(labels).astype(np.int64)).to(self.device)

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """A backward pass for each batch, added up."""
        places = self.validation if examples is None else self.validation[examples.cpu().numpy()]
        batches: list[Batch] = []
        for start in range(0, len(places), self.evaluation_batch):
            batch = slice(start, start + self.evaluation_batch)
            batches.append((places[batch], None if crops is None else crops[batch]))
        score, gradient = torch.zeros((), dtype=model.dtype, device=self.device), torch.zeros_like(model)
        with single_thread(), self._arithmetic():
            for part, slope in self._slopes(model, batches):
                score += part / len(places)
                gradient += slope.div_(len(places))
        return score, gradient

    def _slopes(self, model: Tensor, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            yield self._slope(self.module, model, batch)

    def _slope(self, module: nn.Module, model: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The log-likelihood [] of a batch of validation examples, summed, and its gradient [size]."""
        gradient = torch.zeros_like(model)
        self.layout.write_untrained(model, module)
        slopes = self.layout.tensors(gradient)
        trained = {piece.name for piece in self.layout.pieces if piece.start < self.layout.parameters}
        pieces = {name: tensor for name, tensor in self.layout.tensors(model.detach()).items() if name in trained}
        for name, tensor in pieces.items():
            tensor.requires_grad_().grad = slopes[name]
        inputs, labels = self._validation_batch(batch)
        logits = functional_call(module.eval(), pieces, (inputs,)).to(self.layout.dtype)
        likelihood = -cross_entropy(logits, labels, reduction="sum")
        likelihood.backward()  # type: ignore[no-untyped-call]
        return likelihood.detach(), gradient

    def _validation_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs [examples, ...] and labels [examples] of some validation examples."""
        places, crops = batch
        inputs, labels = self._examples("validation", places)
        if crops is not None:
            if inputs.ndim != 4:
                raise InvalidSetting(
                    "augment", True, f"false for inputs {self.dataset.input_shape}, which are no images"
                )
            inputs = crop_and_flip(inputs, self._there(crops))
        return channels_last(inputs) if self._channels_last else inputs, labels

    def local_losses(
        self, model: Tensor, clients: Sequence[int], round: int, examples: int | None = None
    ) -> NDArray[np.float64]:
        """Forward passes over each client's data, one client after the other; nothing is augmented."""
        self.module.eval()
        losses = []
        with torch.no_grad(), single_thread(), self._arithmetic():
            self.layout.write(model, self.module)
            for client in clients:
                try:
                    losses.append(self._local_loss(client, round, examples))
                except Exception as error:
                    log.warning("round %d: client %d has no loss: %s", round, client, one_line(error))
                    losses.append(math.nan)
        return np.array(losses)

    def _local_loss(self, client: int, round: int, examples: int | None) -> float:
        places, total = np.sort(self.partition[client]), 0.0
        if examples is not None and examples < len(places):
            random = generator(self.seed, "examples of a loss", round, client)
            places = np.sort(random.choice(places, examples, replace=False))
        for start in range(0, len(places), self.evaluation_batch):
            inputs, labels = self._examples("train", places[start : start + self.evaluation_batch])
            total += float(cross_entropy(self.module(inputs).float(), labels, reduction="sum"))
        return total / len(places)

    def places(self, data: Literal["validation", "test"]) -> NDArray[np.int64]:
        """Where the examples of one of the server's data sets lie in the test or training data."""
        return np.arange(len(self.dataset.test_labels)) if data == "test" else self.validation

    def _evaluation_inputs(self, data: Literal["validation", "test"], places: NDArray[np.int64]) -> Tensor:
        """Inputs [examples, ...] of a forward pass."""
        inputs, _ = self._examples(data, places)
        return channels_last(inputs) if self._channels_last else inputs

    def _examples(
        self, data: Literal["train", "validation", "test"], places: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Inputs [examples, ...] as the model sees them and labels [examples], on the engine's device."""
        test = data == "test"
        # As plain arrays: NumPy's memory-mapped ones are slow to index.
        inputs = np.asarray(self.dataset.test_inputs if test else self.dataset.train_inputs)[places]
        labels = np.asarray(self.dataset.test_labels if test else self.dataset.train_labels)[places]
        prepared = self.dataset.normalise(torch.from_numpy(inputs))
        return prepared.to(self.device), torch.from_numpy(labels.astype(np.int64)).to(self.device)

    def _there(self, draws: NDArray[np.int64]) -> Tensor:
        """Where the images are that they belong to."""
        return torch.from_numpy(draws).to(self.device)

    def _arithmetic(self) -> AbstractContextManager[None]:
        return arithmetic(self.precision, self.device)


def one_line(error: Exception) -> str:
    """What went wrong with a client, for the record."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _wake_autograd(device: torch.device) -> None:
    """Autograd's own thread for a GPU has no CUDA context before its first work; cuBLAS would warn of that."""
    one = torch.ones(1, device=device, requires_grad=True)
    (one * one).sum().backward()  # type: ignore[no-untyped-call]
