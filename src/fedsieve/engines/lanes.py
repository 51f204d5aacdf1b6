"""Many clients at once on a GPU.

A client's step on a small batch leaves most of a GPU idle, and launching its hundred kernels takes longer than running
them. So the step is captured once as a CUDA graph, and the clients of a round train side by side in *lanes*: each lane
has its own stream, weights, velocity and captured step, and takes one client after the other.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve.clients import LocalTraining, crop_and_flip, draw_crops_and_flips, takes_channels_last
from fedsieve.data import Dataset, Partition
from fedsieve.engines.base import Update
from fedsieve.engines.capture import CannotCapture, free_unused_memory
from fedsieve.engines.fusing import fused_twin
from fedsieve.engines.lane import Common, Lane, to_gpu
from fedsieve.engines.precision import Precision
from fedsieve.engines.sequential import Batch, SequentialEngine, one_line
from fedsieve.engines.slope import Slope
from fedsieve.engines.streams import LANES
from fedsieve.randomness import generator

STEPS_PER_TURN = 8  # that a lane is given before the next lane's turn
RESIDENT_SHARE = 0.25  # of the GPU's free memory that a data set may take

DONE = object()

log = logging.getLogger("fedsieve")


class LanesEngine(SequentialEngine):
    """Trains the clients of a round side by side on one GPU.

    A model whose step can't be captured is trained as the sequential engine does, after a warning.
    """

    evaluation_batch = 2500

    def __init__(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        partition: Partition,
        validation: NDArray[np.int64],
        settings: LocalTraining,
        seed: int,
        device: torch.device | str = "cuda",
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(build, dataset, partition, validation, settings, seed, device, precision)
        self._data = {split: resident(dataset, split, self.device) for split in ("train", "test")}
        self._channels_last = takes_channels_last(self.module, dataset.input_shape, self.device)
        self._evaluated = fused_twin(self.module).eval()
        self._validation_slope: Slope | None = None
        self._common: Common | None = None
        self._lanes: list[Lane] = []
        self._most_lanes = LANES
        self._given_up = False

    def train(self, model: Tensor, clients: Sequence[int], round: int) -> list[Update]:
        """All clients, spread over the lanes so that these end at about the same time."""
        try:
            self._open_lanes(min(LANES, len(clients)))
        except CannotCapture as problem:
            log.warning("this model's step can't be captured (%s); its clients train one after the other", problem)
            self._given_up = True
        if self._given_up or not clients:
            return super().train(model, clients, round)
        return self._train_in_lanes(model, clients, round)

    def logits_at(
        self, models: Sequence[Tensor], data: Literal["validation", "test"], places: NDArray[np.int64]
    ) -> Tensor:
        """All models on one large batch after the other."""
        outputs = []
        with torch.no_grad(), self._arithmetic():
            for start in range(0, len(places), self.evaluation_batch):
                inputs = self._evaluation_inputs(data, places[start : start + self.evaluation_batch])
                for model in models:
                    self.layout.write(model, self.module)
                    outputs.append(self._evaluated(inputs).to(self.layout.dtype))
        batches = [torch.stack(outputs[first : first + len(models)]) for first in range(0, len(outputs), len(models))]
        return torch.cat(batches, dim=1)

    def _slopes(self, model: Tensor, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Captured; the host waits for nothing."""
        if self._validation_slope is None:
            self._validation_slope = Slope(self.module, self.layout, self.device)
        for batch in batches:
            yield self._validation_slope.at(model, *self._validation_batch(batch))

    def close(self) -> None:
        """Let go of the lanes, and of the memory they worked in."""
        self._lanes.clear()
        self._common = self._validation_slope = None
        free_unused_memory()

    def _open_lanes(self, count: int) -> None:
        if self._given_up:
            return
        with self._arithmetic():
            if self._common is None:
                self._common = Common(
                    self.module,
                    self.layout,
                    self.dataset,
                    self.settings,
                    self.precision,
                    self.device,
                    self._channels_last,
                )
            if len(self._lanes) < min(count, self._most_lanes):
                gc.collect()  # streams and memory of runs that have ended
                self._open_more_lanes(count, self._common)

    def _open_more_lanes(self, count: int, common: Common) -> None:
        """As many as asked for, or as fit in half of the GPU's free memory; at least one."""
        while len(self._lanes) < min(count, self._most_lanes):
            free = torch.cuda.mem_get_info(self.device)[0]
            try:
                self._lanes.append(Lane(common))
            except CannotCapture:
                if not self._lanes:
                    raise
                self._most_lanes = len(self._lanes)
                return
            taken = free - torch.cuda.mem_get_info(self.device)[0]
            if taken > 0 and len(self._lanes) > 1:
                self._most_lanes = min(LANES, len(self._lanes) + (free - taken) // (2 * taken))

    def _train_in_lanes(self, model: Tensor, clients: Sequence[int], round: int) -> list[Update]:
        assert self._common is not None
        self._common.begin(model, self.settings.lr * self.settings.pace(round))
        trained = torch.empty(len(clients), self.layout.size, device=self.device)
        losses = torch.zeros(len(clients), dtype=torch.float64, device=self.device)
        errors: dict[int, str] = {}
        steps = [self.settings.step_count(len(self.partition[client])) for client in clients]

        def take_turns(lane: Lane, mine: Sequence[int]) -> Iterator[None]:
            for place in mine:
                try:
                    plan = Plan(self.settings, self.partition[clients[place]], self.seed, round, clients[place])
                    yield from self._train_one_in(lane, plan, trained[place], losses[place])
                except Exception as error:
                    errors[place] = one_line(error)

        main = torch.cuda.current_stream(self.device)
        packed = zip(self._lanes, pack(steps, len(self._lanes)), strict=True)
        waiting = [(lane, take_turns(lane, mine)) for lane, mine in packed if mine]
        for lane, _ in waiting:
            lane.stream.wait_stream(main)
        used = [lane for lane, _ in waiting]
        while waiting:
            still = []
            for lane, turns in waiting:
                with torch.cuda.stream(lane.stream):
                    if next(turns, DONE) is not DONE:
                        still.append((lane, turns))
            waiting = still
        for lane in used:
            main.wait_stream(lane.stream)
        mean_losses = losses.tolist()
        return [
            Update(client, None, error=errors[place])
            if place in errors
            else Update(client, trained[place], mean_losses[place])
            for place, client in enumerate(clients)
        ]

    def _train_one_in(self, lane: Lane, plan: Plan, model: Tensor, loss: Tensor) -> Iterator[None]:
        """Train one client in `lane`, into `model` [size] and its mean `loss` []; others have a turn at each yield."""
        lane.begin()
        for start in range(0, plan.steps, lane.feed_steps):
            stop = min(plan.steps, start + lane.feed_steps)
            examples, draws = plan.batches(start, stop)
            inputs, labels = self._examples("train", examples.reshape(-1))
            if draws is not None:
                inputs = crop_and_flip(inputs, self._there(draws.reshape(-1, 3)))
            lane.feed(inputs, labels, plan.counts[start:stop])
            for step, count in enumerate(plan.counts[start:stop].tolist()):
                lane.step(count)
                if step % STEPS_PER_TURN == STEPS_PER_TURN - 1:
                    yield
            loss += lane.loss()
        loss /= max(1, plan.counts.sum())
        lane.read(model)

    def _examples(
        self, data: Literal["train", "validation", "test"], places: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        stored = self._data["test" if data == "test" else "train"]
        if stored is None:
            inputs, labels = super()._examples(data, places)
        else:
            where = self._there(places)
            inputs, labels = self.dataset.normalise(stored[0].index_select(0, where)), stored[1].index_select(0, where)
        return inputs, labels

    def _there(self, draws: NDArray[np.int64]) -> Tensor:
        """The host doesn't wait."""
        return to_gpu(draws, self.device)


class Plan:
    """What one client goes through in a round: its steps, how many examples each has, and the draws for them."""

    def __init__(self, settings: LocalTraining, held: NDArray[np.int64], seed: int, round: int, client: int) -> None:
        held = np.sort(held)
        batches = list(settings.batches(len(held), seed, round, client))
        self.steps = len(batches)
        self.counts = np.array([len(batch) for batch in batches], dtype=np.int64)  # [steps]
        self._examples = np.zeros((self.steps, settings.batch_size), dtype=np.int64)
        real = np.arange(settings.batch_size) < self.counts[:, None]
        if batches:
            self._examples[:] = held[0]
            self._examples[real] = held[np.concatenate(batches)]
        self._draws: NDArray[np.int64] | None = None
        if settings.augment:
            self._draws = np.zeros((*self._examples.shape, 3), dtype=np.int64)
            random = generator(seed, "augmentation", round, client)
            self._draws[real] = draw_crops_and_flips(random, int(self.counts.sum()))

    def batches(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Examples [steps, batch] and draws [steps, batch, 3] of some steps, filled up where a batch is smaller."""
        return self._examples[start:stop], None if self._draws is None else self._draws[start:stop]


def pack(steps: Sequence[int], lanes: int) -> list[list[int]]:
    """Places in `steps` spread over lanes: the longest first, each to the lane that has least to do."""
    load = [0] * lanes
    spread: list[list[int]] = [[] for _ in load]
    for place in sorted(range(len(steps)), key=lambda place: (-steps[place], place)):
        lane = load.index(min(load))
        spread[lane].append(place)
        load[lane] += steps[place]
    return spread


_loading = Lock()
_residents: WeakKeyDictionary[Dataset, dict[tuple[str, torch.device], tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def resident(dataset: Dataset, split: str, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """A split's stored inputs and labels on the GPU, once for all runs on that data set; None when it is too big."""
    with _loading:
        held = _residents.setdefault(dataset, {})
        if (split, device) not in held:
            inputs, labels = getattr(dataset, f"{split}_inputs"), getattr(dataset, f"{split}_labels")
            if inputs.nbytes > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
                return None
            held[split, device] = (
                torch.from_numpy(np.array(inputs)).to(device),
                torch.from_numpy(np.asarray(labels).astype(np.int64)).to(device),
            )
            torch.cuda.current_stream(device).synchronize()  # others read it on streams of their own
        return held[split, device]
