"""The networks: shapes in and out, sizes counted by hand, and what they can't take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsieve as fs
from fedsieve.errors import InvalidSetting
from fedsieve.models import MODELS, build, check_outputs
from fedsieve.randomness import torch_draws


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def convolution(size: int, inputs: int, outputs: int) -> int:
    return size * size * inputs * outputs + outputs


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (7,)),
        ("mlp", (1, 8, 8)),
        ("cnn", (1, 8, 8)),
        ("cnn", (3, 33, 30)),
        ("cnn", (1, 4, 4)),
        ("vgg11", (3, 32, 32)),
        ("vgg11-bn", (3, 32, 32)),
        ("vgg11", (1, 65, 40)),
    ],
)
@pytest.mark.parametrize("classes", [2, 10])
def test_a_batch_of_inputs_becomes_logits(name: str, shape: tuple[int, ...], classes: int) -> None:
    with torch_draws(0, "test"):
        module = build(name, shape, classes)
    logits = module.eval()(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (3, classes)
    assert logits.isfinite().all()
    assert (logits != logits[0]).any()
    check_outputs(module, shape, classes)


def test_mlp_has_two_hidden_layers_of_200() -> None:
    """199,210 on MNIST, as reported for FedAvg's 2NN."""
    assert parameters(build("mlp", (1, 28, 28), 10)) == linear(784, 200) + linear(200, 200) + linear(200, 10) == 199_210


def test_cnn_is_the_one_of_fedavg() -> None:
    """1,663,370 on MNIST, as reported by McMahan et al. 2017; 2.16 million on CIFAR."""
    convolutions = convolution(5, 1, 32) + convolution(5, 32, 64)
    assert parameters(build("cnn", (1, 28, 28), 10)) == convolutions + linear(7 * 7 * 64, 512) + linear(512, 10)
    assert parameters(build("cnn", (1, 28, 28), 10)) == 1_663_370
    convolutions = convolution(5, 3, 32) + convolution(5, 32, 64)
    assert parameters(build("cnn", (3, 32, 32), 10)) == convolutions + linear(8 * 8 * 64, 512) + linear(512, 10)
    assert parameters(build("cnn", (3, 32, 32), 10)) == 2_156_490


def test_vgg11_is_configuration_a_with_one_linear_layer() -> None:
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    plain = sum(convolution(3, *pair) for pair in pairwise(widths)) + linear(512, 10)
    assert parameters(build("vgg11", (3, 32, 32), 10)) == plain == 9_225_610
    batch_norms = 2 * sum(widths[1:])  # a scale and a shift per channel
    assert parameters(build("vgg11-bn", (3, 32, 32), 10)) == plain + batch_norms == 9_231_114


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (1, 3, 8)), ("cnn", (64,)), ("vgg11", (3, 31, 32)), ("vgg11-bn", (1, 8, 8)), ("vgg11", (3072,))],
)
def test_too_small_an_image_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        build(name, shape, 10)
    assert caught.value.field == "model"
    assert str(shape) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_network_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidSetting, match=r"^model: 'vgg11bn' is not allowed; use 'vgg11-bn' \(nearest\)"):
        build("vgg11bn", (3, 32, 32), 10)


def test_the_same_seed_builds_the_same_network() -> None:
    for name in MODELS:
        states = []
        for seed in (0, 0, 1):
            with torch_draws(seed, "test"):
                module = build(name, (3, 32, 32), 10)
            states.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
        assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


# Checking someone's own network


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"^model: 'outputs of shape \(2, 3\)' is not allowed"):
        check_outputs(nn.Linear(5, 3), (5,), 4)


class Pair(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


@pytest.mark.parametrize("module", [nn.Linear(9, 4), nn.Conv2d(1, 1, 3), Pair()])
def test_a_module_that_cannot_take_the_inputs_is_refused_in_one_line(module: nn.Module) -> None:
    with pytest.raises(InvalidSetting) as caught:
        check_outputs(module, (5,), 4)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


def test_checking_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    check_outputs(module, (5,), 4)
    assert module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


class Scaling(nn.Module):
    """Keeps a table that it makes when it is first called, and gives more than logits in training."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.layer, self.extra, self.table = nn.Linear(64, 10), extra, None

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.linspace(1, 2, 10)  # type: ignore[assignment]
        logits = self.layer(x.flatten(1)) * self.table
        return (logits, logits) if self.extra and self.training else logits


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_a_model_may_keep_what_it_made_when_it_was_first_called(engine: str) -> None:
    config = fs.Config(algorithm="fedpdp", rounds=2, clients=4, local_steps=2, engine=engine, device="cpu")
    assert not any(row["excluded"] for row in fs.run(config, model=lambda: Scaling(False)).rows)


def test_a_model_that_gives_more_than_logits_in_training_is_told() -> None:
    config = fs.Config(algorithm="fedpdp", rounds=1, clients=4, local_steps=2, device="cpu")
    with pytest.raises(fs.FedSieveError, match="in training the model gives a tuple, not logits"):
        fs.run(config, model=lambda: Scaling(True))
