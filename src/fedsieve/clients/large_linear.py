"""Large linear layers whose weights' gradient is added where it is kept.

Autograd puts every gradient into new memory and then adds it to `grad`. For a few million weights and a small batch,
the new memory alone takes a quarter of a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LARGE = 2**18
"""Weights from which the saving is worth a call of Python."""


def add_gradients_in_place(module: nn.Module) -> None:
    """Make the large linear layers of `module` do so, wherever its parameters have a `grad`."""
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= LARGE and layer.weight.grad is not None:
            layer.forward = partial(_forward, layer, layer.weight)  # type: ignore[method-assign, arg-type]


def _forward(layer: nn.Linear, weight: nn.Parameter, inputs: Tensor) -> Tensor:
    """`layer` on `inputs` [..., in]; as usual where its weight is replaced by another, or has no `grad`."""
    if layer.weight is not weight or weight.grad is None or not torch.is_grad_enabled():
        return linear(inputs, layer.weight, layer.bias)
    outputs: Tensor = _Linear.apply(inputs, weight, layer.bias)  # type: ignore[no-untyped-call]
    return outputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        slope = slopes[0].reshape(-1, len(weight))
        weight.grad.addmm_(slope.t(), inputs.reshape(-1, weight.shape[1]))
        back = (slope @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        return back, None, slope.sum(0) if ctx.has_bias else None
