"""The model that is handed out is an average over rounds, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Typed
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

import fedsieve as fs
from fedsieve.runs import assemble, read_record, write_record
from fedsieve.sampling import UniformSampler
from fedsieve.sampling.base import Ids
from fedsieve.smoothing import Smoothing

QUICK: dict[str, Any] = {"rounds": 4, "clients": 10, "local_epochs": 1, "schedule": "constant", "device": "cpu"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def handed_out(share: float, models: list[float]) -> list[float]:
    smoothing = Smoothing(share)
    return [float(smoothing.hand_out(torch.tensor([model]), round)) for round, model in enumerate(models, start=1)]


def test_averages_by_hand() -> None:
    """From the third round on, 0.6 of what was: 0.6 · 3 + 0.4 · 8 = 5 and 0.6 · 5 + 0.4 · 0 = 3."""
    assert handed_out(0.6, [2.0, 4.0, 8.0, 0.0]) == pytest.approx([2.0, 3.0, 5.0, 3.0])


numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30)


@given(numbers, st.floats(0.05, 0.95))
def test_a_round_counts_for_less_with_every_later_one(models: list[float], share: float) -> None:
    """Against the sum Σ_i (1 - s_i) Π_{j>i} s_j w_i, written out."""
    shares = [min(share, (t - 1) / t) for t in range(1, len(models) + 1)]
    weights = [(1 - shares[i]) * np.prod(shares[i + 1 :]) for i in range(len(models))]
    assert sum(weights) == pytest.approx(1)
    found = handed_out(share, models)[-1]
    assert found == pytest.approx(float(np.dot(weights, models)), rel=1e-4, abs=1e-3)


@given(numbers)
def test_a_share_near_one_is_the_mean_of_all_rounds(models: list[float]) -> None:
    assert handed_out(0.999, models)[-1] == pytest.approx(float(np.mean(models)), rel=1e-4, abs=1e-3)


def test_without_a_share_it_is_the_last_model_itself() -> None:
    model = torch.ones(3)
    assert Smoothing(0.0).hand_out(model, 7) is model


def test_what_is_handed_out_does_not_change_with_the_next_model() -> None:
    smoothing, model = Smoothing(0.5), torch.ones(2)
    first = smoothing.hand_out(model, 1)
    model += 1  # as an engine might that has one buffer
    second = smoothing.hand_out(model, 2)
    assert first.tolist() == [1.0, 1.0] and second.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("device", DEVICES)
def test_the_run_is_the_same_but_for_what_it_hands_out(device: str) -> None:
    quick = QUICK | {"algorithm": "fedcm-ts", "device": device}
    plain, smooth = (fs.run(fs.Config(smoothing=share, **quick)) for share in (0.0, 0.7))
    after = [fs.run(fs.Config(**quick | {"rounds": rounds})).model for rounds in (1, 2, 3)]
    models = [model for model in (*after, plain.model) if model is not None]
    for one, other in zip(plain.rows, smooth.rows, strict=True):
        for name in ("sampled", "kept", "score", "train_loss"):
            assert one[name] == other[name]
        assert other["unsmoothed_accuracy"] == one["test_accuracy"]
    mean = torch.stack(models[:3]).mean(0)
    assert smooth.model is not None
    torch.testing.assert_close(smooth.model, 0.7 * mean + 0.3 * models[3])
    assert smooth.accuracy != plain.accuracy and smooth.accuracy[0] == plain.accuracy[0]


def test_validation_data_judges_what_is_handed_out() -> None:
    history = fs.run(fs.Config(algorithm="fedca", smoothing=0.7, **QUICK))
    assert history.model is not None
    _, engine = fs.runs.assemble(fs.Config(algorithm="fedca", **QUICK))
    logits, labels = engine.logits([history.model], "validation")[0], engine.labels("validation")
    assert history.rows[-1]["validation_accuracy"] == pytest.approx(float(fs.filtering.accuracy(logits, labels)))


def test_a_record_has_both_accuracies(tmp_path: Path) -> None:
    history = fs.run(fs.Config(algorithm="fedpdp", smoothing=0.5, **QUICK))
    read = read_record(write_record(history, tmp_path))
    for name in ("test_accuracy", "unsmoothed_accuracy"):
        expected = [row[name] for row in history.rows]
        assert [row[name] for row in read.rows] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("share", ["1", "-0.1", "much"])
def test_a_share_that_is_none_is_named(typed: Typed, share: str) -> None:
    status, _, printed = typed("run", "--smoothing", share, "--out", "run")
    assert status == 2 and "smoothing" in printed and not Path("run").exists()


def test_a_lost_round_has_no_part_in_the_average() -> None:
    class FirstLiars(UniformSampler):
        def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
            return np.array(hostile[:2] if round in (1, 3) else honest[:2])

    settings = QUICK | {"algorithm": "fedpdp", "attack": "nan", "hostile": 0.5, "smoothing": 0.5, "ratio": 0.2}
    _, engine = assemble(fs.Config(**settings))
    hostile = sorted(engine.hostile)  # type: ignore[attr-defined]
    honest = [client for client in range(10) if client not in hostile]
    rows = fs.run(fs.Config(**settings), sampler=FirstLiars()).rows
    assert ["lost" in row for row in rows] == [True, False, True, False]
    assert rows[1]["test_accuracy"] == rows[1]["unsmoothed_accuracy"]  # the first that counts, all by itself
    assert rows[2]["test_accuracy"] == rows[1]["test_accuracy"]
