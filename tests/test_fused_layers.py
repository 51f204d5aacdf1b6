"""Layers and SGD as Triton kernels: what PyTorch's own give. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

pytest.importorskip("triton")

from fedsieve.engines.fused_first_layer import can_be_first, first_layer
from fedsieve.engines.fused_layers import ConvolutionReLU, fuse
from fedsieve.engines.fused_sgd import fused_sgd
from fedsieve.engines.lane import _plain_sgd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KIND = torch.bfloat16 if torch.cuda.is_available() else torch.float32
"""What the first layer is for is bf16, which the interpreter can't multiply."""


@pytest.fixture(autouse=True)
def in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def convolution(inner: int, outer: int, kernel: tuple[int, int], padding: tuple[int, int] | str) -> nn.Conv2d:
    torch.manual_seed(inner + 7 * outer)
    layer = nn.Conv2d(inner, outer, kernel, padding=padding).to(DEVICE)
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def pictures(count: int, channels: int, height: int, width: int) -> Tensor:
    random = torch.Generator().manual_seed(count)
    drawn = torch.randn(count, channels, height, width, generator=random).to(DEVICE)
    return torch.empty_like(drawn, memory_format=torch.channels_last).copy_(drawn)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    """But for rounding: relative to the largest number."""
    error = 0.005 if ours.dtype == torch.bfloat16 else 1e-5
    assert float((ours - exact).detach().abs().max()) <= error * max(1.0, float(exact.detach().abs().max()))


def assert_first_layer(layer: nn.Conv2d, inputs: Tensor) -> None:
    """The kernels give what double precision does, where hardly ever two pixels are equally large."""
    layer, inputs = layer.to(KIND), inputs.to(KIND)
    exact = copy.deepcopy(layer).double()
    ours, expected = first_layer(layer, inputs), max_pool2d(relu(exact(inputs.double())), 2)
    assert_close(ours, expected)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    slope = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours)
    found = torch.autograd.grad(ours, list(layer.parameters()), slope)
    for one, other in zip(found, torch.autograd.grad(expected, list(exact.parameters()), slope.double()), strict=True):
        assert_close(one, other)
    assert found[0].stride() == layer.weight.stride()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=12)
@given(
    count=st.integers(1, 6),
    inner=st.integers(1, 4),
    outer=st.sampled_from([1, 3, 16, 20, 64]),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)) | st.sampled_from(["same", "valid"]),
    half=st.tuples(st.integers(3, 5), st.integers(3, 5)),
)
def test_a_first_layer_is_convolution_relu_and_pooling(
    count: int,
    inner: int,
    outer: int,
    kernel: tuple[int, int],
    padding: tuple[int, int] | str,
    half: tuple[int, int],
) -> None:
    layer = convolution(inner, outer, kernel, padding)
    inputs = pictures(count, inner, 2 * half[0] + (kernel[0] + 1) % 2, 2 * half[1] + (kernel[1] + 1) % 2)
    _, _, tall, wide = layer(inputs).shape
    uneven = padding == "same" and (kernel[0] % 2 == 0 or kernel[1] % 2 == 0)
    can = can_be_first(copy.deepcopy(layer).bfloat16(), inputs.bfloat16())
    assert can == (tall % 2 == wide % 2 == 0 and not uneven)
    if can:
        assert_first_layer(layer, inputs)


def test_more_pixels_than_programs_take_at_once() -> None:
    inputs = pictures(9, 3, 64, 64)  # 9,216 pooled pixels; 128 programs take 8,192
    assert_first_layer(convolution(3, 4, (3, 3), (1, 1)), inputs)


def sum_of_two() -> nn.Conv2d:
    """A layer that adds two channels."""
    layer = convolution(2, 1, (1, 1), (0, 0)).to(KIND)
    assert layer.bias is not None
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.zero_()
    return layer


def test_of_equals_the_first_is_chosen() -> None:
    layer = sum_of_two()
    # All four pixels add up to 2, each in another way; what a weight learns says which was chosen.
    inputs = torch.tensor([[[[2.0, 1], [0, -1]], [[0, 1], [2, 3]]]], device=DEVICE, dtype=KIND)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    outputs = first_layer(layer, inputs)
    (found,) = torch.autograd.grad(outputs.sum(), [layer.weight])
    (plain,) = torch.autograd.grad(max_pool2d(relu(layer(inputs)), 2).sum(), [layer.weight])
    assert outputs.flatten().tolist() == [2] and found.flatten().tolist() == plain.flatten().tolist() == [2, 0]


def test_nan_is_passed_on() -> None:
    layer = sum_of_two()
    inputs = pictures(1, 2, 4, 4).to(KIND)
    inputs[0, 1, 2, 3] = float("nan")
    found = first_layer(layer, inputs)
    torch.testing.assert_close(found, max_pool2d(relu(layer(inputs)), 2), equal_nan=True)
    assert found.isnan().flatten().tolist() == [False, False, False, True]


def test_what_is_no_first_layer_goes_elsewhere() -> None:
    layer, inputs = convolution(3, 8, (3, 3), (1, 1)).bfloat16(), pictures(2, 3, 8, 8).bfloat16()
    assert can_be_first(layer, inputs)
    assert not can_be_first(layer, inputs.clone().requires_grad_())  # somebody needs their gradient
    assert not can_be_first(layer, inputs.contiguous())
    assert not can_be_first(layer, inputs.float())
    assert not can_be_first(copy.deepcopy(layer).float(), inputs.float())
    others = [
        nn.Conv2d(3, 129, 3, padding=1),
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.Conv2d(3, 8, 3, padding=2, dilation=2),
        nn.Conv2d(3, 9, 3, padding=1, groups=3),
        nn.Conv2d(3, 8, 9, padding=4),  # 243 taps
    ]
    assert not any(can_be_first(other.to(DEVICE, torch.bfloat16), inputs) for other in others)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_later_layer_passes_gradients_to_its_inputs(pooled: bool) -> None:
    layer = convolution(5, 6, (3, 3), (1, 1))
    inputs = pictures(3, 5, 8, 6).requires_grad_()
    plain = relu(layer(inputs))
    plain = max_pool2d(plain, 2) if pooled else plain
    ours = ConvolutionReLU(layer, pooled)(inputs)
    assert_close(ours, plain)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    slope, wanted = torch.randn_like(plain), [*layer.parameters(), inputs]
    found = torch.autograd.grad(ours, wanted, slope)
    for one, other in zip(found, torch.autograd.grad(plain, wanted, slope), strict=True):
        assert_close(one, other)
    assert found[0].stride() == layer.weight.stride()


def test_a_fused_network_is_the_network_it_was() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten()
    ).to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = pictures(2, 3, 12, 12)
    expected, parameters = network(inputs), list(network.parameters())
    slopes = torch.autograd.grad(expected.sum(), parameters)
    fuse(network)
    assert [type(layer) for layer in network] == [ConvolutionReLU, ConvolutionReLU, nn.Flatten]
    found = network(inputs)
    assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found.sum(), parameters), slopes, strict=True):
        assert_close(one, other)


@settings(max_examples=10)
@given(
    size=st.integers(1, 5000),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    mu=st.sampled_from([0.0, 0.1]),
)
def test_a_step_of_sgd(size: int, momentum: float, decay: float, mu: float) -> None:
    random = torch.Generator().manual_seed(size)
    gradient, weights, velocity, received = torch.randn(4, size, generator=random).to(DEVICE)
    rate = torch.tensor([0.1], device=DEVICE)
    ours, plain = [(weights.clone(), velocity.clone()) for _ in range(2)]
    fused_sgd(gradient, *ours, None, received, rate, momentum, decay, mu)
    _plain_sgd(gradient, *plain, None, received, rate, momentum, decay, mu)
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], plain[1] if momentum else velocity, rtol=1e-5, atol=1e-6)
