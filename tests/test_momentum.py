"""Momentum at the server repeats a part of what earlier rounds changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Typed
from hypothesis import given
from hypothesis import strategies as st

import fedsieve as fs
from fedsieve.momentum import ServerMomentum
from fedsieve.runs import assemble

QUICK: dict[str, Any] = {"clients": 10, "local_epochs": 1, "schedule": "constant", "device": "cpu", "seed": 3}


def test_steps_by_hand() -> None:
    """v = 1, then 1 + 0.5 · 1, then 0 + 0.5 · 1.5."""
    momentum, model = ServerMomentum(0.5, 1), torch.zeros(1)
    went = []
    for average in (1.0, 2.0, 2.5):
        model = momentum.step(model, torch.tensor([average]))
        went.append(float(model))
    assert went == [1.0, 2.5, 3.25]


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20), st.floats(0.1, 0.9))
def test_it_is_the_heavy_ball(averages: list[float], beta: float) -> None:
    """Polyak's form: w_{t+1} = a_t + β (w_t - w_{t-1})."""
    momentum = ServerMomentum(beta, 1)
    models, expected = [torch.zeros(1)], [0.0, 0.0]
    for average in averages:
        models.append(momentum.step(models[-1], torch.tensor([average])))
        expected.append(average + beta * (expected[-1] - expected[-2]))
    assert float(models[-1]) == pytest.approx(expected[-1], rel=1e-3, abs=1e-2)


def test_what_is_not_trained_is_that_of_the_average() -> None:
    momentum, model = ServerMomentum(0.5, 2), torch.zeros(3)
    for average in (torch.tensor([1.0, 1.0, 5.0]), torch.tensor([1.0, 2.0, 0.0])):
        model = momentum.step(model, average)
    assert model.tolist() == [1.5, 2.5, 0.0]


def test_without_it_the_average_is_the_model() -> None:
    average = torch.ones(2)
    assert ServerMomentum(0.0, 2).step(torch.zeros(2), average) is average


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("algorithm", ["fedcm-ts", "fedpdp-server-client"])
def test_a_run_goes_on_where_it_was_heading(algorithm: str, device: str) -> None:
    config = fs.Config(algorithm=algorithm, rounds=2, **QUICK | {"device": device})
    federation, _ = assemble(config)
    start = federation.model.clone()
    first = fs.run(config.model_copy(update={"rounds": 1})).model
    plain, pushed = (fs.run(config.model_copy(update={"server_momentum": beta})).model for beta in (0.0, 0.6))
    assert first is not None and plain is not None and pushed is not None
    torch.testing.assert_close(pushed, plain + 0.6 * (first - start))


@pytest.mark.parametrize("share", ["1", "-0.1"])
def test_a_share_that_is_none_is_named(typed: Typed, share: str) -> None:
    status, _, printed = typed("run", "--server-momentum", share, "--out", "run")
    assert status == 2 and "server_momentum" in printed and printed.count("\n") == 1
