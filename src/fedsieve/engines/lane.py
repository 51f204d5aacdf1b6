"""One lane of a GPU: a client's step captured as a CUDA graph, with all that the step touches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from fedsieve.clients import LocalTraining, Proximal
from fedsieve.data import Dataset
from fedsieve.engines.capture import CannotCapture, record
from fedsieve.engines.fusing import fuse_where_possible
from fedsieve.engines.precision import Precision, arithmetic
from fedsieve.engines.sequential import one_line
from fedsieve.engines.streams import borrow, give_back
from fedsieve.randomness import torch_draws
from fedsieve.vector import Layout

FEED_BYTES = 16 * 2**20  # of training inputs prepared ahead for each lane
MOST_GRAPHS = 64  # of a lane: as many sizes of a client's last batch


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
        self.descend, self.slope = _best_sgd(), _best_loss()
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

    def pieces(self, model: Tensor) -> list[Tensor]:
        """The parameters in a flat model [layout.size], each in its own shape."""
        return [model[piece.start : piece.stop].view(piece.shape) for piece in self.trained]

    def _look_at_module(self) -> bool:
        """Whether an example's output depends on the others in its batch, as with batch norm."""
        module = copy.deepcopy(self.module).train()
        random = torch.Generator(self.device).manual_seed(0)
        batch = torch.randn(8, *self.dataset.input_shape, device=self.device, generator=random)
        other = torch.cat([batch[:4], 3 * batch[4:] + 1])
        with torch_draws(0, "a look at the module", device=self.device), torch.no_grad():
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
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        finalize(self, give_back, common.device, stream, self._graphs)
        settings, device = common.settings, common.device
        self.weights = torch.zeros(common.size, device=device)
        self.velocity = torch.zeros(common.size if settings.momentum else 0, device=device)
        self.rounded = torch.zeros(
            common.size if common.precision == "bf16" else 0, device=device, dtype=torch.bfloat16
        )
        self.module = copy.deepcopy(common.module).to(device).train()
        self._bind()
        fuse_where_possible(self.module)

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
        self._batch = settings.batch_size
        self._made: set[int] = set()
        self._graphs[self._batch] = self._capture()

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
        real = to_gpu(counts, self.common.device)
        self._counts[:steps].copy_(real)
        place = torch.arange(self._shares.shape[1], device=self.common.device)
        self._shares[:steps].copy_((place < real[:, None]) / real[:, None])
        self._losses.zero_()
        self._cursor.zero_()

    def step(self, count: int) -> None:
        """One step on the next batch, of which `count` examples are real.

        Where examples mix, a smaller batch is another step: made as it is the first time, captured the second.
        """
        size = count if self.common.mixes_examples else self._batch
        if size not in self._graphs:
            with arithmetic(self.common.precision, self.common.device):
                if size not in self._made or len(self._graphs) == MOST_GRAPHS:
                    self._made.add(size)
                    self._step(size)
                    return
                try:
                    self._graphs[size] = self._record(size)
                except Exception:
                    self._graphs.clear()  # PyTorch cleared the workspaces of all on this stream
                    raise
        self._graphs[size].replay()

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

    def _step(self, count: int) -> None:
        inputs = self._inputs.index_select(0, self._cursor)[0, :count]
        if self._image:
            inputs = inputs.permute(0, 3, 1, 2)
        logits = self.module(inputs if self.common.channels_last else inputs.contiguous())
        slope = self.common.slope(logits.detach(), self._labels, self._shares, self._losses, self._cursor)
        gradients = torch.autograd.grad(logits, self._parameters, slope, allow_unused=True)
        with torch.no_grad():
            self._descend(gradients)

    def _descend(self, gradients: Sequence[Tensor | None]) -> None:
        settings, common = self.common.settings, self.common
        mu = settings.objective.mu if isinstance(settings.objective, Proximal) else 0.0
        flat = [
            _as_stored(gradient, view) for gradient, view in zip(gradients, common.views(self.weights), strict=True)
        ]
        for rounded in (self.rounded, None):
            mine = [place for place, is_rounded in enumerate(self._is_rounded) if is_rounded == (rounded is not None)]
            common.descend(
                [flat[place] for place in mine],
                [common.starts[place] for place in mine],
                self.weights,
                self.velocity if settings.momentum else self.weights,
                rounded,
                common.received,
                common.rate,
                settings.momentum,
                settings.weight_decay,
                mu,
            )

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The step on a whole batch, of a client that nobody asked."""
        self.stream.wait_stream(torch.cuda.current_stream(self.common.device))
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(3):  # libraries choose and load their kernels now, not while capturing
                    self._cursor.zero_()
                    self._step(self._batch)
                self._cursor.zero_()
                return self._record(self._batch)
        except Exception as error:
            cause = error.__context__ or error
            raise CannotCapture(one_line(cause if isinstance(cause, Exception) else error)) from error

    def _record(self, size: int) -> torch.cuda.CUDAGraph:
        """The step on `size` examples, not made but written down; all of a lane's share the memory they work in."""
        return record(lambda: self._step(size), next(iter(self._graphs.values()), None))[0]


def _shaped(stretch: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The beginning of a flat stretch as a parameter of `shape`, where it has four dimensions perhaps channels-last."""
    flat = stretch[: int(np.prod(shape))]
    if len(shape) != 4 or not channels_last:
        return flat.view(shape)
    out, channels, height, width = shape
    return flat.view(out, height, width, channels).permute(0, 3, 1, 2)


def _as_stored(gradient: Tensor | None, view: Tensor) -> Tensor:
    """A parameter's gradient, flat, in the order in which the parameter's `view` lies in memory."""
    if gradient is None:
        gradient = torch.zeros_like(view)
    elif gradient.stride() != view.stride():
        gradient = torch.empty_like(view, dtype=gradient.dtype).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def plain_sgd(
    gradients: Sequence[Tensor],
    starts: Sequence[int],
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
    for gradient, start in zip(gradients, starts, strict=True):
        here = slice(start, start + len(gradient))
        slope = gradient.float()
        if mu:
            slope = slope.add(weights[here], alpha=mu).add_(received[here], alpha=-mu)
        slope = slope.add(weights[here], alpha=decay)
        if momentum:
            slope = velocity[here].mul_(momentum).add_(slope)
        weights[here].addcmul_(slope, rate, value=-1)
        if rounded is not None:
            rounded[here].copy_(weights[here])


def plain_loss(logits: Tensor, labels: Tensor, shares: Tensor, losses: Tensor, cursor: Tensor) -> Tensor:
    """What `fused_loss` does, in PyTorch's own operations."""
    count, classes = logits.shape
    labels = labels.index_select(0, cursor)[0, :count, None]
    shares = shares.index_select(0, cursor)[0, :count, None]
    likelihoods = log_softmax(logits.float(), 1)
    losses.index_copy_(0, cursor, -(shares * likelihoods.gather(1, labels)).sum()[None])
    cursor += 1
    right = labels == torch.arange(classes, device=logits.device)
    return (shares * (likelihoods.exp() - right.float())).to(logits.dtype)


def _best_sgd() -> Callable[..., None]:
    try:
        from fedsieve.engines.fused_sgd import fused_sgd
    except ImportError:  # no Triton here
        return plain_sgd
    return fused_sgd


def _best_loss() -> Callable[..., Tensor]:
    try:
        from fedsieve.engines.fused_loss import can_be_fused, fused_loss
    except ImportError:  # no Triton here
        return plain_loss

    def best(logits: Tensor, *others: Tensor) -> Tensor:
        return (fused_loss if can_be_fused(logits) else plain_loss)(logits, *others)

    return best


def to_gpu(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on the GPU that the host doesn't wait for."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
