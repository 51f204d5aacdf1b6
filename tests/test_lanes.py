"""Clients side by side on a GPU: the same results as one after the other."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import fedsieve as fs
from fedsieve.clients import LocalTraining, draw_crops_and_flips
from fedsieve.data import Dataset
from fedsieve.engines import Engine, LanesEngine, SequentialEngine
from fedsieve.engines.lanes import Plan, pack
from fedsieve.engines.slope import Slope
from fedsieve.randomness import generator
from fedsieve.runs import assemble, compare


def images(count: int = 600, size: int = 32) -> Dataset:
    random = np.random.default_rng(0)
    labels = random.integers(10, size=count)
    shades = random.integers(256, size=(10, size, size, 3))
    noise = random.integers(256, size=(count, size, size, 3))
    pixels = ((shades[labels] + noise) // 2).astype(np.uint8)
    half = (0.5, 0.5, 0.5)
    return Dataset.from_arrays(pixels, labels, pixels[:100], labels[:100], classes=10, mean=half, std=half)


def config(**settings: Any) -> fs.Config:
    chosen = {
        "algorithm": "fedca",
        "model": "cnn",
        "heterogeneity": "client",
        "alpha": 0.5,
        "clients": 12,
        "ratio": 1.0,
        "local_epochs": 2,
        "batch_size": 16,
        "validation_per_class": 5,
        "augment": True,
        "rounds": 3,
        "lr": 0.01,  # with larger steps VGG11 makes much of a change in the last place
        "schedule": "constant",
        "seed": 3,
    }
    return fs.Config(**chosen | settings)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))
def test_packing_gives_every_client_one_lane_and_no_lane_much_more_than_it_must(steps: list[int], lanes: int) -> None:
    spread = pack(steps, lanes)
    assert len(spread) == lanes
    assert sorted(place for lane in spread for place in lane) == list(range(len(steps)))
    longest = max(sum(steps[place] for place in lane) for lane in spread)
    # Graham (1969): the longest lane's last client was given to it when it had least to do.
    assert longest <= sum(steps) / lanes + (1 - 1 / lanes) * max(steps, default=0) + 1e-9


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_packing_longest_first_is_near_the_best_there_is(steps: list[int], lanes: int) -> None:
    def longest(lane_of: Sequence[int]) -> int:
        return max(sum(step for step, own in zip(steps, lane_of, strict=True) if own == lane) for lane in range(lanes))

    best = min(longest(lane_of) for lane_of in product(range(lanes), repeat=len(steps)))
    packed = {place: lane for lane, places in enumerate(pack(steps, lanes)) for place in places}
    # Graham (1969) for the longest first; in the order given, [1, 1, 1, 3] on two lanes would take 4 instead of 3.
    assert longest([packed[place] for place in range(len(steps))]) <= (4 / 3 - 1 / (3 * lanes)) * best + 1e-9


@given(
    st.integers(1, 50), st.integers(1, 20), st.integers(1, 3), st.none() | st.integers(1, 12), st.booleans(), st.data()
)
def test_a_plan_holds_the_batches_and_draws_of_the_reference(
    examples: int, batch: int, epochs: int, steps: int | None, augment: bool, data: st.DataObject
) -> None:
    settings = LocalTraining(batch_size=batch, epochs=epochs, steps=steps, augment=augment)
    held = np.sort(np.random.default_rng(examples).permutation(1000)[:examples])
    plan = Plan(settings, data.draw(st.permutations(held.tolist()).map(np.array)), seed=1, round=2, client=7)
    expected = list(settings.batches(examples, 1, 2, 7))
    random = generator(1, "augmentation", 2, 7)
    assert plan.steps == settings.step_count(examples) == len(expected) and plan.counts.tolist() == [
        len(positions) for positions in expected
    ]
    planned, draws = plan.batches(0, plan.steps)
    for step, positions in enumerate(expected):
        assert planned[step, : len(positions)].tolist() == held[positions].tolist()
        assert np.isin(planned[step], held).all()  # what a batch is filled up with is data too
        if augment:
            assert draws is not None
            assert np.array_equal(draws[step, : len(positions)], draw_crops_and_flips(random, len(positions)))


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


class PartlyFrozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
        self[0].weight.requires_grad = False
        self.never_used = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


def both(settings: fs.Config, **parts: Any) -> tuple[list[fs.engines.Update], list[fs.engines.Update]]:
    """The updates of one round in lanes, and one after the other on the same GPU."""
    updates = []
    for kind in ("lanes", "sequential"):
        placed = settings.model_copy(update={"engine": kind, "device": "cuda"})
        federation, engine = assemble(placed, dataset=images(), **parts)
        assert isinstance(engine, LanesEngine if kind == "lanes" else SequentialEngine)
        updates.append(list(engine.train(engine.initial_model(), federation.clients.tolist(), round=2)))
        assert not getattr(engine, "_given_up", False)
    return updates[0], updates[1]


def agree(ours: list[fs.engines.Update], theirs: list[fs.engines.Update]) -> None:
    """To rounding, for rounds of few or small steps; in others any change in the last place grows beyond it."""
    assert [update.client for update in ours] == [update.client for update in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None and other.error is None and one.model is not None and other.model is not None
        assert float((one.model - other.model).norm() / other.model.norm()) < 1e-4
        assert one.loss == pytest.approx(other.loss, rel=1e-3, abs=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "vgg11"},
        {"model": "vgg11", "lr": 0.002, "heterogeneity": "class"},
        {"algorithm": "fedprox", "mu": 1.0},
        {"momentum": 0.0, "weight_decay": 0.0, "augment": False},
        {"momentum": 0.5, "weight_decay": 0.1, "schedule": "cosine"},
        {"local_steps": 7},
        {"batch_size": 200},
        {"model": "mlp", "augment": False},
        {"clients": 3, "lr": 0.002},
    ],
)
def test_lanes_train_as_the_reference_does(changes: dict[str, Any]) -> None:
    agree(*both(config(**changes)))


class Viewed(nn.Module):
    """Counts on its images lying in memory as PyTorch's usually do."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 8, 3, stride=4), nn.Linear(512, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(torch.relu(self.convolution(inputs)).view(len(inputs), -1))
        return outputs


@pytest.mark.cuda
@pytest.mark.parametrize("model", [Normed, PartlyFrozen, Viewed])
def test_batch_norm_and_frozen_parameters_in_lanes(model: type[nn.Module]) -> None:
    ours, theirs = both(config(), model=model)
    agree(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.model is not None and other.model is not None
        if model is Normed:
            assert one.model[-1] == other.model[-1] > 0  # batches counted


@pytest.mark.cuda
def test_lanes_agree_with_the_reference_on_the_cpu() -> None:
    here, there = config(engine="sequential", device="cpu"), config(device="cuda")
    engines: list[Engine] = [assemble(one, dataset=images())[1] for one in (here, there)]
    updates = [
        [
            fs.engines.Update(update.client, update.model.cpu(), update.loss)
            for update in engine.train(engine.initial_model(), list(range(12)), round=1)
            if update.model is not None
        ]
        for engine in engines
    ]
    agree(updates[1], updates[0])


def exact_score_and_gradient(
    engine: SequentialEngine, model: Tensor, examples: Tensor | None, crops: NDArray[np.int64] | None = None
) -> tuple[Tensor, Tensor]:
    """In double precision."""
    point = model.double().requires_grad_()
    pieces = engine.layout.tensors(point)
    for piece in engine.layout.pieces[sum(one.start < engine.layout.parameters for one in engine.layout.pieces) :]:
        pieces[piece.name] = pieces[piece.name].detach()
    module = copy.deepcopy(engine.module).double().to(model.device).eval()
    inputs, labels = engine._examples("validation", engine.validation[slice(None) if examples is None else examples])
    if crops is not None:
        pairs = zip(inputs.cpu(), crops.tolist(), strict=True)
        inputs = torch.stack([moved(image, *draw) for image, draw in pairs]).to(inputs.device)
    score = -cross_entropy(functional_call(module, pieces, (inputs.double(),)), labels)
    return score.detach(), torch.autograd.grad(score, point)[0]


def some_crops(images: int) -> NDArray[np.int64]:
    """With this seed no unit of VGG11 is so near to 0 that rounding decides whether it passes a gradient on."""
    return draw_crops_and_flips(np.random.default_rng(4), images)


def moved(image: Tensor, down: int, right: int, mirror: int) -> Tensor:
    """One image [channels, height, width], padded by 4, cut and perhaps mirrored, pixel for pixel."""
    height, width = image.shape[1:]
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + down - 4, (width - 1 - column if mirror else column) + right - 4
            if 0 <= y < height and 0 <= x < width:
                result[:, row, column] = image[:, y, x]
    return result


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["cnn", "vgg11", Normed, PartlyFrozen])
def test_gradients_on_validation_data_are_as_exact_as_those_of_the_reference(
    model: str | type[nn.Module], precision: str
) -> None:
    name, part = (model, None) if isinstance(model, str) else ("cnn", model)
    lanes, reference = (
        assemble(config(engine=kind, device="cuda", precision=precision, model=name), dataset=images(), model=part)[1]
        for kind in ("lanes", "sequential")
    )
    assert isinstance(lanes, LanesEngine) and isinstance(reference, SequentialEngine)
    start, rounding = lanes.initial_model(), 1e-5 if precision == "fp32" else 0.02
    for scale in (1.0, 1.1, 0.9, 1.0):  # of each size as it is, captured, and replayed for other models and examples
        some = torch.arange(int(10 * scale), int(10 * scale) + 17)
        for examples, crops in ((None, None), (some, None), (some, some_crops(17))):
            exact_score, exact = exact_score_and_gradient(reference, scale * start, examples, crops)
            score, gradient = lanes.score_and_gradient(scale * start, examples, crops)
            assert float(score) == pytest.approx(float(exact_score), rel=rounding)
            _, other = reference.score_and_gradient(scale * start, examples, crops)
            error, others = (float((one - exact).norm() / exact.norm()) for one in (gradient, other))
            assert error < 1.3 * others + rounding
            assert error < 0.25  # where images nearly cancel, bf16 is as coarse as that
    assert lanes._validation_slope is not None
    assert set(lanes._validation_slope._graphs) == {50, 17}


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-5), ("bf16", 0.25)])
@pytest.mark.parametrize("model", [None, Normed, PartlyFrozen])
def test_gradients_on_validation_data_on_a_cpu_are_those_of_double_precision(
    model: type[nn.Module] | None, precision: str, rounding: float
) -> None:
    engine = assemble(config(device="cpu", workers=2, precision=precision), dataset=images(), model=model)[1]
    assert isinstance(engine, SequentialEngine)
    start, some = engine.initial_model(), torch.arange(10, 27)
    for examples, crops in ((None, None), (some, None), (some, some_crops(17))):
        exact_score, exact = exact_score_and_gradient(engine, start, examples, crops)
        score, gradient = engine.score_and_gradient(start, examples, crops)
        assert float(score) == pytest.approx(float(exact_score), rel=rounding / 10)
        error = float((gradient - exact).norm() / exact.norm())
        assert (0 if precision == "fp32" else 1e-4) < error < rounding
    engine.close()


@pytest.mark.cuda
def test_a_run_that_has_ended_keeps_no_memory_from_others() -> None:
    data, kept = images(), []
    for seed in range(7):
        fs.run(config(algorithm="fedsieve", device="cuda", precision="bf16", seed=seed), dataset=data)
        kept.append(torch.cuda.memory_reserved())
    # The first run may find streams that nobody has used, which get a workspace for good; one model may hold on to a
    # large segment of memory.
    assert kept[-1] <= kept[1] + 128 * 2**20, kept


class Pooled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * 14 * 14, 10),
        )  # fmt: skip


@pytest.mark.parametrize("model", [Pooled, Normed, PartlyFrozen])
def test_a_slope_through_fused_layers_is_that_of_the_reference(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsieve.engines.slope.borrow", lambda device: None)  # no GPU, nothing is captured
    engine = assemble(config(engine="sequential", device="cpu"), dataset=images(), model=model)[1]
    assert isinstance(engine, SequentialEngine)
    slope = Slope(engine.module, engine.layout, torch.device("cpu"))
    inputs, labels = engine._examples("validation", engine.validation)
    for scale in (1.0, 1.1, 0.9):
        point = scale * engine.initial_model()
        likelihood, gradient = slope.at(point, inputs, labels)
        expected, exact = engine.score_and_gradient(point)
        torch.testing.assert_close(likelihood / len(labels), expected)
        torch.testing.assert_close(gradient / len(labels), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_same_run_twice_gives_the_same_numbers(precision: str) -> None:
    settings = config(model="vgg11", precision=precision, device="cuda", ratio=0.5)
    first, second = (fs.run(settings, dataset=images()) for _ in range(2))
    assert first.model is not None and second.model is not None
    assert torch.equal(first.model, second.model)
    assert [row["kept"] for row in first.rows] == [row["kept"] for row in second.rows]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_coarser_numbers_learn_nearly_the_same(precision: str) -> None:
    exact, coarse = (
        assemble(config(model="vgg11", precision=kind, device="cuda"), dataset=images())[1]
        for kind in ("fp32", precision)
    )
    start = exact.initial_model()
    for one, other in zip(exact.train(start, [0, 1, 2], 1), coarse.train(start, [0, 1, 2], 1), strict=True):
        assert one.model is not None and other.model is not None
        change = float((one.model - other.model).norm() / (one.model - start).norm())
        assert 0 < change < 0.2
    logits = [engine.logits([start, 2 * start], "test") for engine in (exact, coarse)]
    assert logits[0].shape == (2, 100, 10) and logits[1].dtype == torch.float32
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.05


class Forgetful(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3072, 10))


class Hesitant(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3072, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs * (2 if outputs.max().item() > 1e6 else 1)


@pytest.mark.cuda
@pytest.mark.parametrize(("model", "reason"), [(Forgetful, "it draws random numbers"), (Hesitant, "captur")])
def test_a_model_that_cannot_be_captured_is_trained_all_the_same(
    model: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [
        assemble(config(engine=kind, device="cuda"), dataset=images(), model=model)[1]
        for kind in ("lanes", "sequential")
    ]
    with caplog.at_level(logging.WARNING, "fedsieve"):
        ours, theirs = (engine.train(engine.initial_model(), [0, 1, 2], round=1) for engine in engines)
        engines[0].train(engines[0].initial_model(), [0], round=2)
    assert len(caplog.records) == 1 and reason in caplog.text and "one after the other" in caplog.text
    for one, other in zip(ours, theirs, strict=True):
        assert one.model is not None and other.model is not None and torch.allclose(one.model, other.model, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["vgg11", "vgg11-bn"])
def test_runs_that_share_a_gpu_are_those_that_have_it_alone(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = images()
    monkeypatch.setattr(fs.data, "load", lambda *_: dataset)
    settings = config(model=model, precision="bf16", device="cuda", ratio=0.7, rounds=4)
    alone, together = (
        compare(settings, ["fedca", "fedcm-ucb", "fedprox"], 2, tmp_path / str(at_once), at_once=at_once)
        for at_once in (1, 3)
    )
    for name, histories in alone.items():
        for one, other in zip(histories, together[name], strict=True):
            assert one.model is not None and other.model is not None and torch.equal(one.model, other.model)


@pytest.mark.cuda
def test_lanes_can_be_closed_and_opened_again() -> None:
    _, engine = assemble(config(device="cuda"), dataset=images())
    first = engine.train(engine.initial_model(), [0, 1], round=1)
    engine.close()
    again = engine.train(engine.initial_model(), [0, 1], round=1)
    assert first[1].model is not None and again[1].model is not None
    assert torch.equal(first[1].model, again[1].model)


@pytest.mark.cuda
def test_smaller_batches_of_batch_norm_are_captured_and_change_nothing() -> None:
    federation, engine = assemble(config(device="cuda", local_epochs=4), dataset=images(), model=Normed)
    assert isinstance(engine, LanesEngine)
    clients = federation.clients.tolist()
    first = engine.train(engine.initial_model(), clients, round=1)  # made one by one, then captured
    sizes = {size for lane in engine._lanes for size in lane._graphs}
    assert len(sizes) > 1 and max(sizes) == 16
    again = engine.train(engine.initial_model(), clients, round=1)  # replayed
    for one, other in zip(first, again, strict=True):
        assert one.model is not None and other.model is not None and torch.equal(one.model, other.model)
