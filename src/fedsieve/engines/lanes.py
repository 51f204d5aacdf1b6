"""Many clients at once on a GPU.

A client's step on a small batch leaves most of a GPU idle, and launching its hundred kernels takes longer than running
them. So the step is captured once as a CUDA graph, and the clients of a round train side by side in *lanes*: each lane
has its own stream, weights, velocity and captured step, and takes one client after the other.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Literal
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsieve.clients import LocalTraining, Proximal, crop_and_flip, draw_crops_and_flips, takes_channels_last
from fedsieve.data import Dataset, Partition
from fedsieve.engines.base import Update
from fedsieve.engines.precision import Precision, arithmetic
from fedsieve.engines.sequential import SequentialEngine, one_line
from fedsieve.engines.streams import LANES, borrow, give_back
from fedsieve.randomness import generator
from fedsieve.vector import Layout

FEED_BYTES = 16 * 2**20  # of training inputs prepared ahead for each lane
STEPS_PER_TURN = 8  # that a lane is given before the next lane's turn
RESIDENT_SHARE = 0.25  # of the GPU's free memory that a data set may take

DONE = object()

log = logging.getLogger("fedsieve")


class CannotCapture(Exception):
    """Why a model's step can't be replayed."""


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
        # The same parameters and buffers, with fewer passes over what lies between layers.
        same = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        self._evaluated = copy.deepcopy(self.module, same).eval()
        _fuse(self._evaluated)
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

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """All models on one large batch after the other."""
        places = self._places(data)
        outputs = []
        with torch.no_grad(), self._arithmetic():
            for start in range(0, len(places), self.evaluation_batch):
                inputs = self._evaluation_inputs(data, places[start : start + self.evaluation_batch])
                for model in models:
                    self.layout.write(model, self.module)
                    outputs.append(self._evaluated(inputs).to(self.layout.dtype))
        batches = [torch.stack(outputs[first : first + len(models)]) for first in range(0, len(outputs), len(models))]
        return torch.cat(batches, dim=1)

    def close(self) -> None:
        """Let go of the lanes."""
        self._lanes.clear()
        self._common = None

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
                with _no_garbage_collection():
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
        self._common.begin(model, self.settings.lr * self.settings.schedule(round, self.settings.rounds))
        trained = torch.empty(len(clients), self.layout.size, device=self.device)
        losses = torch.zeros(len(clients), dtype=torch.float64, device=self.device)
        errors: dict[int, str] = {}
        clocks = [(_event(), _event()) for _ in clients]
        steps = [self.settings.step_count(len(self.partition[client])) for client in clients]

        def take_turns(lane: Lane, mine: Sequence[int]) -> Iterator[None]:
            for place in mine:
                clocks[place][0].record(lane.stream)
                try:
                    plan = Plan(self.settings, self.partition[clients[place]], self.seed, round, clients[place])
                    yield from self._train_one_in(lane, plan, trained[place], losses[place])
                except Exception as error:
                    errors[place] = one_line(error)
                clocks[place][1].record(lane.stream)

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
            Update(client, None, seconds=begun.elapsed_time(done) / 1000, error=errors[place])
            if place in errors
            else Update(client, trained[place], mean_losses[place], begun.elapsed_time(done) / 1000)
            for place, (client, (begun, done)) in enumerate(zip(clients, clocks, strict=True))
        ]

    def _train_one_in(self, lane: Lane, plan: Plan, model: Tensor, loss: Tensor) -> Iterator[None]:
        """Train one client in `lane`, into `model` [size] and its mean `loss` []; others have a turn at each yield."""
        lane.begin()
        for start in range(0, plan.steps, lane.feed_steps):
            stop = min(plan.steps, start + lane.feed_steps)
            examples, draws = plan.batches(start, stop)
            inputs, labels = self._examples("train", examples.reshape(-1))
            if draws is not None:
                inputs = crop_and_flip(inputs, _to(draws.reshape(-1, 3), self.device))
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
            where = _to(places, self.device)
            inputs, labels = self.dataset.normalise(stored[0].index_select(0, where)), stored[1].index_select(0, where)
        return inputs, labels


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


class Common:
    """What all lanes of an engine share: the model of the round, and where each parameter lies in a lane's buffers.

    A parameter starts at a multiple of 64 numbers, and convolutions' weights lie channels-last, as the GPU wants them,
    unless the module can't have it so.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        dataset: Dataset,
        settings: LocalTraining,
        precision: Precision,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        if layout.dtype != torch.float32:
            raise CannotCapture(f"its parameters are {layout.dtype}, not float32")
        self.module, self.layout, self.dataset, self.settings = module, layout, dataset, settings
        self.precision, self.device, self.channels_last = precision, device, channels_last
        trained = [piece for piece in layout.pieces if piece.start < layout.parameters]
        self.trained = trained
        starts = np.cumsum([0, *(-(-(piece.stop - piece.start) // 64) * 64 for piece in trained)])
        self.starts, self.size = starts[:-1].tolist(), int(starts[-1])
        self.rest = layout.pieces[len(trained) :]
        self.model = torch.zeros(layout.size, device=device)
        self.received = torch.zeros(self.size, device=device)
        self.rate = torch.zeros(1, device=device)
        self.descend = _best_sgd()
        self.mixes_examples = self._look_at_module()

    def begin(self, model: Tensor, rate: float) -> None:
        """A round begins: `model` [size] is what clients receive."""
        self.model.copy_(model)
        self.rate.fill_(rate)
        torch._foreach_copy_(self.views(self.received), self.pieces(self.model))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters in a lane's buffer [self.size], each in its own shape."""
        return [
            _shaped(buffer[start:], piece.shape, self.channels_last)
            for start, piece in zip(self.starts, self.trained, strict=True)
        ]

    def storages(self, buffer: Tensor) -> list[Tensor]:
        """The same as flat stretches of the buffer."""
        return [
            buffer[start : start + piece.stop - piece.start]
            for start, piece in zip(self.starts, self.trained, strict=True)
        ]

    def pieces(self, model: Tensor) -> list[Tensor]:
        """The parameters in a flat model [layout.size], each in its own shape."""
        return [model[piece.start : piece.stop].view(piece.shape) for piece in self.trained]

    def _look_at_module(self) -> bool:
        """Whether an example's output depends on the others in its batch, as with batch norm."""
        module = copy.deepcopy(self.module).train()
        random = torch.Generator(self.device).manual_seed(0)
        batch = torch.randn(8, *self.dataset.input_shape, device=self.device, generator=random)
        other = torch.cat([batch[:4], 3 * batch[4:] + 1])
        with torch.random.fork_rng(devices=[self.device]), torch.no_grad():
            before = torch.cuda.get_rng_state(self.device)
            try:
                first, second = module(batch)[:4], module(other)[:4]
            except Exception as error:
                raise CannotCapture(one_line(error)) from error
            if not torch.equal(before, torch.cuda.get_rng_state(self.device)):
                raise CannotCapture("it draws random numbers")
        return not torch.allclose(first, second, rtol=1e-2, atol=1e-2 * float(first.abs().max()))


class Lane:
    """One captured step with all it touches. Its methods are called inside `torch.cuda.stream(lane.stream)`."""

    def __init__(self, common: Common) -> None:
        self.common = common
        stream = borrow(common.device)
        if stream is None:
            raise CannotCapture("other runs have all the GPU's streams")
        self.stream = stream
        finalize(self, give_back, common.device, stream)
        settings, device = common.settings, common.device
        self.weights = torch.zeros(common.size, device=device)
        self.velocity = torch.zeros(common.size if settings.momentum else 0, device=device)
        self.rounded = torch.zeros(
            common.size if common.precision == "bf16" else 0, device=device, dtype=torch.bfloat16
        )
        self.module = copy.deepcopy(common.module).to(device).train()
        self._bind()
        _fuse(self.module)

        shape = common.dataset.input_shape
        self._image = len(shape) == 3
        stored = (shape[1], shape[2], shape[0]) if self._image else shape
        kind = torch.bfloat16 if common.precision == "bf16" else torch.float32
        step_bytes = settings.batch_size * int(np.prod(shape)) * kind.itemsize
        self.feed_steps = max(1, FEED_BYTES // step_bytes)
        batch = (self.feed_steps, settings.batch_size)
        self._inputs = torch.zeros(*batch, *stored, device=device, dtype=kind)
        self._labels = torch.zeros(*batch, device=device, dtype=torch.int64)
        self._shares = torch.zeros(*batch, device=device)
        self._losses = torch.zeros(self.feed_steps, device=device)
        self._counts = torch.zeros(self.feed_steps, device=device, dtype=torch.float64)
        self._cursor = torch.zeros(1, device=device, dtype=torch.int64)
        self._graph = self._capture()

    def begin(self) -> None:
        """Start from the round's model."""
        self.weights.copy_(self.common.received)
        self.velocity.zero_()
        if self.common.precision == "bf16":
            self.rounded.copy_(self.weights)
        with torch.no_grad():
            for piece, tensor in zip(self.common.rest, self._rest, strict=True):
                tensor.copy_(self.common.model[piece.start : piece.stop].view(piece.shape))

    def feed(self, inputs: Tensor, labels: Tensor, counts: NDArray[np.int64]) -> None:
        """Take inputs [steps · batch, ...] and labels [steps · batch], of each step `counts` [steps] real."""
        steps = len(counts)
        stored = inputs.permute(0, 2, 3, 1) if self._image else inputs
        self._inputs[:steps].copy_(stored.view(steps, -1, *stored.shape[1:]))
        self._labels[:steps].copy_(labels.view(steps, -1))
        real = _to(counts, self.common.device)
        self._counts[:steps].copy_(real)
        place = torch.arange(self._shares.shape[1], device=self.common.device)
        self._shares[:steps].copy_((place < real[:, None]) / real[:, None])
        self._losses.zero_()
        self._cursor.zero_()

    def step(self, count: int) -> None:
        """One step on the next batch, of which `count` examples are real."""
        if self.common.mixes_examples and count < self._shares.shape[1]:
            with arithmetic(self.common.precision, self.common.device):
                self._step(count, _plain_sgd)
        else:
            self._graph.replay()

    def loss(self) -> Tensor:
        """The sum of the losses of all real examples since `feed`, []."""
        return self._losses.double() @ self._counts

    def read(self, model: Tensor) -> None:
        """Write the trained state into `model` [layout.size]."""
        torch._foreach_copy_(self.common.pieces(model), self.common.views(self.weights))
        for piece, tensor in zip(self.common.rest, self._rest, strict=True):
            model[piece.start : piece.stop].view(piece.shape).copy_(tensor.detach())

    def _bind(self) -> None:
        """Make the module's parameters views of the lane's buffers: rounded ones for what runs in bf16."""
        named = dict(self.module.named_parameters())
        exact = rounded = self.common.views(self.weights)
        in_bf16 = set()
        if self.common.precision == "bf16":
            rounded = self.common.views(self.rounded)
            in_bf16 = {
                id(parameter)
                for module in self.module.modules()
                if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
                for parameter in module.parameters(recurse=False)
            }
        self._parameters = [named[piece.name] for piece in self.common.trained]
        self._is_rounded = [id(parameter) in in_bf16 for parameter in self._parameters]
        for place, parameter in enumerate(self._parameters):
            parameter.data = rounded[place] if self._is_rounded[place] else exact[place]
        tensors = named | dict(self.module.named_buffers())
        self._rest = [tensors[piece.name] for piece in self.common.rest]

    def _step(self, count: int, descend: Callable[..., None]) -> None:
        inputs = self._inputs.index_select(0, self._cursor)[0, :count]
        labels = self._labels.index_select(0, self._cursor)[0, :count]
        shares = self._shares.index_select(0, self._cursor)[0, :count]
        if self._image:
            inputs = inputs.permute(0, 3, 1, 2)
        logits = self.module(inputs if self.common.channels_last else inputs.contiguous())
        loss = (cross_entropy(logits.float(), labels, reduction="none") * shares).sum()
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            self._descend(gradients, descend)
            self._losses.index_copy_(0, self._cursor, loss.detach()[None])
            self._cursor += 1

    def _descend(self, gradients: Sequence[Tensor | None], descend: Callable[..., None]) -> None:
        settings, common = self.common.settings, self.common
        mu = settings.objective.mu if isinstance(settings.objective, Proximal) else 0.0
        views = common.views(self.weights)
        storages = [common.storages(buffer) for buffer in (self.weights, common.received, self.rounded)]
        velocities = common.storages(self.velocity) if settings.momentum else storages[0]
        for place, (weights, received, rounded, velocity) in enumerate(zip(*storages, velocities, strict=True)):
            gradient = gradients[place]
            if gradient is None:
                gradient = torch.zeros_like(views[place])
            elif gradient.stride() != views[place].stride():
                gradient = torch.empty_like(views[place], dtype=gradient.dtype).copy_(gradient)
            flat = gradient.as_strided((gradient.numel(),), (1,))
            half = rounded if self._is_rounded[place] else None
            descend(
                flat,
                weights,
                velocity,
                half,
                received,
                common.rate,
                settings.momentum,
                settings.weight_decay,
                mu,
            )

    def _capture(self) -> torch.cuda.CUDAGraph:
        batch = self._shares.shape[1]
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.common.device))
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(3):  # libraries choose and load their kernels now, not while capturing
                    self._cursor.zero_()
                    self._step(batch, self.common.descend)
                self._cursor.zero_()
                self.stream.synchronize()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._step(batch, self.common.descend)
                finally:
                    graph.capture_end()
        except Exception as error:
            cause = error.__context__ or error
            raise CannotCapture(one_line(cause if isinstance(cause, Exception) else error)) from error
        return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside, nothing is freed by chance: letting go of another run's graph or event would break a capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def _shaped(stretch: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The beginning of a flat stretch as a parameter of `shape`, where it has four dimensions perhaps channels-last."""
    flat = stretch[: int(np.prod(shape))]
    if len(shape) != 4 or not channels_last:
        return flat.view(shape)
    out, channels, height, width = shape
    return flat.view(out, height, width, channels).permute(0, 3, 1, 2)


def _plain_sgd(
    gradient: Tensor,
    weights: Tensor,
    velocity: Tensor,
    rounded: Tensor | None,
    received: Tensor,
    rate: Tensor,
    momentum: float,
    decay: float,
    mu: float,
) -> None:
    """What `fused_sgd` does, in PyTorch's own operations."""
    gradient = gradient.float()
    if mu:
        gradient = gradient.add(weights, alpha=mu).add_(received, alpha=-mu)
    gradient = gradient.add(weights, alpha=decay)
    if momentum:
        gradient = velocity.mul_(momentum).add_(gradient)
    weights.addcmul_(gradient, rate, value=-1)
    if rounded is not None:
        rounded.copy_(weights)


def _to(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on the GPU that the host doesn't wait for."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _best_sgd() -> Callable[..., None]:
    try:
        from fedsieve.engines.fused_sgd import fused_sgd
    except ImportError:  # no Triton here
        return _plain_sgd
    return fused_sgd


def _fuse(module: nn.Module) -> None:
    """Fewer passes over what convolutions put out, where Triton is there."""
    try:
        from fedsieve.engines.fused_layers import fuse
    except ImportError:
        return
    fuse(module)
