"""The networks of the paper and of the field's small benchmarks, for any image size and number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsieve.errors import InvalidSetting, unknown_name


def mlp(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two hidden layers of 200, as FedAvg's "2NN" (McMahan et al. 2017)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, classes),
    )


def cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedAvg's CNN (McMahan et al. 2017): two 5 × 5 convolutions (32, 64), each pooled, and a dense layer of 512."""
    channels, height, width = _image(input_shape, "cnn", 4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def vgg11(input_shape: tuple[int, ...], classes: int, *, batch_norm: bool = False) -> nn.Module:
    """Configuration A of VGG (Simonyan & Zisserman 2015), with one linear layer at the end as usual for CIFAR."""
    channels, height, width = _image(input_shape, "vgg11", 32)
    layers: list[nn.Module] = []
    for width_or_pool in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width_or_pool == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, width_or_pool, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers.append(convolution)
        if batch_norm:
            layers.append(nn.BatchNorm2d(width_or_pool))
        layers.append(nn.ReLU())
        channels = width_or_pool
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * (height // 32) * (width // 32), classes))


def vgg11_bn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG11 with batch norm after every convolution."""
    return vgg11(input_shape, classes, batch_norm=True)


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "vgg11": vgg11,
    "vgg11-bn": vgg11_bn,
}


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network called `name`, for inputs of `input_shape` (channels, height, width) or (features,)."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name](input_shape, classes)


def check_outputs(
    module: nn.Module, input_shape: tuple[int, ...], classes: int, device: torch.device | str = "cpu"
) -> None:
    """Raise unless the module turns a batch of inputs [2, *input_shape] into logits [2, classes]."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():  # a model may keep what it makes here, and train with it
            outputs = module(torch.zeros(2, *input_shape, device=device))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        allowed = f"a module that takes inputs {input_shape} ({reason})"
        raise InvalidSetting("model", type(module).__name__, allowed) from None
    finally:
        module.train(training)
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if shape != (2, classes):
        raise InvalidSetting("model", f"outputs of shape {shape}", f"a module that gives [2, {classes}]")


def _image(shape: tuple[int, ...], model: str, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise InvalidSetting("model", model, f"images of at least {smallest} × {smallest} with it, not inputs {shape}")
    return shape[0], shape[1], shape[2]
