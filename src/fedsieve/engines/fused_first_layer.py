"""A network's first convolution with bias, ReLU and 2 × 2 max-pooling as one Triton kernel, and another for its slopes.

The first layer puts out the largest tensor of a step, from inputs of so few channels that libraries pad them or leave
the matrix units idle. Here what lies before the pooling is never written: the forward pass keeps which of each 2 × 2
was largest, and the backward pass, which owes nobody a gradient of the inputs, goes from there to the gradient of
weights and bias.

A convolution is a product of patches [pixels, taps] and weights [taps, channels], where a tap is a place under the
kernel and an input channel. The bias is one more tap, under which every patch has a 1. Going forward, the four pixels
of a 2 × 2 are read once, as one larger window, and each has the weights moved to where its own patch lies in it. (So
an infinite pixel makes all four NaN.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fedsieve.engines.program_sums import PROGRAMS, add_up

FORWARD, BACKWARD = 8192, 2048  # numbers that a program looks at together: pooled pixels × taps, so that registers last
MOST_TAPS, MOST_CHANNELS = 128, 64


def can_be_first(convolution: nn.Conv2d, inputs: Tensor) -> bool:
    """Whether the kernels here can do this layer; who needs the gradient of the inputs must go elsewhere."""
    weight, bias = convolution.weight, convolution.bias
    _, channels, height, width = inputs.shape
    tall, wide = convolution.kernel_size
    if convolution.padding == "same" and (tall % 2 == 0 or wide % 2 == 0):  # one side gets more than the other
        return False
    above, left = _padding(convolution)
    outputs = (height + 2 * above - tall + 1, width + 2 * left - wide + 1)
    return (
        not inputs.requires_grad
        and bias is not None
        and inputs.dtype == weight.dtype == bias.dtype
        and _in_bf16(inputs)
        and inputs.is_contiguous(memory_format=torch.channels_last)
        and inputs.numel() < 2**31
        and convolution.stride == convolution.dilation == (1, 1)
        and convolution.groups == 1
        and channels * (tall + 1) * (wide + 1) < MOST_TAPS
        and len(weight) <= MOST_CHANNELS
        and min(outputs) > 0
        and outputs[0] % 2 == outputs[1] % 2 == 0
        and len(inputs) * len(weight) * (outputs[0] // 2) * (outputs[1] // 2) < 2**31
        and (not inputs.is_cuda or torch.cuda.get_device_capability(inputs.device) >= (8, 0))  # has memory enough
    )


def first_layer(convolution: nn.Conv2d, inputs: Tensor) -> Tensor:
    """[n, channels, h, w] to [n, out, h', w'], halved by the pooling."""
    pooled: Tensor = _FirstLayer.apply(  # type: ignore[no-untyped-call]
        inputs, convolution.weight, convolution.bias, *_padding(convolution)
    )
    return pooled


def _in_bf16(inputs: Tensor) -> bool:
    """Whether a convolution of `inputs` is computed in bf16; in fp32 the kernels here need too many registers."""
    cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return inputs.dtype == torch.bfloat16 or (cast and inputs.dtype == torch.float32)


def _padding(convolution: nn.Conv2d) -> tuple[int, int]:
    """Zeros above and left of the inputs, as many as below and right."""
    if isinstance(convolution.padding, str):
        tall, wide = convolution.kernel_size
        return (tall // 2, wide // 2) if convolution.padding == "same" else (0, 0)
    above, left = convolution.padding
    return above, left


def _sizes(taps: int, channels: int, at_once: int, most_warps: int) -> dict[str, int]:
    """Of what a program works on together: rows, taps and the bias, channels; and by how many warps."""
    taps, channels = (triton.next_power_of_2(max(16, size)) for size in (taps + 1, channels))
    warps = most_warps if taps * channels <= 4096 else 8  # the fewer, the more of other clients runs beside them
    return {"ROWS": min(64, at_once // taps), "TAPS": taps, "CHANNELS": channels, "num_warps": warps, "num_stages": 1}


class _FirstLayer(torch.autograd.Function):
    """pool(relu(inputs * weight + bias)) of channels-last `inputs` and `weight`."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator] # under autocast, as convolutions do
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, above: int, left: int) -> Tensor:
        count, inner, height, width = inputs.shape
        outer, _, tall, wide = weight.shape
        weight = weight.contiguous(memory_format=torch.channels_last)
        down, across = (height + 2 * above - tall + 1) // 2, (width + 2 * left - wide + 1) // 2
        result = torch.empty(
            (count, outer, down, across),
            dtype=inputs.dtype,
            device=inputs.device,
            memory_format=torch.channels_last,
        )
        chosen = torch.empty(result.numel(), dtype=torch.uint8, device=inputs.device)
        rows = count * down * across
        ctx.geometry = (rows, down, across, height, width, above, left, inner, outer, tall, wide)
        sizes = _sizes(inner * (tall + 1) * (wide + 1), outer, FORWARD, 4)
        programs = min(PROGRAMS, triton.cdiv(rows, sizes["ROWS"]))
        _forward[(programs,)](inputs, weight, bias, result, chosen, programs, *ctx.geometry, **sizes)
        ctx.save_for_backward(inputs, chosen)
        ctx.shape = weight.shape
        return result

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, Tensor, Tensor, None, None]:
        inputs, chosen = ctx.saved_tensors
        slope = slopes[0].contiguous(memory_format=torch.channels_last)
        outer, inner, tall, wide = ctx.shape
        weights = outer * inner * tall * wide
        sizes = _sizes(inner * tall * wide, outer, BACKWARD, 8)
        programs = min(PROGRAMS, triton.cdiv(ctx.geometry[0], sizes["ROWS"]))
        sums = torch.empty(programs, weights + outer, dtype=torch.float32, device=slope.device)
        _backward[(programs,)](inputs, slope, chosen, sums, programs, *ctx.geometry, **sizes)
        gradient = add_up(sums, slope.dtype)
        by_weight = gradient[:weights].view(outer, tall, wide, inner).permute(0, 3, 1, 2)
        return None, by_weight, gradient[weights:], None, None


@triton.jit  # type: ignore[untyped-decorator]
def _patches(  # type: ignore[no-untyped-def]
    inputs_at, row, corner, rows, down, across, height, width, above, left, inner, tall, wide, TAPS: tl.constexpr
):
    """What lies under `tall` × `wide` at one corner of each pooled pixel, [ROWS, TAPS], with a 1 after the last tap."""
    tap = tl.arange(0, TAPS)[None, :]
    last = tall * wide * inner
    image, inside = row // (down * across), row % (down * across)
    y = (2 * (inside // across) + corner // 2 - above)[:, None] + tap // (wide * inner)
    x = (2 * (inside % across) + corner % 2 - left)[:, None] + (tap // inner) % wide
    there = (row < rows)[:, None] & (tap < last) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    seen = tl.load(inputs_at + ((image[:, None] * height + y) * width + x) * inner + tap % inner, mask=there, other=0)
    return tl.where(tap == last, 1.0, seen).to(inputs_at.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    weight_at, bias_at, corner, inner, outer, tall, wide, TAPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """The weights [TAPS, CHANNELS] on a window of (tall + 1) × (wide + 1) for the pixel at one of its corners."""
    tap, channel = tl.arange(0, TAPS)[:, None], tl.arange(0, CHANNELS)[None, :]
    y, x = tap // ((wide + 1) * inner) - corner // 2, (tap // inner) % (wide + 1) - corner % 2
    there = (y >= 0) & (y < tall) & (x >= 0) & (x < wide) & (channel < outer)
    weights = tl.load(weight_at + ((channel * tall + y) * wide + x) * inner + tap % inner, mask=there, other=0)
    is_bias = (tap == (tall + 1) * (wide + 1) * inner) & (channel < outer)
    return tl.where(is_bias, tl.load(bias_at + channel + 0 * tap, mask=is_bias, other=0), weights)


@triton.jit
def _larger(largest, which, value, corner):  # type: ignore[no-untyped-def]
    """The first of equals, and NaN, as PyTorch does."""
    larger = (value > largest) | (value != value)
    return tl.where(larger, value, largest), tl.where(larger, corner, which)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    inputs_at,
    weight_at,
    bias_at,
    result_at,
    chosen_at,
    programs,
    rows,
    down: tl.constexpr,
    across: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    above: tl.constexpr,
    left: tl.constexpr,
    inner: tl.constexpr,
    outer: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first = _weights(weight_at, bias_at, 0, inner, outer, tall, wide, TAPS, CHANNELS)
    second = _weights(weight_at, bias_at, 1, inner, outer, tall, wide, TAPS, CHANNELS)
    third = _weights(weight_at, bias_at, 2, inner, outer, tall, wide, TAPS, CHANNELS)
    fourth = _weights(weight_at, bias_at, 3, inner, outer, tall, wide, TAPS, CHANNELS)
    channel = tl.arange(0, CHANNELS)[None, :]
    for start in range(tl.program_id(0) * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        window = _patches(
            inputs_at, row, 0, rows, down, across, height, width, above, left, inner, tall + 1, wide + 1, TAPS
        )
        largest = tl.dot(window, first, input_precision="ieee")
        which = tl.zeros((ROWS, CHANNELS), dtype=tl.int32)
        largest, which = _larger(largest, which, tl.dot(window, second, input_precision="ieee"), 1)
        largest, which = _larger(largest, which, tl.dot(window, third, input_precision="ieee"), 2)
        largest, which = _larger(largest, which, tl.dot(window, fourth, input_precision="ieee"), 3)
        mask = (row < rows)[:, None] & (channel < outer)
        here = row[:, None] * outer + channel
        tl.store(chosen_at + here, tl.where(largest <= 0, 4, which).to(tl.uint8), mask=mask)
        tl.store(result_at + here, tl.where(largest <= 0, 0, largest).to(result_at.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    inputs_at,
    slope_at,
    chosen_at,
    sums_at,
    programs,
    rows,
    down: tl.constexpr,
    across: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    above: tl.constexpr,
    left: tl.constexpr,
    inner: tl.constexpr,
    outer: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channel = tl.arange(0, CHANNELS)[None, :]
    total = tl.zeros((TAPS, CHANNELS), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (channel < outer)
        here = row[:, None] * outer + channel
        slope = tl.load(slope_at + here, mask=mask, other=0)
        which = tl.load(chosen_at + here, mask=mask, other=4).to(tl.int32)
        for corner in tl.static_range(4):
            patches = _patches(
                inputs_at, row, corner, rows, down, across, height, width, above, left, inner, tall, wide, TAPS
            )
            passed = tl.where(which == corner, slope, 0.0).to(slope_at.dtype.element_ty)
            total += tl.dot(tl.trans(patches), passed, input_precision="ieee")
    tap = tl.arange(0, TAPS)[:, None]
    last = tall * wide * inner
    place = tl.where(tap < last, channel * last + tap, outer * last + channel)  # all weights, then all biases
    tl.store(sums_at + tl.program_id(0) * outer * (last + 1) + place, total, mask=(tap <= last) & (channel < outer))
