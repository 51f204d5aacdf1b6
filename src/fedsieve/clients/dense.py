"""Loss and gradient of a small dense network without autograd, whose bookkeeping takes longer than its arithmetic.

The operations are those that autograd would call, on the same operands, so the numbers are the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

_nll_loss = torch.ops.aten.nll_loss_forward.default
_nll_loss_backward = torch.ops.aten.nll_loss_backward.default
_log_softmax_backward = torch.ops.aten._log_softmax_backward_data.out
_relu_backward = torch.ops.aten.threshold_backward.grad_input
_MEAN, _IGNORED_LABEL = 1, -100  # as `cross_entropy` passes them
_ALIGNMENT = 64  # bytes, of new tensors on a CPU
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Layer:
    """A linear layer, perhaps followed by a ReLU: weights [out, in] and bias [out], and where their gradients go.

    `product` [out, in] is where the weights' gradient is computed.
    """

    weight: Tensor
    transposed: Tensor
    bias: Tensor | None
    weight_gradient: Tensor
    product: Tensor
    bias_gradient: Tensor | None
    rectified: bool


class DenseNetwork:
    """The layers of a module that is nothing but linear layers and ReLUs."""

    def __init__(self, layers: list[Layer], flattens: bool) -> None:
        self._layers = layers
        self._flattens = flattens
        self._scratches: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._one = torch.ones((), dtype=layers[0].weight.dtype)

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
        scratch = self._scratch(len(rows))
        seen = [rows, *(values for values, _, _ in scratch)]
        for layer, rows, (output, _, _) in zip(self._layers, seen, scratch, strict=False):
            if layer.bias is None:
                torch.mm(rows, layer.transposed, out=output)
            else:
                torch.addmm(layer.bias, rows, layer.transposed, out=output)
            if layer.rectified:
                torch.relu_(output)
        output, slope, _ = scratch[-1]
        log_probabilities = torch.log_softmax(output, 1)
        loss: Tensor
        loss, weight = _nll_loss(log_probabilities, labels, None, _MEAN, _IGNORED_LABEL)
        by_label = _nll_loss_backward(self._one, log_probabilities, labels, None, _MEAN, _IGNORED_LABEL, weight)
        _log_softmax_backward(by_label, log_probabilities, 1, output.dtype, out=slope)
        for place in range(len(self._layers) - 1, -1, -1):
            layer = self._layers[place]
            output, slope, transposed_slope = scratch[place]
            if layer.rectified:
                _relu_backward(slope, output, 0, grad_input=slope)
            torch.mm(transposed_slope, seen[place], out=layer.product)
            if layer.product is not layer.weight_gradient:
                layer.weight_gradient.copy_(layer.product)
            if layer.bias_gradient is not None:
                torch.sum(slope, 0, out=layer.bias_gradient)
            if place:
                torch.mm(slope, layer.weight, out=scratch[place - 1][1])
        return loss

    def _scratch(self, batch: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each layer its outputs [batch, out], the loss's slope in them [batch, out], and that transposed."""
        if batch not in self._scratches:
            widths = [layer.weight.new_empty(batch, len(layer.weight)) for layer in self._layers]
            slopes = [torch.empty_like(outputs) for outputs in widths]
            self._scratches[batch] = [(output, slope, slope.t()) for output, slope in zip(widths, slopes, strict=True)]
        return self._scratches[batch]


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
        transposed=weight.detach().t(),
        bias=None if bias is None else bias.detach(),
        weight_gradient=weight.grad,
        product=weight.grad if aligned else torch.empty_like(weight.grad),
        bias_gradient=None if bias is None else bias.grad,
        rectified=False,
    )
