"""Large linear layers that add their gradients in place learn as PyTorch's own do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsieve.clients import large_linear
from fedsieve.clients.large_linear import add_gradients_in_place

SIDE = 512  # 2^18 weights: large


class Twice(nn.Module):
    """Uses one layer twice in a forward pass, on inputs with a dimension more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)
        self.last = nn.Linear(SIDE, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.stack([inputs, 2 * inputs], dim=1)
        outputs: Tensor = self.last(self.layer(torch.relu(self.layer(rows))).mean(1))
        return outputs


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, 4)),
        nn.Sequential(nn.Linear(8, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE, bias=False)),
        Twice(),
    ]


@pytest.mark.parametrize("which", range(3))
def test_gradients_are_those_of_autograd(which: int) -> None:
    plain = modules()[which]
    module = copy.deepcopy(plain)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_gradients_in_place(module)
    copied = copy.deepcopy(module)  # as workers do
    for parameter in copied.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = torch.randn(10, 8 if which == 1 else SIDE)
    for one in (plain, module, copied):
        one(inputs).square().sum().backward()
    for name, parameter in plain.named_parameters():
        for other in (module, copied):
            ours = other.get_parameter(name).grad
            assert ours is not None and parameter.grad is not None
            assert torch.allclose(ours, parameter.grad, rtol=1e-4, atol=1e-4 * float(parameter.grad.abs().max()))


def test_gradients_add_up_and_stay_where_they_are() -> None:
    module = nn.Linear(SIDE, SIDE)
    kept = torch.ones(SIDE, SIDE)
    module.weight.grad = kept
    add_gradients_in_place(module)
    module(torch.ones(2, SIDE)).sum().backward()
    assert module.weight.grad is kept and torch.equal(kept, torch.full((SIDE, SIDE), 3.0))


def test_a_stand_in_for_the_weights_gets_its_own_gradient() -> None:
    module = nn.Linear(SIDE, SIDE, bias=False)
    module.weight.grad = torch.zeros(SIDE, SIDE)
    add_gradients_in_place(module)
    other = torch.zeros(SIDE, SIDE, requires_grad=True)
    functional_call(module, {"weight": other}, (torch.ones(2, SIDE),)).sum().backward()
    assert other.grad is not None and torch.equal(other.grad, torch.full((SIDE, SIDE), 2.0))
    assert not module.weight.grad.any()
    with torch.no_grad():
        assert not module(torch.zeros(1, SIDE)).requires_grad
    module.weight.grad = None
    module(torch.ones(2, SIDE)).sum().backward()
    usual = module.get_parameter("weight").grad
    assert usual is not None and torch.equal(usual, torch.full((SIDE, SIDE), 2.0))


def test_small_layers_and_those_of_other_types_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    for layer in (nn.Linear(4, 4), Own(SIDE, SIDE)):
        layer.weight.grad = torch.zeros_like(layer.weight)
        add_gradients_in_place(layer)
        assert "forward" not in vars(layer)
    assert large_linear.LARGE == SIDE * SIDE
