"""A model is one flat vector, plus a layout that says which piece is what.

Parameters that are trained come first, then frozen ones and buffers (batch norm's running statistics among them), each
in the module's own order. So averaging, distances and checkpoints are arithmetic on vectors, and an optimiser's step is
a few operations on one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    """The pieces of a module's vector: what is trained fills [0, parameters), all else the rest up to `size`."""

    pieces: tuple[Piece, ...]
    parameters: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's parameters and persistent buffers."""
        parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        if not parameters:
            raise InvalidSetting("model", type(module).__name__, "a module with at least one parameter")
        types = {str(tensor.dtype) for tensor in parameters.values()}
        if len(types) > 1:
            raise InvalidSetting("model", ", ".join(sorted(types)), "a module whose parameters are all of one type")
        pieces, start = [], 0
        for name, tensor in (parameters | dict(module.named_parameters()) | _buffers(module)).items():
            pieces.append(Piece(name, tuple(tensor.shape), start, start + math.prod(tensor.shape)))
            start = pieces[-1].stop
        count = sum(parameter.numel() for parameter in parameters.values())
        return cls(tuple(pieces), count, start, next(iter(parameters.values())).dtype)

    def read(self, module: nn.Module) -> Tensor:
        """A copy of the module's state as a vector [size]."""
        tensors = dict(module.named_parameters()) | _buffers(module)
        return torch.cat([tensors[piece.name].detach().reshape(-1).to(self.dtype) for piece in self.pieces])

    def write(self, vector: Tensor, module: nn.Module) -> None:
        """Give the module the state in `vector` [size]; whole-number buffers are rounded."""
        tensors = dict(module.named_parameters()) | _buffers(module)
        with torch.no_grad():
            for piece in self.pieces:
                values, tensor = vector[piece.start : piece.stop].view(piece.shape), tensors[piece.name]
                tensor.copy_(values if tensor.is_floating_point() else values.round())

    def bind(self, vector: Tensor, gradient: Tensor, module: nn.Module) -> None:
        """Make the module's parameters views of `vector` [size], their gradients views of `gradient` [parameters].

        From then on a change of the vector is a change of the module. Buffers stay the module's own.
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


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in module.named_buffers() if name in kept}
