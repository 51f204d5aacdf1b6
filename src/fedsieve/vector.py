"""A model is one flat vector, plus a layout that says which piece is what.

Parameters that are trained come first, then frozen ones and buffers (batch norm's running statistics among them), each
in the module's own order. So averaging, distances and checkpoints are arithmetic on vectors, and an optimiser's step is
a few operations on one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsieve.errors import InvalidSetting


@dataclass(frozen=True)
class Piece:
    """One tensor of a module: its name and shape, and where it lies in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The pieces of a module's vector: what is trained fills [0, parameters), all else the rest up to `size`.

    Buffers that are `passing`, in no state dictionary, are put back as they were at first whenever a module is written
    to: nothing of one client may reach the next.
    """

    pieces: tuple[Piece, ...]
    parameters: int
    size: int
    dtype: torch.dtype
    passing: tuple[tuple[str, Tensor], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's parameters and persistent buffers."""
        if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
            allowed = "a module that knows the shapes of its parameters: call it once before"
            raise InvalidSetting("model", type(module).__name__, allowed)
        parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        if not parameters:
            raise InvalidSetting("model", type(module).__name__, "a module with at least one parameter")
        types = {str(tensor.dtype) for tensor in parameters.values()}
        if len(types) > 1:
            raise InvalidSetting("model", ", ".join(sorted(types)), "a module whose parameters are all of one type")
        dtype = next(iter(parameters.values())).dtype
        for name, tensor in _buffers(module).items():
            held = tensor.to(dtype).to(tensor.dtype)
            if not tensor.is_floating_point() and not torch.equal(held, tensor):
                allowed = f"a module whose buffers can be held as {dtype}: {name} is {tensor.dtype}, and loses digits"
                raise InvalidSetting("model", type(module).__name__, allowed)
        pieces, start = [], 0
        for name, tensor in (parameters | dict(module.named_parameters()) | _buffers(module)).items():
            pieces.append(Piece(name, tuple(tensor.shape), start, start + math.prod(tensor.shape)))
            start = pieces[-1].stop
        count = sum(parameter.numel() for parameter in parameters.values())
        kept = _buffers(module)
        passing = tuple((name, own.detach().clone()) for name, own in module.named_buffers() if name not in kept)
        return cls(tuple(pieces), count, start, dtype, passing)

    def read(self, module: nn.Module) -> Tensor:
        """A copy of the module's state as a vector [size]."""
        tensors = dict(module.named_parameters()) | _buffers(module)
        return torch.cat([tensors[piece.name].detach().reshape(-1).to(self.dtype) for piece in self.pieces])

    def write(self, vector: Tensor, module: nn.Module) -> None:
        """Give the module the state in `vector` [size]; whole-number buffers are rounded."""
        self._write(self.pieces, vector, module)

    def write_untrained(self, vector: Tensor, module: nn.Module) -> None:
        """Give the module the frozen parameters and buffers in `vector` [size], as `write` does."""
        self._write(self._untrained, vector, module)

    def read_untrained(self, module: nn.Module, vector: Tensor) -> None:
        """Copy the module's frozen parameters and buffers to their places in `vector` [size]."""
        for view, tensor in _side_by_side(self._untrained, vector, module):
            view.copy_(tensor.detach())

    def bind(self, vector: Tensor, gradient: Tensor, module: nn.Module) -> None:
        """Make the module's parameters views of `vector` [size], their gradients views of `gradient` [parameters].

        From then on a change of the vector is a change of the module. What is not trained stays the module's own.
        """
        tensors = dict(module.named_parameters())
        for piece in self.pieces:
            if piece.start >= self.parameters:
                break
            parameter = tensors[piece.name]
            parameter.data = vector[piece.start : piece.stop].view(piece.shape)
            parameter.grad = gradient[piece.start : piece.stop].view(piece.shape)

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """The pieces of `vector` [size] by name, as views: what `torch.func.functional_call` takes."""
        return {piece.name: vector[piece.start : piece.stop].view(piece.shape) for piece in self.pieces}

    @cached_property
    def _untrained(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.start >= self.parameters)

    def _write(self, pieces: tuple[Piece, ...], vector: Tensor, module: nn.Module) -> None:
        with torch.no_grad():
            for view, tensor in _side_by_side(pieces, vector, module):
                tensor.copy_(view if tensor.is_floating_point() else view.round())
            if self.passing:
                now = dict(module.named_buffers())
                for name, initial in self.passing:
                    if name in now and now[name].shape == initial.shape:
                        now[name].copy_(initial)


class Vectors:
    """Memory for many vectors, taken again once nobody holds the vector that was in it.

    A round's models are let go of before the next round's come. Asking the system for new memory each time takes as
    long as a small model's training.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[Any]] = []

    def copy(self, vector: Tensor) -> Tensor:
        """A copy of `vector` [size]; one on a CPU lies in memory of this object."""
        if vector.device.type != "cpu" or vector.dtype not in (torch.float32, torch.float64):
            return vector.clone()
        return self.empty(vector.numel(), vector.dtype).copy_(vector)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A vector [size] on a CPU with anything in it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0)
        if memory.nbytes != size * dtype.itemsize:
            memory = np.empty(size * dtype.itemsize, dtype=np.uint8)
        lent = memory.view()
        # A tensor and all its views hold `lent`; when the last one goes, so does `lent`.
        finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype)


def _side_by_side(pieces: tuple[Piece, ...], vector: Tensor, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of `vector` [size] and the module's tensor that it belongs to."""
    if not pieces:
        return
    tensors = dict(module.named_parameters()) | _buffers(module)
    for piece in pieces:
        yield vector[piece.start : piece.stop].view(piece.shape), tensors[piece.name]


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in module.named_buffers() if name in kept}
