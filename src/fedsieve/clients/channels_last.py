"""Images whose channels lie side by side in memory: small convolutions and pooling are faster so on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOST_WEIGHTS = 2**20
"""Every step turns the convolutions' weights round as well, which pays only while they are few."""


def channels_last(images: Tensor) -> Tensor:
    """A copy of `images` [n, channels, height, width], the same to every operation.

    `Tensor.contiguous` would leave images of one channel as they are, and their convolution's outputs too.
    """
    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def gains_from_channels_last(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether `module`, on a CPU, has a few small convolutions and takes images of `input_shape` channels last."""
    weights = [layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return 0 < sum(weights) <= MOST_WEIGHTS and takes_channels_last(module, input_shape, torch.device("cpu"))


def takes_channels_last(module: nn.Module, input_shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `module` takes images of `input_shape` channels last; one that calls `view` on them doesn't."""
    if len(input_shape) != 3:
        return False
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(channels_last(torch.zeros(2, *input_shape, device=device)))
    except Exception:
        return False
    finally:
        module.train(training)
    return True
