"""Loss and gradient of a small dense network without autograd, whose bookkeeping takes longer than its arithmetic.

The operations are those that autograd would call, on the same operands, so the numbers are the same to the last bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

_ALIGNMENT = 64  # bytes, of new tensors on a CPU
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Layer:
    """A linear layer, perhaps followed by a ReLU: weights [out, in] and bias [out], and where their gradients go.

    `product` [out, in] is where the weights' gradient is computed.
    """

    weight: Tensor
    bias: Tensor | None
    weight_gradient: Tensor
    product: Tensor
    bias_gradient: Tensor | None
    rectified: bool


class DenseNetwork:
    """The layers of a module that is nothing but linear layers and ReLUs."""

    def __init__(self, layers: list[Layer], flattens: bool) -> None:
        self._flattens = flattens
        self._widths = [len(layer.weight) for layer in layers]
        self._one = torch.ones((), dtype=layers[0].weight.dtype)
        self._parts = (
            [layer.weight for layer in layers],
            [layer.bias for layer in layers],
            [layer.product for layer in layers],
            [None if layer.product is layer.weight_gradient else layer.weight_gradient for layer in layers],
            [layer.bias_gradient for layer in layers],
            [layer.rectified for layer in layers],
        )
        self._scratches: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._compiled = _compiled()

    @classmethod
    def of(cls, module: nn.Module) -> DenseNetwork | None:
        """The network that `module` is, or None if it is something else.

        It shares the parameters' memory and writes gradients where the parameters' `grad` lie now.
        """
        if type(module) is not nn.Sequential or not all(_is_plain(layer) for layer in module.modules()):
            return None
        layers: list[Layer] = []
        for layer in module:
            if type(layer) is nn.Linear:
                layers.append(_shared_memory(layer))
            elif type(layer) is nn.ReLU and layers and not layers[-1].rectified:
                layers[-1] = replace(layers[-1], rectified=True)
            elif type(layer) is not nn.Flatten or (layer.start_dim, layer.end_dim) != (1, -1):
                return None
        used = sum(1 if layer.bias is None else 2 for layer in layers)
        if not layers or used != len(list(module.parameters())):  # fewer when layers share them
            return None
        if any(layer.weight.shape[1] == 1 for layer in layers[1:]):  # where autograd multiplies in another order
            return None
        return cls(layers, type(module[0]) is nn.Flatten)

    def takes(self, inputs: Tensor) -> bool:
        """Whether `inputs` [batch, ...] are rows of numbers to the first layer."""
        return inputs.device.type == "cpu" and (self._flattens or inputs.ndim == 2)

    def backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy [] of `inputs` [batch, ...] with `labels` [batch]; gradients are written, not added.

        Called without gradients being recorded.
        """
        rows = inputs if inputs.ndim == 2 else inputs.flatten(1)
        arguments = (rows, labels, *self._parts, *self._scratch(len(rows)), self._one)
        try:
            return self._compiled(*arguments)
        except RuntimeError:
            return _backward(*arguments)  # which says what is wrong in a line

    def _scratch(self, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """For each layer its outputs [batch, out], and the loss's slope in them [batch, out]."""
        if batch not in self._scratches:
            outputs = [self._one.new_empty(batch, width) for width in self._widths]
            self._scratches[batch] = outputs, [torch.empty_like(output) for output in outputs]
        return self._scratches[batch]


def _backward(
    rows: Tensor,
    labels: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    products: list[Tensor],
    weight_gradients: list[Tensor | None],
    bias_gradients: list[Tensor | None],
    rectified: list[bool],
    outputs: list[Tensor],
    slopes: list[Tensor],
    one: Tensor,
) -> Tensor:
    seen = rows
    for place, weight in enumerate(weights):
        bias = biases[place]
        if bias is None:
            torch.mm(seen, weight.t(), out=outputs[place])
        else:
            torch.addmm(bias, seen, weight.t(), out=outputs[place])
        if rectified[place]:
            torch.relu_(outputs[place])
        seen = outputs[place]
    # What `cross_entropy` calls: the mean (1), and the label that would not count (-100).
    log_probabilities = torch.log_softmax(seen, 1)
    loss, total = torch.ops.aten.nll_loss_forward(log_probabilities, labels, None, 1, -100)
    by_label = torch.ops.aten.nll_loss_backward(one, log_probabilities, labels, None, 1, -100, total)
    torch.ops.aten._log_softmax_backward_data(by_label, log_probabilities, 1, one.dtype, out=slopes[-1])
    for back in range(len(weights)):
        place = len(weights) - 1 - back
        slope = slopes[place]
        if rectified[place]:
            torch.ops.aten.threshold_backward(slope, outputs[place], 0, grad_input=slope)
        below = rows if place == 0 else outputs[place - 1]
        torch.mm(slope.t(), below, out=products[place])
        weight_gradient = weight_gradients[place]
        if weight_gradient is not None:
            weight_gradient.copy_(products[place])
        bias_gradient = bias_gradients[place]
        if bias_gradient is not None:
            torch.sum(slope, [0], out=bias_gradient)
        if place > 0:
            torch.mm(slope, weights[place], out=slopes[place - 1])
    result: Tensor = loss
    return result


@cache
def _compiled() -> Callable[..., Tensor]:
    """`_backward` without Python: two threads that call a dozen small operations each wait for each other's lock.

    PyTorch would rather have `torch.compile` used, which needs a C++ compiler and half a minute.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            compiled: Callable[..., Tensor] = torch.jit.script(_backward)
        except Exception:  # a PyTorch without it
            return _backward
    return compiled


def _is_plain(module: nn.Module) -> bool:
    """Whether calling `module` does what its type says, and trains all that it has."""
    own_call = "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS)
    return not own_call and all(
        type(parameter) is nn.Parameter and parameter.grad is not None and not parameter._backward_hooks
        for parameter in module.parameters(recurse=False)
    )


def _shared_memory(linear: nn.Linear) -> Layer:
    weight, bias = linear.weight, linear.bias
    assert weight.grad is not None
    # A product's last bits depend on how it is aligned in memory; autograd's own tensors all are.
    aligned = weight.grad.data_ptr() % _ALIGNMENT == 0
    return Layer(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        weight_gradient=weight.grad,
        product=weight.grad if aligned else torch.empty_like(weight.grad),
        bias_gradient=None if bias is None else bias.grad,
        rectified=False,
    )
