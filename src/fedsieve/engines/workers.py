"""Every core of a CPU: one single-threaded worker per core.

Workers are threads, which share the data set and cost little memory; PyTorch lets go of Python's lock while it
computes. A client's computation is the same whoever does it, so results don't depend on the number of workers.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve.clients import LocalTraining, Trainer
from fedsieve.data import Dataset, Partition
from fedsieve.engines.base import Update
from fedsieve.engines.precision import Precision
from fedsieve.engines.sequential import Batch, SequentialEngine
from fedsieve.randomness import torch_draws
from fedsieve.threads import single_thread

log = logging.getLogger("fedsieve")

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkersEngine(SequentialEngine):
    """Trains several clients of a round at once, each on one core; as many as `workers`, by default all cores."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        partition: Partition,
        validation: NDArray[np.int64],
        settings: LocalTraining,
        seed: int,
        workers: int | None = None,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(build, dataset, partition, validation, settings, seed, precision=precision)
        self.workers = workers or usable_cores()
        self._pool: ThreadPoolExecutor | None = None
        self._trainers = [self._trainer]

    def train(self, model: Tensor, clients: Sequence[int], round: int) -> list[Update]:
        """The client with most examples first, so that no worker is left with a long one at the end."""
        if self._draws_random_numbers:
            return super().train(model, clients, round)
        sizes = [len(self.partition[client]) for client in clients]
        longest_first = sorted(range(len(clients)), key=lambda place: -sizes[place])
        # All drawn here: seeding holds Python's lock, and takes far longer in between other work than in a row.
        batches = [
            list(self.settings.batches(size, self.seed, round, client))
            for size, client in zip(sizes, clients, strict=True)
        ]
        updates = self._spread(
            lambda trainer, place: self._train_one(trainer, model, clients[place], round, batches[place]), longest_first
        )
        by_place = dict(zip(longest_first, updates, strict=True))
        return [by_place[place] for place in range(len(clients))]

    def logits_at(
        self, models: Sequence[Tensor], data: Literal["validation", "test"], places: NDArray[np.int64]
    ) -> Tensor:
        """The forward passes of the sequential engine; each worker takes a batch and a share of the models."""
        batches = [
            places[start : start + self.evaluation_batch] for start in range(0, len(places), self.evaluation_batch)
        ]
        shares = [models[first :: self.workers] for first in range(min(self.workers, len(models)))]

        def forward(trainer: Trainer, task: tuple[NDArray[np.int64], Sequence[Tensor]]) -> list[Tensor]:
            batch, share = task
            inputs = self._evaluation_inputs(data, batch)
            module = trainer.module.eval()
            outputs = []
            with torch.no_grad():
                for model in share:
                    self.layout.write(model, module)
                    outputs.append(module(inputs).to(self.layout.dtype))
            return outputs

        done = iter(self._spread(forward, [(batch, share) for batch in batches for share in shares]))
        outputs: list[list[Tensor]] = [[] for _ in models]
        for _ in batches:
            for first in range(len(shares)):
                for number, output in enumerate(next(done)):
                    outputs[first + number * self.workers].append(output)
        return torch.stack([torch.cat(parts) for parts in outputs])

    def _slopes(self, model: Tensor, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """As many batches at once as there are workers."""
        for start in range(0, len(batches), self.workers):
            yield from self._spread(
                lambda trainer, batch: self._slope(trainer.module, model, batch), batches[start : start + self.workers]
            )

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        del self._trainers[1:]

    def _spread(self, work: Callable[[Trainer, Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` on each of the items, whichever worker is free taking the next one; results in the items' order."""
        left = deque(enumerate(items))
        results: dict[int, Result] = {}

        def take_items(trainer: Trainer) -> None:
            try:
                with self._arithmetic():
                    while True:
                        try:
                            place, item = left.popleft()
                        except IndexError:
                            return
                        results[place] = work(trainer, item)
            except BaseException:
                left.clear()
                raise

        needed = min(self.workers, len(items))
        while len(self._trainers) < needed:
            self._trainers.append(self._new_trainer(copy.deepcopy(self.module)))
        with single_thread():
            if self._pool is None:
                # Threads have settings of their own for how many threads PyTorch may use in them.
                self._pool = ThreadPoolExecutor(self.workers, "fedsieve-worker", torch.set_num_threads, (1,))
            running = [self._pool.submit(take_items, trainer) for trainer in self._trainers[:needed]]
            try:
                for future in running:
                    future.result()
            finally:
                left.clear()
                wait(running)
        return [results[place] for place in range(len(items))]

    @cached_property
    def _draws_random_numbers(self) -> bool:
        """Whether the module draws from PyTorch's generator in training, which all threads share; yes if in doubt."""
        module = copy.deepcopy(self.module).train()
        inputs, _ = self._examples("train", np.arange(min(2, len(self.dataset.train_labels))))
        with torch_draws(self.seed, "a look at the module"), torch.no_grad(), single_thread():
            before = torch.get_rng_state()
            try:
                module(inputs)
            except Exception:
                return True
            draws = not torch.equal(before, torch.get_rng_state())
        if draws:
            log.info(
                "%s draws random numbers of its own, and PyTorch has one generator for all threads: "
                "clients train one after the other",
                type(self.module).__name__,
            )
        return draws


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
