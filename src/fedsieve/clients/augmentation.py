"""Crop and flip, for a whole batch of images at once.

What is drawn and what is done with it are two functions, so that every engine makes the same images: the draws come
from the run's generator, the pixels move wherever the batch lies.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

PADDING = 4


def draw_crops_and_flips(random: np.random.Generator, images: int) -> NDArray[np.int64]:
    """For each image a vertical and a horizontal offset in 0..8 and whether to flip: [images, 3]."""
    return random.integers((2 * PADDING + 1, 2 * PADDING + 1, 2), size=(images, 3))


def crop_and_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Pad `images` [n, channels, height, width] by 4 zeros, cut a window at each offset, mirror some: same shape."""
    count, channels, height, width = images.shape
    vertical, horizontal, flip = draws.to(images.device).unbind(1)
    rows = vertical[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, width)
    columns = horizontal[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)
    padded = pad(images, (PADDING, PADDING, PADDING, PADDING))
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
