"""Dense networks without autograd: the same bits as with it, and only where it is the same thing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.clients import LocalTraining, Plain, Proximal, Trainer
from fedsieve.clients.dense import DenseNetwork
from fedsieve.threads import single_thread
from fedsieve.vector import Layout


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


class Renamed(nn.Sequential):
    """A type of its own, so that it is trained the ordinary way."""


def bound(module: nn.Module) -> nn.Module:
    layout = Layout.of(module)
    layout.bind(layout.read(module), torch.zeros(layout.parameters, dtype=layout.dtype), module)
    return module


def network(widths: list[int], biases: list[bool], rectified: list[bool], flattens: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()] if flattens else []
    for (inputs, outputs), bias, relu in zip(pairwise(widths), biases, rectified, strict=False):
        layers.append(nn.Linear(inputs, outputs, bias=bias))
        layers += [nn.ReLU()] if relu else []
    return nn.Sequential(*layers)


@settings(max_examples=60)
@given(
    widths=st.lists(st.integers(1, 70), min_size=2, max_size=5),
    biases=st.lists(st.booleans(), min_size=4, max_size=4),
    rectified=st.lists(st.booleans(), min_size=4, max_size=4),
    flattens=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    examples=st.integers(1, 40),
    batch_size=st.integers(1, 20),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    objective=st.sampled_from([Plain(), Proximal(0.1)]),
    seed=st.integers(0, 1000),
)
def test_the_bits_of_autograd(
    widths: list[int],
    biases: list[bool],
    rectified: list[bool],
    flattens: bool,
    dtype: torch.dtype,
    examples: int,
    batch_size: int,
    momentum: float,
    weight_decay: float,
    objective: Plain | Proximal,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    module = network(widths, biases, rectified, flattens).to(dtype)
    ordinary = Renamed(*copy.deepcopy(module))
    layout = Layout.of(module)
    training = LocalTraining(0.01, momentum, weight_decay, batch_size, epochs=2, objective=objective)
    sent = torch.randn(layout.size, generator=random, dtype=dtype) / 8
    inputs = torch.randn(examples, widths[0], generator=random, dtype=dtype)
    labels = torch.randint(widths[-1], (examples,), generator=random)
    assert (DenseNetwork.of(bound(module)) is None) == (1 in widths[1:-1]) and DenseNetwork.of(bound(ordinary)) is None
    model, loss = Trainer(module, layout, training).train(sent, inputs, labels, seed, 1, 2)
    expected, expected_loss = Trainer(ordinary, layout, training).train(sent, inputs, labels, seed, 1, 2)
    assert torch.equal(model, expected)
    assert loss == expected_loss


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))


def with_hook() -> nn.Module:
    module = two_layers()
    module[1].register_forward_hook(lambda _, __, outputs: outputs * 2)
    return module


def with_hook_on_a_gradient() -> nn.Module:
    module = two_layers()
    next(module.parameters()).register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return module


def with_shared_weights() -> nn.Module:
    module = two_layers()
    module[3].weight = module[1].weight
    return module


def with_the_same_layer_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)


def with_own_layer() -> nn.Module:
    class Doubling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    return nn.Sequential(nn.Flatten(), Doubling(6, 6))


def with_own_forward() -> nn.Module:
    module = two_layers()
    module[1].forward = torch.tanh
    return module


def with_frozen_bias() -> nn.Module:
    module = two_layers()
    module[1].bias.requires_grad_(False)
    return module


def with_other_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.parametrize(
    "build",
    [
        with_hook,
        with_hook_on_a_gradient,
        with_shared_weights,
        with_the_same_layer_twice,
        with_own_layer,
        with_own_forward,
        with_frozen_bias,
        with_other_layers,
    ],
)
def test_anything_else_goes_the_ordinary_way(build: Callable[[], nn.Module]) -> None:
    assert DenseNetwork.of(bound(build())) is None


def test_a_hook_is_called() -> None:
    module, called = two_layers(), []
    module[1].register_forward_hook(lambda *_: called.append(1))
    layout = Layout.of(module)
    trainer = Trainer(module, layout, LocalTraining(batch_size=4, epochs=1))
    trainer.train(layout.read(module), torch.randn(8, 6), torch.zeros(8, dtype=torch.int64), 0, 1, 2)
    assert len(called) == 2


def test_inputs_that_are_no_rows_go_the_ordinary_way() -> None:
    """A linear layer takes rows of rows as well; here each example [3, 6] is three predictions, and 6 classes."""
    module = nn.Sequential(nn.Linear(6, 6))
    layout = Layout.of(module)
    trainer = Trainer(module, layout, LocalTraining(batch_size=4, epochs=1))
    labels = torch.zeros(8, 6, dtype=torch.int64)
    _, loss = trainer.train(layout.read(module), torch.randn(8, 3, 6), labels, 0, 1, 2)
    assert loss > 0


def test_a_label_out_of_range_is_refused() -> None:
    module = two_layers()
    layout = Layout.of(module)
    trainer = Trainer(module, layout, LocalTraining())
    with pytest.raises(IndexError):
        trainer.train(layout.read(module), torch.randn(2, 6), torch.tensor([0, 6]), 0, 1, 2)
