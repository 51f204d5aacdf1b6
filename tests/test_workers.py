"""The workers engine against the sequential one: the same to the last bit, for any number of workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedsieve as fs
from fedsieve.clients import LocalTraining, Proximal, draw_crops_and_flips
from fedsieve.data import Dataset, Partition
from fedsieve.engines import SequentialEngine, Update, WorkersEngine
from fedsieve.engines.precision import Precision
from fedsieve.models import build

SIZES = [7, 1, 30, 12, 3, 25, 12, 9, 18, 5]
SHAPE = (1, 8, 8)
CLASSES = 4
ROUND = 3


def dataset(classes: int = CLASSES) -> Dataset:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (sum(SIZES) + 20, 8, 8), dtype=np.uint8)
    tests = random.integers(0, 256, (130, 8, 8), dtype=np.uint8)
    labels = [random.integers(classes, size=len(values)) for values in (images, tests)]
    return Dataset.from_arrays(images, labels[0], tests, labels[1], classes, mean=(0.5,), std=(0.5,))


def partition() -> Partition:
    order = np.random.default_rng(1).permutation(sum(SIZES))
    return Partition(order, np.cumsum([0, *SIZES]), np.array([], dtype=np.int64))


VALIDATION = np.arange(sum(SIZES), sum(SIZES) + 20)
PLAIN = LocalTraining(lr=0.05, momentum=0, weight_decay=0, batch_size=6, epochs=2)
EVERYTHING = LocalTraining(lr=0.05, batch_size=6, epochs=2, augment=True, objective=Proximal(0.1))


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.4), nn.ReLU(), nn.Linear(20, CLASSES))


class Viewing(nn.Module):
    """Fails on images channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.linear = nn.Linear(4 * 36, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.convolution(images).relu().view(len(images), -1))
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(build, "mlp", SHAPE, CLASSES),
    "cnn": partial(build, "cnn", SHAPE, CLASSES),
    "batch norm": batch_norm,
    "view": Viewing,
}


def engines(
    model: Callable[[], nn.Module], settings: LocalTraining, workers: int, precision: Precision = "fp32"
) -> tuple[SequentialEngine, WorkersEngine]:
    common = (model, dataset(), partition(), VALIDATION, settings, 5)
    pair = (
        SequentialEngine(*common, precision=precision),
        WorkersEngine(*common, workers=workers, precision=precision),
    )
    for engine in pair:
        engine.evaluation_batch = 50
    return pair


def assert_same(updates: Sequence[Update], expected: Sequence[Update]) -> None:
    assert [update.client for update in updates] == [update.client for update in expected]
    assert [update.loss for update in updates] == [update.loss for update in expected]
    assert [update.error for update in updates] == [update.error for update in expected]
    for update, other in zip(updates, expected, strict=True):
        assert update.model is not None and other.model is not None
        assert torch.equal(update.model, other.model)


@pytest.mark.parametrize("settings", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("workers", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (5, "fp32"), (3, "bf16")])
def test_the_same_bits_as_one_after_the_other(
    model: str, settings: LocalTraining, workers: int, precision: Precision
) -> None:
    sequential, several = engines(MODELS[model], settings, workers, precision)
    start = sequential.initial_model()
    assert torch.equal(several.initial_model(), start)
    clients = [9, 2, 0, 5, 3, 1, 8, 7, 4] if model != "batch norm" else [9, 2, 3, 8]
    expected = sequential.train(start, clients, ROUND)
    try:
        updates = several.train(start, clients, ROUND)
        assert_same(updates, expected)
        models = [update.model for update in updates if update.model is not None]
        for count in (1, 2, 4):
            for data in ("validation", "test"):
                outputs = several.logits(models[:count], data)
                assert torch.equal(outputs, sequential.logits(models[:count], data))
                assert outputs.shape == (count, 20 if data == "validation" else 130, CLASSES)
        wholes: list[tuple[Tensor, Tensor]] = []
        for batch in (500, 3):  # all 20 at once, and in seven batches
            several.evaluation_batch = sequential.evaluation_batch = batch
            for crops in (None, draw_crops_and_flips(np.random.default_rng(0), 20)):
                score, gradient = several.score_and_gradient(start, None, crops)
                expected_score, expected_gradient = sequential.score_and_gradient(start, None, crops)
                assert score == expected_score and torch.equal(gradient, expected_gradient)
                wholes.append((score, gradient))
        if precision == "fp32":
            torch.testing.assert_close(wholes[2:], wholes[:2], rtol=1e-3, atol=1e-5)
        assert_same(several.train(start, clients, ROUND), expected)
    finally:
        several.close()


def large_linear() -> nn.Module:
    """With a layer large enough to add its gradients in place in fp32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.Linear(64, CLASSES))


@pytest.mark.parametrize("model", [*MODELS.values(), large_linear])
def test_bf16_learns_nearly_the_same_and_leaves_pytorch_as_it_was(model: Callable[[], nn.Module]) -> None:
    clients = [9, 2, 3, 8]
    (exact, _), (one, several) = engines(model, EVERYTHING, 2), engines(model, EVERYTHING, 2, "bf16")
    start = exact.initial_model()
    score, gradient = exact.score_and_gradient(start)
    expected = exact.train(start, clients, ROUND)
    for engine in (one, several):
        coarse_score, coarse_gradient = engine.score_and_gradient(start)
        updates = engine.train(start, clients, ROUND)
        engine.close()
        assert abs(coarse_score - score) < 0.02 and 0 < relative(coarse_gradient, gradient) < 0.2
        assert coarse_gradient.dtype == torch.float32
        for update, other in zip(updates, expected, strict=True):
            assert update.model is not None and other.model is not None
            assert update.model.dtype == torch.float32
            assert 0 < relative(update.model - start, other.model - start) < 0.2
            assert update.loss == pytest.approx(other.loss, rel=0.02)
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_whole_runs_in_bf16_are_another() -> None:
    common: dict[str, Any] = {"algorithm": "fedpdp", "rounds": 1, "clients": 4, "local_epochs": 1, "device": "cpu"}
    for engine in ("sequential", "workers"):
        exact, coarse = (fs.run(fs.Config(engine=engine, precision=kind, **common)).model for kind in ("fp32", "bf16"))
        assert exact is not None and coarse is not None and 0 < relative(coarse, exact) < 0.02


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_runs_are_the_same(precision: str) -> None:
    common: dict[str, Any] = {"algorithm": "fedcm-ucb", "rounds": 20, "clients": 12, "local_epochs": 1, "device": "cpu"}
    common |= {"precision": precision}
    expected = fs.run(fs.Config(engine="sequential", **common))
    for workers in (1, 2, 3):
        history = fs.run(fs.Config(engine="workers", workers=workers, **common))
        for row, other in zip(history.rows, expected.rows, strict=True):
            assert {key: row[key] for key in row if key not in ("seconds", "phases")} == {
                key: other[key] for key in other if key not in ("seconds", "phases")
            }
        assert history.model is not None and expected.model is not None
        assert torch.equal(history.model, expected.model)


def test_a_client_that_fails_does_not_stop_the_others() -> None:
    broken = dataset()
    broken.train_labels[partition()[3]] = -1
    common = (MODELS["mlp"], broken, partition(), VALIDATION, PLAIN, 5)
    engine = WorkersEngine(*common, workers=2)
    updates = engine.train(engine.initial_model(), range(10), ROUND)
    engine.close()
    assert [update.client for update in updates] == list(range(10))
    assert [update.client for update in updates if update.model is None] == [3]
    assert updates[3].error is not None and "IndexError" in updates[3].error
    sequential = SequentialEngine(*common)
    others = [*range(3), *range(4, 10)]
    assert_same([updates[client] for client in others], sequential.train(sequential.initial_model(), others, ROUND))


def test_a_model_that_draws_trains_one_client_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    sequential, several = engines(dropout, PLAIN, 3)
    start = sequential.initial_model()
    with caplog.at_level(logging.INFO, "fedsieve"):
        for round in (1, 2):
            assert_same(several.train(start, range(10), round), sequential.train(start, range(10), round))
    messages = [record.getMessage() for record in caplog.records if record.name == "fedsieve"]
    assert messages == [
        "Sequential draws random numbers of its own, and PyTorch has one generator for all threads: "
        "clients train one after the other"
    ]
    assert torch.equal(several.logits([start], "test"), sequential.logits([start], "test"))
    several.close()


def test_a_model_that_does_not_draw_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    _, several = engines(batch_norm, PLAIN, 2)
    with caplog.at_level(logging.INFO, "fedsieve"):
        several.train(several.initial_model(), [2, 3], ROUND)
    several.close()
    assert not caplog.records


class Watched(nn.Module):
    """Writes down in which thread it is called, and how many threads PyTorch has there."""

    def __init__(self, calls: list[tuple[str, int]], wait_for: threading.Barrier | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(64, CLASSES)
        self.calls = calls
        self.wait_for = wait_for

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        return Watched(self.calls, self.wait_for)

    def forward(self, images: Tensor) -> Tensor:
        name = threading.current_thread().name
        self.calls.append((name, torch.get_num_threads()))
        if self.wait_for is not None and name.startswith("fedsieve"):
            self.wait_for.wait(timeout=20)
        outputs: Tensor = self.linear(images.flatten(1))
        return outputs


def workers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fedsieve-worker")]


def test_clients_train_at_the_same_time_each_in_one_thread() -> None:
    calls: list[tuple[str, int]] = []
    settings = LocalTraining(batch_size=100, epochs=1)
    _, several = engines(lambda: Watched(calls, threading.Barrier(3)), settings, 3)
    updates = several.train(several.initial_model(), range(3), ROUND)
    assert [update.error for update in updates] == [None] * 3
    several.close()
    in_workers = [call for call in calls if call[0].startswith("fedsieve")]
    assert len({name for name, _ in in_workers}) == 3
    assert {threads for _, threads in in_workers} == {1}


def test_the_longest_clients_come_first() -> None:
    started: list[int] = []

    class Noting(WorkersEngine):
        def _train_one(self, trainer: Any, model: Tensor, client: int, round: int, batches: Any = None) -> Update:
            started.append(client)
            return super()._train_one(trainer, model, client, round, batches)

    engine = Noting(MODELS["mlp"], dataset(), partition(), VALIDATION, PLAIN, 5, workers=1)
    engine.train(engine.initial_model(), range(10), ROUND)
    engine.close()
    assert [SIZES[client] for client in started] == sorted(SIZES, reverse=True)


def test_nothing_global_is_changed_and_no_thread_is_left() -> None:
    _, several = engines(MODELS["mlp"], PLAIN, 3)
    assert not workers_alive()
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first = several.train(several.initial_model(), range(10), ROUND)
    several.logits([several.initial_model()], "test")
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert 1 <= len(workers_alive()) <= 3  # as many as were busy at the same time
    several.close()
    assert not workers_alive()
    assert_same(several.train(several.initial_model(), range(10), ROUND), first)
    several.close()
    several.close()
    assert not workers_alive()


def test_an_interruption_ends_the_round_and_the_engine_goes_on_working() -> None:
    interrupted = threading.Event()
    trained: list[int] = []

    class Interrupted(WorkersEngine):
        def _train_one(self, trainer: Any, model: Tensor, client: int, round: int, batches: Any = None) -> Update:
            if round == 1 and client == 2:  # the longest, so the first
                interrupted.set()
                raise KeyboardInterrupt
            interrupted.wait(20)
            time.sleep(0.2)  # or the other worker may be through with all nine before the interruption is heard of
            trained.append(client)
            return super()._train_one(trainer, model, client, round, batches)

    engine = Interrupted(MODELS["mlp"], dataset(), partition(), VALIDATION, PLAIN, 5, workers=2)
    with pytest.raises(KeyboardInterrupt):
        engine.train(engine.initial_model(), range(10), 1)
    assert len(trained) < 9
    sequential, _ = engines(MODELS["mlp"], PLAIN, 1)
    start = engine.initial_model()
    assert_same(engine.train(start, range(10), 2), sequential.train(start, range(10), 2))
    engine.close()
    assert not workers_alive()


def test_nothing_to_do() -> None:
    _, several = engines(MODELS["mlp"], PLAIN, 2)
    assert several.train(several.initial_model(), [], ROUND) == []
    several.close()


class Remembers(torch.nn.Module):
    """Counts what it has seen in a buffer that is in no state dictionary, and lets that change what it says."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 0.01 * len(x)
        return torch.nn.functional.linear(x.flatten(1), self.layer.weight) + self.seen


@pytest.mark.parametrize("algorithm", ["fedca", "fedsieve"])
def test_nothing_that_a_module_keeps_to_itself_goes_from_client_to_client(algorithm: str) -> None:
    settings = {"algorithm": algorithm, "rounds": 2, "clients": 6, "local_steps": 3, "lr": 0.5, "device": "cpu"}
    runs = [
        fs.run(fs.Config(**settings, **place), model=Remembers)
        for place in ({"engine": "sequential"}, {"workers": 1}, {"workers": 2})
    ]
    models = [run.model for run in runs if run.model is not None]
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])
    assert runs[0].accuracy == runs[1].accuracy == runs[2].accuracy
