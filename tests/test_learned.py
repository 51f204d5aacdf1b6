"""Averaging that learns its weights: its gradient, where it goes, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedsieve as fs
from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.filtering import Candidates, LearnedAveraging
from fedsieve.filtering.learned import (
    STRETCH,
    laid_out,
    matrix_products,
    mixture,
    not_wild,
    one_matrix,
    products,
    weights_gradient,
)

EXAMPLES, FEATURES, CLASSES = 60, 4, 3


def linear(models: Tensor, weights: list[float] | None = None, seed: int = 0) -> Candidates:
    """Candidates whose models [n, FEATURES · CLASSES] are linear: logits are inputs times weights."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=draws, dtype=models.dtype)
    labels = (inputs @ torch.randn(FEATURES, CLASSES, generator=draws, dtype=models.dtype)).argmax(1)

    def score_and_gradient(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        places = torch.arange(EXAMPLES) if examples is None else examples
        point = model.clone().requires_grad_()
        score = -cross_entropy(inputs[places] @ point.view(FEATURES, CLASSES), labels[places])
        (gradient,) = torch.autograd.grad(score, point)
        return score.detach(), gradient

    return Candidates(
        logits=torch.empty(0),
        labels=labels,
        weights=torch.tensor(weights or [1.0] * len(models), dtype=torch.float64),
        models=models,
        score_and_gradient=score_and_gradient,
        random=np.random.default_rng(seed),
        previous=torch.zeros(FEATURES * CLASSES, dtype=torch.float64),
    )


def some_models(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, FEATURES * CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(candidates: Candidates, weights: Any) -> float:
    assert candidates.models is not None and candidates.score_and_gradient is not None
    return -float(candidates.score_and_gradient(mixture(list(candidates.models), torch.as_tensor(weights)))[0])


@settings(max_examples=25)
@given(st.integers(2, 6), st.integers(0, 1000))
def test_the_gradient_against_finite_differences(count: int, seed: int) -> None:
    candidates = linear(some_models(count, seed), seed=seed)
    assert candidates.models is not None
    weights = softmax(np.random.default_rng(seed).normal(size=count))
    found = weights_gradient(candidates, list(candidates.models), torch.from_numpy(weights)).tolist()
    for position in range(count):
        nudge = np.zeros(count)
        nudge[position] = 1e-5
        slope = (loss(candidates, weights + nudge) - loss(candidates, weights - nudge)) / 2e-5
        assert found[position] == pytest.approx(slope, abs=1e-7)


def test_the_gradient_against_a_closed_form() -> None:
    # One example x of class y and a linear model: ∂L/∂W = x (softmax(xW) - e_y)ᵀ, so ∂L/∂c_k = (softmax - e_y) · x W_k.
    candidates = linear(some_models(3))
    x, y = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64), 2

    def score_and_gradient(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs = torch.softmax(x @ model.view(FEATURES, CLASSES), 0)
        return outputs[y].log(), -torch.outer(x, outputs - torch.eye(3, dtype=torch.float64)[y]).flatten()

    told = Candidates(
        **{name: getattr(candidates, name) for name in ("logits", "labels", "weights", "models")},
        score_and_gradient=score_and_gradient,
    )
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    models = list(some_models(3))
    outputs = torch.softmax(x @ mixture(models, weights).view(FEATURES, CLASSES), 0)
    wrong = outputs - torch.eye(3, dtype=torch.float64)[y]
    expected = [float(wrong @ (x @ model.view(FEATURES, CLASSES))) for model in models]
    assert weights_gradient(told, models, weights).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("far", [1e5, 1e30, 1e300])
def test_a_model_gone_wild_leaves_the_others_as_they_are_without_it(far: float) -> None:
    honest = some_models(4)
    wild = torch.full_like(honest[:1], far)
    alone = LearnedAveraging().select(linear(honest))
    beside = LearnedAveraging().select(linear(torch.cat([honest[:2], wild, honest[2:]])))
    assert alone.weights is not None and beside.weights is not None
    assert beside.weights[2] == 0 and 2 not in beside.kept
    assert beside.weights[[0, 1, 3, 4]].tolist() == alone.weights.tolist()


@pytest.mark.parametrize(
    ("distances", "near"),
    [
        ([0.0, 0.0, 0.0, 2.0, 3.0], [0, 1, 2, 3, 4]),  # who returns the global model makes nobody wild
        ([0.0, 1.0, 2.0, 3.0, 2501.0], [0, 1, 2, 3]),
        ([1.0, 2.0, 1500.0, 1e30], [0, 1, 2]),  # of two in the middle the lower counts
        ([1.0, 1e30], [0]),
        ([0.0, 0.0, 0.0], [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("buffers", [False, True])
def test_who_moved_far_beyond_others_is_wild(distances: list[float], near: list[int], buffers: bool) -> None:
    previous = torch.tensor([1.0, 0.5], dtype=torch.float64)
    moved = torch.tensor([0.0, 1.0] if buffers else [1.0, 0.0], dtype=torch.float64)
    models = [previous + distance * moved for distance in distances]
    assert not_wild(models, previous, trained=1).tolist() == near
    assert not_wild(models, previous, None).tolist() == near


def test_where_no_mixture_is_finite_there_are_too_few_models() -> None:
    candidates = linear(some_models(3))

    def no_numbers(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return torch.tensor(torch.nan), torch.full_like(model, torch.nan)

    with pytest.raises(TooFewUpdates, match="3 usable models, no mixture of which has a finite likelihood"):
        LearnedAveraging().select(replace(candidates, score_and_gradient=no_numbers))


def test_a_model_without_a_finite_likelihood_costs_nobody_else_the_round() -> None:
    """Two of five, no larger than others: such as negative variances in batch norm would make of them."""
    models, bad = some_models(5), [1, 4]
    candidates = linear(models)
    assert candidates.score_and_gradient is not None
    plain, share_of_bad = candidates.score_and_gradient, torch.linalg.pinv(models)[:, bad].sum(1)

    def score_and_gradient(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        score, gradient = plain(model, examples)
        return (score, gradient) if float(share_of_bad @ model) < 1e-6 else (score * torch.nan, gradient * torch.nan)

    selection = LearnedAveraging().select(replace(candidates, score_and_gradient=score_and_gradient))
    assert selection.weights is not None and set(selection.kept) <= {0, 2, 3}
    assert selection.weights[bad].tolist() == [0, 0] and float(selection.weights.sum()) == pytest.approx(1)


def test_the_number_of_threads_changes_no_bit() -> None:
    models = torch.randn(4, 300_000, generator=torch.Generator().manual_seed(0))
    direction, before = torch.randn(300_000, generator=torch.Generator().manual_seed(1)), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(products(list(models), direction).tolist())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@given(
    models=st.integers(1, 6),
    size=st.one_of(st.integers(1, 50), st.integers(STRETCH - 2, 3 * STRETCH + 2)),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_products_by_stretches_are_those_of_whole_models(models: int, size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(models, size, generator=random)
    direction = torch.randn(size, generator=random)
    exact = matrix.double() @ direction.double()
    torch.testing.assert_close(matrix_products(matrix, direction), exact, rtol=0, atol=1e-5 * size**0.5)


def test_models_that_are_rows_of_one_tensor_are_one_matrix() -> None:
    held = torch.randn(5, 128)
    for models in (list(held), list(held[1:4]), [held[2]]):
        matrix = laid_out(models)
        assert matrix is not None and matrix.data_ptr() == models[0].data_ptr()
        assert torch.equal(matrix, torch.stack(models))
    for models in (list(held)[::-1], [held[0], held[2]], [held[1], held[1]], [held[0], held[1].clone()], list(held.T)):
        assert laid_out(models) is None
    block = torch.randn(4, 128)
    near = [torch.from_numpy(row) for row in block.numpy()]  # one after the other, yet each a tensor of its own
    assert near[1].data_ptr() == near[0].data_ptr() + 512 and laid_out(near) is None
    assert one_matrix(list(held)) is None  # on a CPU bits must not depend on where models lie


@pytest.mark.cuda
@pytest.mark.parametrize("size", [7, 128, STRETCH, 1_000_003])
def test_models_that_lie_together_on_a_gpu_are_looked_at_at_once(size: int) -> None:
    held = torch.randn(5, size, device="cuda")
    direction, weights = torch.randn(size, device="cuda"), torch.rand(4, dtype=torch.float64, device="cuda")
    beside, apart = list(held[1:]), [held[0], held[1], held[3], held[4]]
    assert one_matrix(beside) is not None and one_matrix(apart) is None
    for models in (beside, apart, [model.clone() for model in beside]):
        exact = torch.stack(models).double()
        for shares in (weights, weights.cpu()):
            torch.testing.assert_close(mixture(models, shares).double(), weights @ exact, rtol=0, atol=1e-5)
        found = products(models, direction)
        torch.testing.assert_close(found, exact @ direction.double(), rtol=0, atol=1e-5 * size**0.5)


def test_identical_models_stay_where_they_start() -> None:
    one = some_models(1)
    selection = LearnedAveraging().select(linear(one.repeat(3, 1), [0.5, 0.3, 0.2]))
    assert selection.kept == (0, 1, 2) and selection.weights is not None
    assert selection.weights.tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_the_mixture_is_better_than_its_start_and_as_good_as_it_gets() -> None:
    candidates = linear(some_models(5))
    start = loss(candidates, np.full(5, 0.2))
    selection = LearnedAveraging(steps=400, batch=EXAMPLES, rate=0.05).select(candidates)
    assert selection.weights is not None
    reached = loss(candidates, selection.weights.numpy())
    tried = [loss(candidates, weights) for weights in np.random.default_rng(0).dirichlet(np.full(5, 0.3), 3000)]
    assert reached < start and reached < min(tried) + 0.01
    assert float(selection.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("claimed", [1.0, 1e3, 1e12])
def test_a_poisoned_model_gets_no_weight_however_much_data_it_claims(claimed: float) -> None:
    good = some_models(1).repeat(4, 1) + 0.01 * some_models(4, 1)
    inputs = linear(good)
    assert inputs.score_and_gradient is not None
    for _ in range(200):  # make them good
        good = good + torch.stack([inputs.score_and_gradient(model)[1] for model in good])
    poisoned = torch.cat([good, -3 * good[:1]])
    selection = LearnedAveraging().select(linear(poisoned, [1.0, 1.0, 1.0, 1.0, claimed]))
    assert selection.kept == (0, 1, 2, 3) and selection.weights is not None and selection.weights[4] == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_its_steps_are_those_of_pytorchs_adam_down_the_softmax(steps: int) -> None:
    start = np.array([0.4, 0.3, 0.2, 0.1])
    models = some_models(4)
    candidates = linear(models, start.tolist())
    a = torch.tensor(np.log(start), requires_grad=True)
    adam = torch.optim.Adam([a], lr=0.2)
    draws = torch.Generator().manual_seed(0)  # as in `linear`
    inputs = torch.randn(EXAMPLES, FEATURES, generator=draws, dtype=torch.float64)
    for _ in range(steps):
        adam.zero_grad()
        outputs = inputs @ (a.softmax(0) @ models).view(FEATURES, CLASSES)
        cross_entropy(outputs, candidates.labels).backward()  # type: ignore[no-untyped-call]
        adam.step()
    expected = a.softmax(0).detach()
    expected = torch.where(expected >= 1 / 8, expected, 0)
    found = LearnedAveraging(steps, EXAMPLES, 0.2).select(candidates).weights
    assert found is not None and found.tolist() == pytest.approx((expected / expected.sum()).tolist(), rel=1e-6)


def test_each_step_looks_at_a_batch_of_its_own() -> None:
    candidates = linear(some_models(3))
    at_model, looked_at = candidates.score_and_gradient, []
    assert at_model is not None

    def noted(model: Tensor, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        looked_at.append(examples)
        return at_model(model, examples)

    for batch, size in ((10, 10), (EXAMPLES - 1, EXAMPLES - 1), (EXAMPLES, None), (EXAMPLES + 1, None)):
        looked_at.clear()
        LearnedAveraging(5, batch).select(replace(candidates, score_and_gradient=noted))
        assert len(looked_at) == 5
        seen = [None if examples is None else examples.tolist() for examples in looked_at]
        assert all(examples is None if size is None else len(set(examples or ())) == size for examples in seen)
        assert size is None or len({tuple(examples or ()) for examples in seen}) == 5


def test_the_same_batches_for_the_same_round() -> None:
    first, second, other = (
        LearnedAveraging(batch=10).select(linear(some_models(4), seed=seed)).weights for seed in (0, 0, 1)
    )
    assert first is not None and second is not None and other is not None
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("settings", "said"), [({"steps": -1}, "steps: -1"), ({"batch": 0}, "batch: 0"), ({"rate": 0.0}, "rate: 0")]
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        LearnedAveraging(**settings)


def test_a_run_learns_with_it_and_can_be_resumed(tmp_path: Any) -> None:
    config = fs.Config(algorithm="fedpdp", filter="learned", rounds=6, clients=8, lr=0.05, batch_size=16)
    whole = fs.run(config)
    assert whole.accuracy[-1] > 0.5 and all(row["kept"] for row in whole.rows)

    class Interrupted(Exception):
        pass

    class Interrupt(fs.runs.Callback):
        def on_round(self, row: Any) -> None:
            if row["round"] == 3:
                raise Interrupted

    with pytest.raises(Interrupted):
        fs.run(config, out=tmp_path, callbacks=[Interrupt()])
    again = fs.run(config, out=tmp_path, resume=True)
    assert [row["kept"] for row in again.rows] == [row["kept"] for row in whole.rows]
    assert whole.model is not None and again.model is not None and torch.equal(whole.model, again.model)
