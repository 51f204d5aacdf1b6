"""How a client learns, against PyTorch's own optimiser and against loops over single images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsieve.clients import (
    LocalTraining,
    Plain,
    Proximal,
    Trainer,
    constant,
    cosine,
    crop_and_flip,
    draw_crops_and_flips,
    step,
)
from fedsieve.errors import InvalidSetting
from fedsieve.models import build
from fedsieve.randomness import generator, torch_draws
from fedsieve.threads import single_thread
from fedsieve.vector import Layout

SEED, ROUND, CLIENT = 5, 3, 17


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def images(count: int, shape: tuple[int, ...] = (1, 8, 8), seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    with torch_draws(0, "test"):
        return build("mlp", (1, 8, 8), 10)


def with_batch_norm() -> nn.Module:
    with torch_draws(0, "test"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def trained(module: nn.Module, settings: LocalTraining, inputs: Tensor, targets: Tensor) -> tuple[nn.Module, float]:
    """A new module with what `train` makes of `module`, which stays as it is, and the loss."""
    layout, scratch, result = Layout.of(module), copy.deepcopy(module), copy.deepcopy(module)
    model, loss = Trainer(scratch, layout, settings).train(layout.read(module), inputs, targets, SEED, ROUND, CLIENT)
    layout.write(model, result)
    return result, loss


def trained_by_pytorch(
    module: nn.Module, settings: LocalTraining, inputs: Tensor, targets: Tensor, mu: float = 0.0
) -> tuple[nn.Module, float]:
    """The same with torch.optim.SGD, the proximal term in the loss, and images augmented one by one."""
    module = copy.deepcopy(module).train()
    sent = [parameter.detach().clone() for parameter in module.parameters()]
    lr = settings.lr * settings.schedule(ROUND, settings.rounds)
    optimiser = torch.optim.SGD(
        module.parameters(), lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    augmentation = generator(SEED, "augmentation", ROUND, CLIENT)
    losses = []
    for batch in settings.batches(len(targets), SEED, ROUND, CLIENT):
        seen = inputs[batch]
        if settings.augment:
            draws = draw_crops_and_flips(augmentation, len(batch))
            seen = torch.stack([cropped(image, *draw) for image, draw in zip(seen, draws.tolist(), strict=True)])
        loss = cross_entropy(module(seen), targets[batch])
        losses += [loss.item()] * len(batch)
        near = [(parameter - start).square().sum() for parameter, start in zip(module.parameters(), sent, strict=True)]
        optimiser.zero_grad()
        (loss + mu / 2 * torch.stack(near).sum()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return module, sum(losses) / len(losses)


def cropped(image: Tensor, down: int, right: int, flip: int) -> Tensor:
    """One image [channels, height, width], pixel by pixel."""
    channels, height, width = image.shape
    result = torch.zeros_like(image)
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                y, x = row + down - 4, (width - 1 - column if flip else column) + right - 4
                if 0 <= y < height and 0 <= x < width:
                    result[channel, row, column] = image[channel, y, x]
    return result


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(value, expected, atol=1e-6, rtol=0), name


# Training


@pytest.mark.parametrize(
    "settings",
    [
        LocalTraining(lr=0.05, momentum=0, weight_decay=0, batch_size=8, epochs=2),
        LocalTraining(lr=0.05, momentum=0.9, weight_decay=0.01, batch_size=8, epochs=2),
        LocalTraining(lr=0.05, momentum=0.5, weight_decay=0.1, batch_size=7, steps=9),
        LocalTraining(lr=0.2, batch_size=8, epochs=2, schedule=cosine, rounds=8),
        LocalTraining(lr=0.2, batch_size=8, epochs=2, schedule=step, rounds=4),
        LocalTraining(lr=0.05, batch_size=100, epochs=3),
    ],
    ids=["plain", "momentum and decay", "steps", "cosine", "step", "one batch"],
)
def test_training_is_pytorchs_sgd(settings: LocalTraining) -> None:
    module, inputs, targets = mlp(), images(30), labels(30)
    result, loss = trained(module, settings, inputs, targets)
    expected, expected_loss = trained_by_pytorch(module, settings, inputs, targets)
    assert_same(result, expected)
    assert loss == pytest.approx(expected_loss, abs=1e-5)


def test_the_proximal_term_is_the_gradient_of_half_mu_times_the_squared_distance() -> None:
    module, inputs, targets = mlp(), images(30), labels(30)
    near = LocalTraining(lr=0.05, batch_size=8, epochs=3, objective=Proximal(mu=0.7))
    expected, expected_loss = trained_by_pytorch(module, near, inputs, targets, mu=0.7)
    result, loss = trained(module, near, inputs, targets)
    assert_same(result, expected)
    assert loss == pytest.approx(expected_loss, abs=1e-5)  # the client's own loss, without the term


def test_a_proximal_client_stays_nearer_to_what_it_was_sent() -> None:
    module, inputs, targets = mlp(), images(30), labels(30)
    sent = Layout.of(module).read(module)

    def distance(mu: float) -> float:
        settings = LocalTraining(lr=0.05, batch_size=8, epochs=5, weight_decay=0, objective=Proximal(mu))
        result, _ = trained(module, settings, inputs, targets)
        return float((Layout.of(result).read(result) - sent).norm())

    assert distance(5.0) < distance(0.5) < distance(0.0)


def test_proximal_gradient_by_hand() -> None:
    gradient = torch.tensor([1.0, 1.0])
    Proximal(0.1).add_gradient(gradient, torch.tensor([3.0, -2.0]), torch.tensor([1.0, 0.0]))
    assert gradient.tolist() == pytest.approx([1.2, 0.8])
    Plain().add_gradient(gradient, torch.tensor([3.0, -2.0]), torch.tensor([1.0, 0.0]))
    assert gradient.tolist() == pytest.approx([1.2, 0.8])


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_mu_must_be_a_number_that_is_not_negative(mu: float) -> None:
    with pytest.raises(InvalidSetting, match=r"^mu: "):
        Proximal(mu)


def test_batch_norm_statistics_come_back_in_the_vector() -> None:
    module, inputs, targets = with_batch_norm(), images(20), labels(20)
    settings = LocalTraining(lr=0.05, batch_size=8, epochs=2)
    result, _ = trained(module, settings, inputs, targets)
    expected, _ = trained_by_pytorch(module, settings, inputs, targets)
    assert_same(result, expected)
    before, after = module.state_dict(), result.state_dict()
    assert not torch.equal(after["2.running_mean"], before["2.running_mean"])
    assert not torch.equal(after["2.running_var"], before["2.running_var"])
    assert after["2.num_batches_tracked"] == 6  # two epochs of 8 + 8 + 4 examples


def test_augmented_training_sees_the_augmented_images() -> None:
    module, inputs, targets = mlp(), images(12), labels(12)
    settings = LocalTraining(lr=0.05, batch_size=5, epochs=2, augment=True)
    result, _ = trained(module, settings, inputs, targets)
    expected, _ = trained_by_pytorch(module, settings, inputs, targets)
    assert_same(result, expected)


def test_training_leaves_what_it_was_given_alone() -> None:
    module, inputs, targets = mlp(), images(12), labels(12)
    layout = Layout.of(module)
    sent = layout.read(module)
    before, seen = sent.clone(), inputs.clone()
    trainer = Trainer(module, layout, LocalTraining())
    model, _ = trainer.train(sent, inputs, targets, SEED, ROUND, CLIENT)
    assert torch.equal(sent, before) and torch.equal(inputs, seen)
    kept = model.clone()
    trainer.train(sent, inputs, targets, SEED, ROUND + 1, CLIENT)
    assert torch.equal(model, kept)


@pytest.mark.parametrize("build_module", [mlp, with_batch_norm])
def test_one_client_leaves_no_trace_for_the_next(build_module: Callable[[], nn.Module]) -> None:
    module, inputs, targets = build_module(), images(12), labels(12)
    layout = Layout.of(module)
    sent = layout.read(module)
    settings = LocalTraining(batch_size=5)
    first, first_loss = Trainer(copy.deepcopy(module), layout, settings).train(
        sent, inputs, targets, SEED, ROUND, CLIENT
    )
    used = Trainer(copy.deepcopy(module), layout, settings)
    used.train(sent + 1, images(9, seed=4), labels(9, seed=4), 8, 1, 2)
    again, again_loss = used.train(sent, inputs, targets, SEED, ROUND, CLIENT)
    assert torch.equal(first, again) and first_loss == again_loss


def test_a_client_without_examples_returns_what_it_was_sent() -> None:
    module = with_batch_norm()
    layout = Layout.of(module)
    sent = layout.read(module) + 0.5
    sent[-1] = 3.0  # a count of batches, which is a whole number
    model, loss = Trainer(module, layout, LocalTraining()).train(sent, images(0), labels(0), SEED, ROUND, CLIENT)
    assert torch.equal(model, sent) and loss == 0


@pytest.mark.parametrize("other", [(9, ROUND, CLIENT), (SEED, 9, CLIENT), (SEED, ROUND, 9)])
def test_another_seed_round_or_client_trains_on_other_batches(other: tuple[int, int, int]) -> None:
    module, inputs, targets = mlp(), images(30), labels(30)
    layout = Layout.of(module)
    sent = layout.read(module)
    trainer = Trainer(module, layout, LocalTraining(batch_size=8, epochs=1))
    here, _ = trainer.train(sent, inputs, targets, SEED, ROUND, CLIENT)
    there, _ = trainer.train(sent, inputs, targets, *other)
    assert not torch.equal(here, there)


def test_frozen_parameters_stay_as_they_were_sent() -> None:
    """As with an optimiser that was given the others only: no weight decay on what is not trained."""
    module, inputs, targets = mlp(), images(12), labels(12)
    first = next(module.parameters())
    first.requires_grad_(False)
    result, _ = trained(module, LocalTraining(lr=0.1, weight_decay=0.1), inputs, targets)
    assert torch.equal(next(result.parameters()), first)
    expected, _ = trained_by_pytorch(module, LocalTraining(lr=0.1, weight_decay=0.1), inputs, targets)
    assert_same(result, expected)


# Batches


@given(examples=st.integers(1, 40), batch_size=st.integers(1, 45), epochs=st.integers(1, 4))
def test_every_epoch_goes_through_every_example_once(examples: int, batch_size: int, epochs: int) -> None:
    settings = LocalTraining(batch_size=batch_size, epochs=epochs)
    batches = [batch.tolist() for batch in settings.batches(examples, SEED, ROUND, CLIENT)]
    per_epoch = math.ceil(examples / batch_size)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        *full, last = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(len(batch) == batch_size for batch in full)
        assert len(last) == examples - batch_size * (per_epoch - 1)
        assert sorted(sum(full, last)) == list(range(examples))


@given(examples=st.integers(1, 40), batch_size=st.integers(1, 45), steps=st.integers(1, 20))
def test_steps_are_exact_and_replace_epochs(examples: int, batch_size: int, steps: int) -> None:
    settings = LocalTraining(batch_size=batch_size, epochs=3, steps=steps)
    batches = [batch.tolist() for batch in settings.batches(examples, SEED, ROUND, CLIENT)]
    assert len(batches) == steps
    many = LocalTraining(batch_size=batch_size, epochs=steps)
    assert batches == [batch.tolist() for batch in many.batches(examples, SEED, ROUND, CLIENT)][:steps]


def test_every_epoch_round_and_client_has_its_own_order() -> None:
    def order(round: int, client: int) -> list[tuple[int, ...]]:
        return [tuple(batch) for batch in LocalTraining(batch_size=50, epochs=2).batches(50, SEED, round, client)]

    orders = [*order(1, 1), *order(1, 2), *order(2, 1)]
    assert len(set(orders)) == 6
    assert order(1, 1) == orders[:2]


# Schedules


def test_schedules_at_hand_worked_rounds() -> None:
    assert [constant(round, 10) for round in (1, 5, 10)] == [1, 1, 1]
    assert [step(round, 100) for round in (1, 50, 51, 75, 76, 100)] == [1, 1, 0.1, 0.1, 0.01, 0.01]
    assert [step(round, 4) for round in (1, 2, 3, 4)] == [1, 1, 0.1, 0.01]
    assert step(1, 1) == cosine(1, 1) == 1
    expected = [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert [cosine(round, 4) for round in (1, 2, 3, 4)] == pytest.approx(expected)


# Crop and flip


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7)])
def test_crop_and_flip_moves_pixels_as_a_loop_would(shape: tuple[int, int, int]) -> None:
    batch = images(40, shape)
    draws = draw_crops_and_flips(np.random.default_rng(0), 40)
    augmented = crop_and_flip(batch, torch.from_numpy(draws))
    assert augmented.shape == batch.shape and augmented.dtype == batch.dtype
    for image, result, draw in zip(batch, augmented, draws.tolist(), strict=True):
        assert torch.equal(result, cropped(image, *draw))


def test_the_middle_offset_is_the_image_itself() -> None:
    batch = images(2)
    straight, mirrored = crop_and_flip(batch, torch.tensor([[4, 4, 0], [4, 4, 1]]))
    assert torch.equal(straight, batch[0])
    assert torch.equal(mirrored, batch[1].flip(-1))


def test_draws_cover_every_offset_and_flip_evenly() -> None:
    draws = draw_crops_and_flips(np.random.default_rng(1), 9 * 9 * 2 * 100)
    seen = np.zeros((9, 9, 2), dtype=int)
    for down, right, flip in draws.tolist():
        seen[down, right, flip] += 1
    statistic = ((seen - 100) ** 2 / 100).sum()
    assert statistic < 222.2  # chi-square, 161 degrees of freedom, p = 0.001
