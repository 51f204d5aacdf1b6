"""Layers and SGD as Triton kernels: what PyTorch's own give. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

pytest.importorskip("triton", "3.3")

from fedsieve.engines.fused_first_layer import MOST_TAPS, can_be_first, first_layer
from fedsieve.engines.fused_layers import ConvolutionReLU, fuse
from fedsieve.engines.fused_loss import can_be_fused, fused_loss
from fedsieve.engines.fused_sgd import AT_ONCE, BLOCK, fused_sgd
from fedsieve.engines.lane import plain_loss, plain_sgd

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
    small = inner * (kernel[0] + 1) * (kernel[1] + 1) < MOST_TAPS
    assert can == (tall % 2 == wide % 2 == 0 and small and not uneven)
    if can:
        assert_first_layer(layer, inputs)


def test_more_pixels_than_programs_take_at_once() -> None:
    inputs = pictures(9, 3, 64, 64)  # 9,216 pooled pixels; 128 programs take 8,192, forward and backward
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
        nn.Conv2d(3, 65, 3, padding=1),
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
    sizes=st.lists(st.sampled_from([1, 16, 63, BLOCK - 1, BLOCK, BLOCK + 1, 5000]), min_size=1, max_size=5),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    mu=st.sampled_from([0.0, 0.1]),
    rounds=st.booleans(),
)
def test_a_step_of_sgd(sizes: list[int], momentum: float, decay: float, mu: float, rounds: bool) -> None:
    check_sgd(sizes, momentum, decay, mu, rounds)


def test_a_step_of_sgd_on_more_parameters_than_a_kernel_takes() -> None:
    check_sgd([3] * (AT_ONCE + 2), 0.9, 0.01, 0.1, True)


def check_sgd(sizes: list[int], momentum: float, decay: float, mu: float, rounds: bool) -> None:
    """The kernel changes what PyTorch's own operations change, and nothing else in the buffers."""
    random = torch.Generator().manual_seed(sum(sizes))
    gradients = [torch.randn(size, generator=random).to(DEVICE) for size in sizes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64 + 64)  # others lie between them
    weights, velocity, received = torch.randn(3, starts[-1], generator=random).to(DEVICE)
    rate = torch.tensor([0.1], device=DEVICE)
    ours, plain = [
        (weights.clone(), velocity.clone(), weights.to(torch.bfloat16) if rounds else None) for _ in range(2)
    ]
    fused_sgd(gradients, starts[:-1], *ours, received, rate, momentum, decay, mu)
    plain_sgd(gradients, starts[:-1], *plain, received, rate, momentum, decay, mu)
    assert not torch.equal(ours[0], weights)
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-5, atol=1e-6)
    if rounds:
        torch.testing.assert_close(ours[2], plain[2], rtol=0.01, atol=1e-6)


@settings(max_examples=15)
@given(
    count=st.integers(1, 70),
    padded=st.integers(0, 9),
    classes=st.sampled_from([2, 3, 10, 16, 100]),
    step=st.integers(0, 2),
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_loss_and_its_slope(count: int, padded: int, classes: int, step: int, kind: torch.dtype) -> None:
    random = torch.Generator().manual_seed(count)
    logits = (5 * torch.randn(count, classes, generator=random)).to(DEVICE, kind)
    labels = torch.randint(classes, (3, count + padded), generator=random).to(DEVICE)
    shares = torch.rand(3, count + padded, generator=random).to(DEVICE)
    exact = logits.double().requires_grad_()
    loss = (cross_entropy(exact, labels[step, :count], reduction="none") * shares[step, :count]).sum()
    (expected,) = torch.autograd.grad(loss, [exact])
    assert can_be_fused(logits)
    for slope_of in (fused_loss, plain_loss):
        losses, cursor = torch.full((3,), 7.0, device=DEVICE), torch.tensor([step], device=DEVICE)
        slope = slope_of(logits, labels, shares, losses, cursor)
        assert slope.dtype == kind
        torch.testing.assert_close(slope.double(), expected, rtol=1e-4 if kind == torch.float32 else 0.01, atol=1e-5)
        assert losses[step].item() == pytest.approx(loss.item(), rel=1e-4)
        assert losses.tolist().count(7.0) == 2 and cursor.tolist() == [step + 1]


def test_many_logits_are_left_to_pytorch() -> None:
    assert not can_be_fused(torch.zeros(700, 100)) and not can_be_fused(torch.zeros(2, 5000))


def test_a_loss_that_is_no_number_is_passed_on() -> None:
    logits = torch.tensor([[0.0, float("nan")], [1.0, 2.0]], device=DEVICE)
    labels, shares = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), torch.full((1, 2), 0.5, device=DEVICE)
    losses, cursor = torch.zeros(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    slope = fused_loss(logits, labels, shares, losses, cursor)
    assert losses.isnan().all() and slope.isnan().all(1).tolist() == [True, False]
