"""Bias, ReLU and 2 × 2 max-pooling after a convolution as one pass over its output, as Triton kernels.

One by one, these layers read and write the largest tensors of a step several times and cost a quarter of it. Values
and gradients are those of PyTorch's own layers; in bf16 they are rounded once instead of three times.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedsieve.engines.fused_first_layer import can_be_first, first_layer
from fedsieve.engines.program_sums import PROGRAMS, add_up

ROWS, CHANNELS = 32, 64  # of a tensor [pixels, channels] that a program works on at once


def fuse(module: nn.Module) -> None:
    """Replace convolution, ReLU and perhaps max-pooling in a row by one layer, in every `nn.Sequential` of `module`.

    Parameters stay the very same objects, under other names.
    """
    for part in list(module.modules()):
        if isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward:
            layers = [part[place] for place in range(len(part))]
            fused: list[nn.Module] = []
            while layers:
                layer = layers.pop(0)
                if _can_fuse(layer, layers):
                    layers.pop(0)
                    pooled = bool(layers) and _halves(layers[0])
                    fused.append(ConvolutionReLU(layer, pooled))
                    if pooled:
                        layers.pop(0)
                else:
                    fused.append(layer)
            part._modules = {str(place): layer for place, layer in enumerate(fused)}


class ConvolutionReLU(nn.Module):
    """A convolution and ReLU, then max-pooling where `pooled`."""

    def __init__(self, convolution: nn.Module, pooled: bool) -> None:
        super().__init__()
        assert isinstance(convolution, nn.Conv2d)
        self.convolution = convolution
        self.pooled = pooled

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, out, h', w']."""
        if self.pooled and can_be_first(self.convolution, inputs):
            return first_layer(self.convolution, inputs)
        bias = self.convolution.bias
        assert bias is not None
        outputs = self.convolution._conv_forward(inputs, self.convolution.weight, None)
        even = outputs.shape[2] % 2 == outputs.shape[3] % 2 == 0
        last = outputs.is_contiguous(memory_format=torch.channels_last)
        if last and outputs.numel() < 2**31 and (even or not self.pooled):
            result: Tensor = _BiasReLU.apply(outputs, bias, self.pooled)  # type: ignore[no-untyped-call]
            return result
        outputs = relu(outputs + bias.view(-1, 1, 1))
        return max_pool2d(outputs, 2) if self.pooled else outputs


def _can_fuse(layer: nn.Module, following: list[nn.Module]) -> bool:
    return (
        type(layer) is nn.Conv2d
        and layer.bias is not None
        and layer.padding_mode == "zeros"
        and bool(following)
        and type(following[0]) is nn.ReLU
        and not _is_watched(layer)
        and not _is_watched(following[0])
    )


def _halves(layer: nn.Module) -> bool:
    def pair(value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value, value)

    return (
        type(layer) is nn.MaxPool2d
        and pair(layer.kernel_size) == pair(layer.stride) == (2, 2)
        and pair(layer.padding) == (0, 0)
        and pair(layer.dilation) == (1, 1)
        and not (layer.ceil_mode or layer.return_indices or _is_watched(layer))
    )


def _is_watched(layer: nn.Module) -> bool:
    """Whether somebody hooked into the layer and would miss its call."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)


class _BiasReLU(torch.autograd.Function):
    """relu(outputs + bias) of channels-last `outputs` [n, channels, h, w]; of each 2 × 2 the largest if `pooled`."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, bias: Tensor, pooled: bool) -> Tensor:
        count, channels, height, width = outputs.shape
        shape = (count, channels, height // 2, width // 2) if pooled else (count, channels, height, width)
        result = _empty(shape, outputs)
        rows = result.numel() // channels
        chosen = torch.empty(result.numel() if pooled else 1, dtype=torch.uint8, device=outputs.device)
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS))
        _forward[grid](
            outputs, bias, result, chosen, rows, height, width, channels, POOLED=pooled, ROWS=ROWS, CHANNELS=CHANNELS
        )
        ctx.save_for_backward(chosen if pooled else result)
        ctx.shape, ctx.pooled, ctx.bias_type = outputs.shape, pooled, bias.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        (kept,) = ctx.saved_tensors
        slope = slopes[0].contiguous(memory_format=torch.channels_last)
        _, channels, height, width = ctx.shape
        rows = slope.numel() // channels
        passed = _empty(ctx.shape, slope)
        programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
        sums = torch.empty(programs, channels, dtype=torch.float32, device=slope.device)
        grid = (programs, triton.cdiv(channels, CHANNELS))
        _backward[grid](
            slope,
            kept,
            passed,
            sums,
            rows,
            height,
            width,
            channels,
            programs,
            POOLED=ctx.pooled,
            ROWS=ROWS,
            CHANNELS=CHANNELS,
        )
        return passed, add_up(sums, ctx.bias_type), None


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


@triton.jit
def _corner(rows, height, width, channels):  # type: ignore[no-untyped-def]
    """Where the 2 × 2 window of each pooled pixel begins."""
    across, down = width // 2, height // 2
    image, inside = rows // (across * down), rows % (across * down)
    return ((image * height + 2 * (inside // across)) * width + 2 * (inside % across)) * channels


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    outputs_at,
    bias_at,
    result_at,
    chosen_at,
    count,
    height,
    width,
    channels,
    POOLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (row < count)[:, None] & (channel < channels)[None, :]
    bias = tl.load(bias_at + channel, mask=channel < channels).to(tl.float32)[None, :]
    here = row[:, None] * channels + channel[None, :]
    if POOLED:
        window = outputs_at + _corner(row, height, width, channels)[:, None] + channel[None, :]
        largest = tl.load(window, mask=mask).to(tl.float32) + bias
        which = tl.zeros((ROWS, CHANNELS), dtype=tl.int32)
        for corner in tl.static_range(1, 4):
            step = (corner // 2) * width * channels + (corner % 2) * channels
            value = tl.load(window + step, mask=mask).to(tl.float32) + bias
            larger = (value > largest) | (value != value)  # the first of equals, and NaN, as PyTorch does
            largest = tl.where(larger, value, largest)
            which = tl.where(larger, corner, which)
        tl.store(chosen_at + here, tl.where(largest <= 0, 4, which).to(tl.uint8), mask=mask)
    else:
        largest = tl.load(outputs_at + here, mask=mask).to(tl.float32) + bias
    tl.store(result_at + here, tl.where(largest <= 0, 0, largest).to(result_at.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    slope_at,
    kept_at,
    passed_at,
    sums_at,
    count,
    height,
    width,
    channels,
    programs,
    POOLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (channel < channels)[None, :]
        here = row[:, None] * channels + channel[None, :]
        slope = tl.load(slope_at + here, mask=mask, other=0).to(tl.float32)
        if POOLED:
            which = tl.load(kept_at + here, mask=mask, other=4).to(tl.int32)
            total += tl.sum(tl.where(which < 4, slope, 0), axis=0)
            window = passed_at + _corner(row, height, width, channels)[:, None] + channel[None, :]
            for corner in tl.static_range(4):
                step = (corner // 2) * width * channels + (corner % 2) * channels
                value = tl.where(which == corner, slope, 0)
                tl.store(window + step, value.to(passed_at.dtype.element_ty), mask=mask)
        else:
            result = tl.load(kept_at + here, mask=mask, other=0).to(tl.float32)
            value = tl.where(result <= 0, 0, slope)
            total += tl.sum(value, axis=0)
            tl.store(passed_at + here, value.to(passed_at.dtype.element_ty), mask=mask)
    tl.store(sums_at + tl.program_id(0) * channels + channel, total, mask=channel < channels)
