"""Robust filters and averages: by hand, against brute force, against Flower's, and with one arbitrarily bad model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from torch import Tensor

import fedsieve as fs
from fedsieve.averaging import Coefficients, Kept, Scheme, combine, fedavg, fedpdp, mean
from fedsieve.engines import Judge, Update
from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.filtering import (
    Bulyan,
    Candidates,
    CoordinateMedian,
    ErrorRejection,
    FineTuning,
    FLTrust,
    GeometricMedian,
    KeepAll,
    Krum,
    LossRejection,
    ModelFilter,
    MultiKrum,
    NormClipping,
    Selection,
    TrimmedMean,
    UnionRejection,
    stack,
)
from fedsieve.filtering.byzantine import liars_among
from fedsieve.filtering.rejection import averages_without_one
from fedsieve.sieve import Population, Sieve, Sifted
from fedsieve.stopwatch import Stopwatch

Array = NDArray[np.float64]


def round_of(
    models: ArrayLike | Tensor,
    weights: ArrayLike | None = None,
    previous: ArrayLike | None = None,
    gradient: ArrayLike | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Candidates:
    """Models [models][size] that came back, equally weighted, from clients who were sent zeros, unless told."""
    held = torch.as_tensor(models, dtype=dtype, device=device)
    count, size = held.shape
    sent = torch.zeros(size) if previous is None else torch.as_tensor(previous)
    way = torch.ones(size) if gradient is None else torch.as_tensor(gradient)
    return Candidates(
        logits=torch.empty(count, 0, 0),
        labels=torch.empty(0),
        weights=torch.full((count,), 1 / count).double() if weights is None else torch.as_tensor(weights).double(),
        models=list(held),
        score_and_gradient=lambda model, examples=None: (torch.zeros(()), way.to(held)),
        previous=sent.to(held),
        random=np.random.default_rng(0),
    )


def made_by(filter: ModelFilter, candidates: Candidates) -> Tensor:
    """The new model [size]."""
    selection = filter.select(candidates)
    if selection.model is not None:
        return selection.model
    assert selection.weights is not None and candidates.models is not None and candidates.previous is not None
    shares = Coefficients(0.0, selection.weights[list(selection.kept)].numpy())
    return combine(candidates.previous, [candidates.models[position] for position in selection.kept], shares)


def one_step() -> FLTrust:
    """The server's update is the gradient."""
    return FLTrust(steps=1, rate=1.0)


RULES: dict[str, Callable[[int], ModelFilter]] = {  # f -> a rule that bears f bad models
    "Krum": Krum,
    "MultiKrum": lambda f: MultiKrum(f, keep=3),
    "Bulyan": Bulyan,
    "CoordinateMedian": lambda f: CoordinateMedian(),
    "TrimmedMean": lambda f: TrimmedMean(0.25),
    "GeometricMedian": lambda f: GeometricMedian(),
    "NormClipping": lambda f: NormClipping(),
    "FLTrust": lambda f: one_step(),
}
every_rule = pytest.mark.parametrize("rule", RULES)


@st.composite
def small_models(draw: st.DrawFn, least: Callable[[int], int]) -> tuple[list[list[int]], int]:
    """Small whole numbers, so that ties and equal models are frequent; and f, for at least `least(f)` models."""
    byzantine, size = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    models = draw(st.integers(least(byzantine), least(byzantine) + 3))
    numbers = st.lists(st.integers(-4, 4), min_size=size, max_size=size)
    return draw(st.lists(numbers, min_size=models, max_size=models)), byzantine


# Krum, Multi-Krum and Bulyan against their definitions in plain Python


def krum_order(models: Sequence[Sequence[int]], left: Sequence[int], byzantine: int) -> list[int]:
    """The positions `left`, lowest score first, then lowest position."""

    def score(one: int) -> int:
        distances = sorted(
            sum((a - b) ** 2 for a, b in zip(models[one], models[other], strict=True)) for other in left if other != one
        )
        return sum(distances[: max(1, len(left) - byzantine - 2)])

    return sorted(left, key=lambda one: (score(one), one))


@given(small_models(lambda f: 2 * f + 3), st.data())
def test_krum_and_multi_krum_keep_what_brute_force_keeps(
    case: tuple[list[list[int]], int], data: st.DataObject
) -> None:
    models, byzantine = case
    keep = data.draw(st.integers(1, len(models)))
    order = krum_order(models, range(len(models)), byzantine)
    assert Krum(byzantine).select(round_of(models)).kept == (order[0],)
    selection = MultiKrum(byzantine, keep).select(round_of(models))
    assert selection.kept == tuple(sorted(order[:keep]))
    assert selection.weights is not None and selection.model is None
    expected = [1 / keep if position in selection.kept else 0.0 for position in range(len(models))]
    assert selection.weights.tolist() == expected


@given(small_models(lambda f: 4 * f + 3))
def test_bulyan_makes_what_brute_force_makes(case: tuple[list[list[int]], int]) -> None:
    models, byzantine = case
    left, chosen = list(range(len(models))), list[int]()
    while len(chosen) < len(models) - 2 * byzantine:
        chosen.append(krum_order(models, left, byzantine)[0])
        left.remove(chosen[-1])
    expected = []
    for coordinate in range(len(models[0])):
        values = sorted(models[one][coordinate] for one in chosen)
        median = Fraction(values[(len(values) - 1) // 2] + values[len(values) // 2], 2)
        nearest = sorted(values, key=lambda value: (abs(value - median), value))[: len(models) - 4 * byzantine]
        expected.append(float(Fraction(sum(nearest), len(nearest))))
    selection = Bulyan(byzantine).select(round_of(models))
    assert selection.kept == tuple(sorted(chosen))
    assert selection.model is not None
    torch.testing.assert_close(selection.model, torch.tensor(expected))


def test_krum_by_hand() -> None:
    """Two neighbours count: 1 + 4, 1 + 1, 1 + 1, 1 + 4, and a lot. Of equal scores the lowest id wins."""
    line = round_of([[0], [1], [2], [3], [50]])
    assert Krum(1).select(line).kept == (1,)
    assert made_by(Krum(1), line).tolist() == [1.0]
    assert MultiKrum(1, keep=3).select(line).kept == (0, 1, 2)
    assert made_by(MultiKrum(1, keep=2), line).tolist() == [1.5]


def test_multi_krum_is_a_plain_mean_whatever_the_weights() -> None:
    heavy = round_of([[0], [1], [2], [3], [50]], weights=[0.1, 0.7, 0.1, 0.05, 0.05])
    assert made_by(MultiKrum(1, keep=2), heavy).tolist() == [1.5]


@given(small_models(lambda f: 2 * f + 3))
def test_small_differences_between_large_models_are_seen(case: tuple[list[list[int]], int]) -> None:
    """In single precision the squares, a million each, would swallow the squared differences."""
    models, byzantine = case
    shifted = 1000 + torch.tensor(models, dtype=torch.float32) / 256
    assert Krum(byzantine).select(round_of(shifted)).kept == Krum(byzantine).select(round_of(models)).kept


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e6, 1e30])
def test_distances_are_right_if_a_model_in_the_middle_is_far_out_elsewhere(
    shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first 50 coordinates, where a model amid the others is looked for, the fourth is their mean."""
    monkeypatch.setitem(stack.AT_ONCE, "cpu", 9 * 50)
    models = 100 + torch.randn(9, 2000, generator=torch.Generator().manual_seed(3)) / 100
    models[3, :50] = models[:, :50].mean(0)
    models[3, 50:] += shift
    exact = torch.cdist(models.double(), models.double()) ** 2
    found = torch.from_numpy(stack.Stack(models).squared_distances())
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-9)


def test_bulyan_by_hand() -> None:
    """Krum takes 2, 3, 1, 4 and 0, in this order; of these 1, 2 and 3 are nearest to the median, 2."""
    selection = Bulyan(1).select(round_of([[100], [0], [1], [2], [3], [4], [5]]))
    assert selection.kept == (1, 2, 3, 4, 5)
    assert selection.model is not None and selection.model.tolist() == [2.0]


def test_bulyan_without_liars_is_the_mean() -> None:
    assert made_by(Bulyan(0), round_of([[0, 3], [1, 3], [5, 9]])).tolist() == [2.0, 5.0]


# One coordinate at a time


def test_medians_by_hand() -> None:
    assert made_by(CoordinateMedian(), round_of([[1, 9], [7, -2], [3, 4]])).tolist() == [3.0, 4.0]
    assert made_by(CoordinateMedian(), round_of([[1, 9], [7, -2], [3, 4], [4, 5]])).tolist() == [3.5, 4.5]


def test_trimmed_means_by_hand() -> None:
    """⌊0.2 · 5⌋ = 1 goes at each end; ⌊0.3 · 3⌋ = 0 go."""
    assert made_by(TrimmedMean(0.2), round_of([[5], [-100], [1], [100], [3]])).tolist() == [3.0]
    assert made_by(TrimmedMean(0.3), round_of([[5], [1], [3]])).tolist() == [3.0]
    assert made_by(TrimmedMean(0.0), round_of([[5], [1], [0]])).tolist() == [2.0]


def test_rounding_does_not_decide_how_many_are_trimmed() -> None:
    """0.29 · 100 is a little below 29 in floating point: 28 would leave a value of a million in."""
    values = [[0.0]] * 71 + [[1e6]] * 29
    assert made_by(TrimmedMean(0.29), round_of(values)).tolist() == [0.0]


@given(st.integers(1, 9), st.floats(0, 0.5, exclude_max=True))
def test_a_trimmed_mean_leaves_something(models: int, share: float) -> None:
    assert made_by(TrimmedMean(share), round_of([[2.0]] * models)).tolist() == [2.0]


# The geometric median


def test_geometric_medians_by_hand() -> None:
    """The centre of a triangle with equal sides, the middle one of three on a line, and who has most of the weight."""
    triangle = [[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]
    assert made_by(GeometricMedian(), round_of(triangle)).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert made_by(GeometricMedian(), round_of([[0], [1], [10]])).tolist() == pytest.approx([1], abs=1e-3)
    heavy = round_of([[0, 0], [4, 0], [0, 3]], weights=[0.1, 0.3, 0.1])
    assert made_by(GeometricMedian(), heavy).tolist() == pytest.approx([4, 0], abs=1e-3)


def test_the_geometric_median_is_found_however_far_out_a_model_is() -> None:
    """Every model pulls the median its way with force 1: a square's corners must balance one far to the right."""
    square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]) + 100
    for far in (1e6, 1e15, 1e30):
        found = made_by(
            GeometricMedian(), round_of(np.append(square, [[far, 100]], axis=0), dtype=torch.float64)
        ).numpy()
        ways = square - found
        pulls = (ways / np.linalg.norm(ways, axis=1, keepdims=True)).sum(0)
        assert pulls == pytest.approx([-1, 0], abs=1e-4)


@given(st.integers(0, 10**6), st.integers(3, 8))
def test_the_geometric_median_has_the_smallest_sum_of_distances(seed: int, models: int) -> None:
    random = np.random.default_rng(seed)
    points, weights = random.normal(size=(models, 3)), random.uniform(0.5, 1, models)

    def total(point: Array) -> float:
        return float(weights @ np.sqrt(((points - point) ** 2).sum(1) + 1e-12))

    found = made_by(GeometricMedian(), round_of(points, weights, dtype=torch.float64)).numpy()
    best = minimize(
        total, points.mean(0), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 2000}
    )
    assert total(found) <= best.fun + 1e-5


# Updates


def test_clipped_norms_by_hand() -> None:
    """Updates (3, 4) and (0, 1) of (1, 0). The first becomes (1.5, 2) by 2.5, and (1.8, 2.4) by the median norm, 3."""
    updates = round_of([[4, 4], [1, 1]], previous=[1, 0])
    assert made_by(NormClipping(2.5), updates).tolist() == pytest.approx([1.75, 1.5])
    assert made_by(NormClipping(), updates).tolist() == pytest.approx([1.9, 1.7])
    assert made_by(NormClipping(100), replace(updates, weights=torch.tensor([0.1, 0.3]))).tolist() == pytest.approx(
        [1.75, 1.75]
    )


def test_trust_by_hand() -> None:
    """Cosines 1, 0, -1 and 0.6, the server's norm 2: 2 · ((1, 0) + 0.6 · (0.6, 0.8)) / 1.6."""
    updates = [[3.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [3.0, 4.0]]
    selection = one_step().select(round_of(updates, gradient=[2.0, 0]))
    assert selection.kept == (0, 3)
    assert selection.model is not None and selection.model.tolist() == pytest.approx([1.7, 0.6])
    moved = round_of([[u + 7, v - 2] for u, v in updates], previous=[7, -2], gradient=[2.0, 0])
    assert made_by(one_step(), moved).tolist() == pytest.approx([8.7, -1.4])


def test_a_server_that_goes_far_makes_nobody_go_farther_than_the_trusted() -> None:
    """As above, with the trusted ones' median norm 4."""
    updates = [[3.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [3.0, 4.0]]
    assert made_by(one_step(), round_of(updates, gradient=[100.0, 0])).tolist() == pytest.approx([3.4, 1.2])


def test_the_servers_update_is_that_of_sgd_with_momentum() -> None:
    """Velocities 2, 3.8 and 5.42 at a rate of 0.1."""
    update = made_by(FLTrust(steps=3, rate=0.1), round_of([[5.0, 0.0]], gradient=[2.0, 0.0]))
    assert update.tolist() == pytest.approx([1.122, 0.0])


@pytest.mark.parametrize("way", [-1000.0, 1000.0])
def test_a_majority_does_not_make_the_model_move_far(way: float) -> None:
    """Three of five go a thousand times as far as others, the server's way or not."""
    models = [[1.0, 0.0], [3.0, 0.0], *[[way, 0.0]] * 3]
    assert made_by(one_step(), round_of(models, gradient=[1.0, 0.0])).tolist() == pytest.approx([1.0, 0.0])


updates_of_clients = st.lists(
    st.lists(st.floats(-9, 9, width=32), min_size=3, max_size=3), min_size=1, max_size=6
)  # of a model with three weights


@given(updates_of_clients, st.floats(0.1, 20), st.integers(0, 10**6))
def test_norm_clipping_by_the_papers_definition(updates: list[list[float]], bound: float, seed: int) -> None:
    """Sun et al. 2019: w ← w + Σ_k n_k / n · Δ_k / max(1, ‖Δ_k‖ / M)."""
    random = np.random.default_rng(seed)
    previous, examples = random.normal(size=3), random.integers(1, 100, len(updates))
    expected = previous.copy()
    for count, update in zip(examples, np.array(updates), strict=True):
        expected += count / examples.sum() * update / max(1, np.linalg.norm(update) / bound)
    given = round_of(previous + np.array(updates), examples / 1000, previous, dtype=torch.float64)
    assert made_by(NormClipping(bound), given).numpy() == pytest.approx(expected, abs=1e-9)


@given(updates_of_clients, st.floats(0.01, 100), st.integers(0, 10**6))
def test_fltrust_by_the_papers_definition_but_its_length(updates: list[list[float]], length: float, seed: int) -> None:
    """Cao et al. 2021, Algorithm 2, with the gradient for the server's update g_0, and, unlike there, no longer than
    the trusted ones' median.

    TS_i = ReLU(⟨g_i, g_0⟩ / ‖g_i‖‖g_0‖), g = Σ_i TS_i · ‖g_0‖ / ‖g_i‖ · g_i / Σ_i TS_i, w ← w + g.
    """
    updates = [update if np.linalg.norm(update) > 1e-6 else [0.0] * 3 for update in updates]
    random = np.random.default_rng(seed)
    previous, gradient = random.normal(size=3), length * random.normal(size=3)
    moving = [np.array(update) for update in updates if any(update)]

    def cosine(a: Array, b: Array) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    if any(abs(cosine(update, gradient)) < 1e-6 for update in moving):  # rounding may decide
        return
    trusted = [update for update in moving if cosine(update, gradient) > 0]
    expected = previous
    if trusted:
        length_of_server = min(np.linalg.norm(gradient), np.median([np.linalg.norm(update) for update in trusted]))
        scores = [max(0.0, cosine(update, gradient)) for update in moving]
        scaled = [length_of_server / np.linalg.norm(update) * update for update in moving]
        expected = previous + sum(score * one for score, one in zip(scores, scaled, strict=True)) / sum(scores)
    given = round_of(previous + np.array(updates), previous=previous, gradient=gradient, dtype=torch.float64)
    assert made_by(one_step(), given).numpy() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("models", [[[-1.0, 0.0], [-2.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
def test_without_trust_the_model_stays(models: list[list[float]]) -> None:
    selection = FLTrust().select(round_of(models, gradient=[1.0, 0.0]))
    assert selection.kept == ()
    assert selection.model is not None and selection.model.tolist() == [0.0, 0.0]


# Rejection by validation loss and error


def one_number_models(models: Sequence[float]) -> Candidates:
    """Logits (w, 0) and (2w, 0) for two examples of class 0, so that a higher w is better; averaged by p_k."""
    held = torch.tensor(models, dtype=torch.float64).unsqueeze(1)

    def coefficients(kept: Sequence[int]) -> Coefficients:
        return fedpdp(Kept(np.ones(len(kept)), len(models)))

    def predict(model: Tensor) -> Tensor:
        return torch.stack([model * torch.tensor([1.0, 2.0]), torch.zeros(2)], dim=1)

    labels, weights = torch.tensor([0, 0]), torch.ones(len(models))
    return Candidates(
        torch.empty(0),
        labels,
        weights,
        models=held,
        predict=predict,
        previous=torch.zeros(1).double(),
        coefficients=coefficients,
    )


def test_rejection_by_hand() -> None:
    """Without -9 the mean is above 0, and right. Without 1 it is -0.375, without another lower still: all wrong.

    So the loss rejects -9 and then 1; the error rate -9 and then, of equals, the last.
    """
    given = one_number_models([1, 2, -9, 3, 2.5])
    for one in (LossRejection(1), ErrorRejection(1)):
        assert one.select(given).kept == (0, 1, 3, 4)
    assert LossRejection(2).select(given).kept == (1, 3, 4)
    assert ErrorRejection(2).select(given).kept == (0, 1, 3)
    assert UnionRejection(2).select(given).kept == (1, 3)
    for nobody in (LossRejection(0), ErrorRejection(0), UnionRejection(0)):
        assert nobody.select(given).kept == (0, 1, 2, 3, 4)


@given(st.lists(st.floats(-50, 50), min_size=5, max_size=8, unique=True), st.integers(1, 2))
def test_rejection_by_the_papers_definition(models: list[float], byzantine: int) -> None:
    """The impact of a model is the loss (error) of the average with it minus that of the average without it."""
    everyone = range(len(models))

    def loss(kept: Sequence[int]) -> float:
        mean = sum(models[one] for one in kept) / len(kept)
        return float(np.logaddexp(0, -mean) + np.logaddexp(0, -2 * mean)) / 2

    def error(kept: Sequence[int]) -> float:
        return 0.0 if sum(models[one] for one in kept) >= 0 else 1.0

    def rejected(wrong: Callable[[Sequence[int]], float]) -> set[int]:
        impact = [wrong(everyone) - wrong([other for other in everyone if other != one]) for one in everyone]
        return set(sorted(everyone, key=lambda one: (round(impact[one], 9), one))[-byzantine:])

    close = any(abs(loss_a - loss_b) < 1e-6 for loss_a, loss_b in _neighbours(everyone, loss))
    undecided = any(abs(sum(models) - left_out) < 1e-6 for left_out in models)
    if close or undecided:  # rounding may decide
        return
    candidates = one_number_models(models)
    for filter, expected in (
        (LossRejection(byzantine), rejected(loss)),
        (ErrorRejection(byzantine), rejected(error)),
        (UnionRejection(byzantine), rejected(loss) | rejected(error)),
    ):
        assert filter.select(candidates).kept == tuple(sorted(set(everyone) - expected))


@pytest.mark.parametrize("scheme", [fedavg, fedpdp, mean])
@pytest.mark.parametrize("wild", [1.0, 1e30])
def test_averages_without_one_model_are_those_of_the_scheme(scheme: Scheme, wild: float) -> None:
    """However far out the model is that is left out."""
    random = torch.Generator().manual_seed(8)
    models, previous = torch.randn(7, 30, generator=random), torch.randn(30, generator=random)
    models[2] *= wild
    weights = np.arange(1, 8) / 40

    def coefficients(kept: Sequence[int]) -> Coefficients:
        return scheme(Kept(weights[list(kept)], 10))

    given = replace(round_of(models, previous=previous), coefficients=coefficients)
    for position, average in enumerate(averages_without_one(given)):
        others = [other for other in range(7) if other != position]
        torch.testing.assert_close(average, combine(previous, models[others], coefficients(others)))


def _neighbours(everyone: Sequence[int], loss: Callable[[Sequence[int]], float]) -> list[tuple[float, float]]:
    without = sorted(loss([other for other in everyone if other != one]) for one in everyone)
    return list(pairwise(without))


def test_an_average_with_broken_predictions_is_no_reason_to_reject() -> None:
    """Only the average without the first model is broken: that model seems to be needed."""
    given = one_number_models([1, 2, 3])
    predict = given.predict
    assert predict is not None
    broken = replace(given, predict=lambda model: predict(model) * (math.nan if model > 2.2 else 1))
    assert LossRejection(1).select(broken).kept == (0, 2)


# What holds of every rule


@every_rule
@given(seed=st.integers(0, 10**6))
def test_the_order_of_the_models_does_not_matter(rule: str, seed: int) -> None:
    """With three liars: with fewer, Bulyan's last turns are draws between two mutual neighbours, which ids decide."""
    random = np.random.default_rng(seed)
    models, weights, order = random.normal(size=(15, 4)), random.uniform(1, 2, 15), random.permutation(15)
    one = made_by(RULES[rule](3), round_of(models, weights))
    other = made_by(RULES[rule](3), round_of(models[order], weights[order]))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@every_rule
@given(
    model=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5),
    models=st.integers(7, 12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_models_that_agree_stay_as_they_are(rule: str, model: list[float], models: int, dtype: torch.dtype) -> None:
    """For FLTrust they must point the server's way too."""
    agreed = round_of([model] * models, gradient=model, dtype=dtype)
    torch.testing.assert_close(made_by(RULES[rule](1), agreed), torch.tensor(model, dtype=dtype), rtol=1e-6, atol=0)


@every_rule
@given(
    seed=st.integers(0, 10**6),
    models=st.integers(7, 12),
    power=st.one_of(st.floats(-2, 3), st.floats(3, 37)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_one_bad_model_does_not_carry_the_result_away(
    rule: str, seed: int, models: int, power: float, dtype: torch.dtype
) -> None:
    random = np.random.default_rng(seed)
    good = random.normal(size=(models - 1, 4)) + random.normal(size=4)
    bad = random.normal(size=4).clip(-3, 3) * 10**power
    result = made_by(RULES[rule](1), round_of(np.insert(good, random.integers(models), bad, axis=0), dtype=dtype))
    new: Array = result.double().numpy()
    low, high = good.min(0), good.max(0)
    diameter = max(float(np.linalg.norm(a - b)) for a in good for b in good)
    slack = 1e-5
    match rule:
        case "CoordinateMedian" | "TrimmedMean":
            assert (low - slack <= new).all() and (new <= high + slack).all()
        case "Bulyan":  # a bad value that is averaged is no farther from the median than a good one that is not
            assert (2 * low - high - slack <= new).all() and (new <= 2 * high - low + slack).all()
        case "Krum":  # a bad model that is chosen has n - f - 2 good ones about as near as they are to each other
            assert np.linalg.norm(good - new, axis=1).min() <= diameter + slack
        case "MultiKrum":
            assert np.linalg.norm(good - new, axis=1).max() <= 2 * diameter + slack
        case "GeometricMedian":  # with a share α of bad ones, 2 (1 - α) / (1 - 2α) times the radius of the good ones
            centre = good.mean(0)
            radius, alpha = np.linalg.norm(good - centre, axis=1).max(), 1 / models
            assert np.linalg.norm(new - centre) <= 2 * (1 - alpha) / (1 - 2 * alpha) * radius + slack
        case _:  # no farther from the previous model, 0, than some good one
            assert np.linalg.norm(new) <= np.linalg.norm(good, axis=1).max() + slack


@every_rule
def test_stretches_make_no_difference(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = torch.randn(11, 103, generator=torch.Generator().manual_seed(4))
    whole = made_by(RULES[rule](2), round_of(models))
    monkeypatch.setitem(stack.AT_ONCE, "cpu", 80)  # 7 coordinates at a time, 5 in the last stretch
    torch.testing.assert_close(made_by(RULES[rule](2), round_of(models)), whole, rtol=1e-5, atol=1e-6)


@every_rule
def test_each_model_is_asked_for_once(rule: str) -> None:
    given = round_of(np.random.default_rng(5).normal(size=(7, 3)))
    assert isinstance(given.models, list)
    fetched: Counter[int] = Counter()

    class Far(Sequence[Tensor]):
        def __len__(self) -> int:
            return 7

        @overload
        def __getitem__(self, place: int) -> Tensor: ...
        @overload
        def __getitem__(self, place: slice) -> Sequence[Tensor]: ...
        def __getitem__(self, place: Any) -> Any:
            held = given.models
            assert held is not None
            if place < 7:
                fetched[place] += 1
            return held[place]

    RULES[rule](1).select(replace(given, models=Far()))
    assert fetched == Counter(range(7))


@every_rule
def test_models_in_one_tensor_are_as_good_and_stay_as_they_are(rule: str) -> None:
    given = round_of(np.random.default_rng(6).normal(size=(7, 3)))
    assert isinstance(given.models, list) and given.previous is not None
    together = torch.stack(given.models)
    before = together.clone()
    torch.testing.assert_close(made_by(RULES[rule](1), replace(given, models=together)), made_by(RULES[rule](1), given))
    assert torch.equal(together, before) and not given.previous.any()


@pytest.mark.cuda
@every_rule
def test_a_gpu_makes_the_same(rule: str) -> None:
    models = torch.randn(15, 5003, generator=torch.Generator().manual_seed(7))
    on_gpu = made_by(RULES[rule](3), round_of(models, device="cuda"))
    assert on_gpu.device.type == "cuda"
    torch.testing.assert_close(on_gpu.cpu(), made_by(RULES[rule](3), round_of(models)), rtol=1e-5, atol=1e-6)


@every_rule
def test_no_rule_asks_for_logits(rule: str) -> None:
    filter = RULES[rule](1)
    assert filter.needs_models and not filter.needs_logits


# Flower's rules


def flowers(name: str, models: Tensor, examples: Sequence[int] | None = None, **settings: Any) -> Tensor:
    """What Flower's strategy makes of the models [models, size], split into two arrays."""
    app, strategies = pytest.importorskip("flwr.app"), pytest.importorskip("flwr.serverapp.strategy")
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    identity.run_id = identity.node_id = identity.task_id = 1
    replies = [
        app.Message(
            app.RecordDict(
                {
                    "arrays": app.ArrayRecord([model[:3].numpy().copy(), model[3:].reshape(2, -1).numpy().copy()]),
                    "metrics": app.MetricRecord({"num-examples": 10 if examples is None else examples[place]}),
                }
            ),
            place + 1,
            "train",
        )
        for place, model in enumerate(models)
    ]
    arrays, _ = getattr(strategies, name)(**settings).aggregate_train(1, replies)
    return torch.cat([torch.from_numpy(array).flatten() for array in arrays.to_numpy_ndarrays()]).float()


@pytest.mark.parametrize("models", [11, 12])
@pytest.mark.parametrize("seed", range(5))
def test_flower_makes_the_same(models: int, seed: int) -> None:
    drawn = torch.randn(models, 13, generator=torch.Generator().manual_seed(seed))
    for name, settings, filter in (
        ("Krum", {"num_malicious_nodes": 2}, Krum(2)),
        ("MultiKrum", {"num_malicious_nodes": 2, "num_nodes_to_select": 5}, MultiKrum(2, 5)),
        ("FedMedian", {}, CoordinateMedian()),
        ("FedTrimmedAvg", {"beta": 0.2}, TrimmedMean(0.2)),
    ):
        torch.testing.assert_close(made_by(filter, round_of(drawn)), flowers(name, drawn, **settings))


def test_flower_weights_multi_krum_by_examples_where_the_paper_does_not() -> None:
    """Blanchard et al. take the plain mean; a number of examples is one more thing to lie about."""
    drawn = torch.randn(7, 13, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"num_malicious_nodes": 1, "num_nodes_to_select": 4}
    ours = made_by(MultiKrum(1, 4), round_of(drawn))
    torch.testing.assert_close(ours, flowers("MultiKrum", drawn, **settings))
    assert not torch.allclose(ours, flowers("MultiKrum", drawn, range(1, 8), **settings), atol=1e-3)


def test_flower_cuts_one_model_fewer_where_its_share_comes_out_just_below_a_whole_number() -> None:
    """0.29 · 100 is 28.999… in floating point."""
    drawn = torch.randn(100, 13, generator=torch.Generator().manual_seed(0))
    ours = made_by(TrimmedMean(0.29), round_of(drawn))
    torch.testing.assert_close(ours, flowers("FedTrimmedAvg", drawn, beta=0.2901))
    torch.testing.assert_close(made_by(TrimmedMean(0.28), round_of(drawn)), flowers("FedTrimmedAvg", drawn, beta=0.29))
    assert not torch.allclose(ours, flowers("FedTrimmedAvg", drawn, beta=0.29), atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_flower_makes_the_same_bulyan_once_it_selects_as_the_paper_does(seed: int) -> None:
    """El Mhamdi et al. run Krum anew on those left after each choice; Flower scores once and takes the best n - 2f."""
    multikrum = pytest.importorskip("flwr.serverapp.strategy.multikrum")

    def one_by_one(contents: list[Any], byzantine: int, count: int) -> list[Any]:
        left, chosen = list(contents), list[Any]()
        while len(chosen) < count:
            (best,) = multikrum.select_multikrum(left, byzantine, 1)
            chosen.append(best)
            left = [content for content in left if content is not best]
        return chosen

    drawn = torch.randn(12, 13, generator=torch.Generator().manual_seed(seed))
    expected = flowers("Bulyan", drawn, num_malicious_nodes=2, selection_rule=one_by_one)
    torch.testing.assert_close(made_by(Bulyan(2), round_of(drawn)), expected)


# In a round


class NoData(Judge):
    """A server without validation data, whose gradient points to the first coordinate."""

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        raise NotImplementedError

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), torch.tensor([1.0, 0.0])


def sifted(filter: ModelFilter, models: Sequence[Sequence[float]], previous: Sequence[float] = (0.0, 0.0)) -> Sifted:
    """A round in which client 10·k returned the k-th model, one of ten equally large clients."""
    updates = [Update(10 * place, torch.tensor(model), 0.1) for place, model in enumerate(models, start=1)]
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.next_round()
    return Sieve(filter, fedavg, NoData(), 1).sift(
        1,
        torch.tensor(previous),
        updates,
        Counter(update.client for update in updates),
        Population(10, lambda ids: np.full(len(ids), 0.1)),
        stopwatch,
    )


def test_a_model_that_a_filter_made_is_the_new_model() -> None:
    done = sifted(CoordinateMedian(), [[1.0, 9.0], [7.0, -2.0], [3.0, 4.0]])
    assert done.model.tolist() == [3.0, 4.0]
    assert done.kept == [10, 20, 30]
    assert done.coefficients.previous == 0
    assert done.coefficients.clients.tolist() == pytest.approx([1 / 3] * 3)


def test_krum_keeps_no_share_of_the_previous_model_even_with_fedavg() -> None:
    done = sifted(Krum(0), [[1.0, 1.0], [50.0, 50.0], [1.0, 2.0]], previous=[99.0, 99.0])
    assert done.model.tolist() == [1.0, 1.0] and done.kept == [10]
    assert (done.coefficients.previous, done.coefficients.clients.tolist()) == (0.0, [1.0])


def test_updates_are_seen_from_the_previous_model() -> None:
    """Updates (3, 4) and (0, 1) of (1, 0), as above."""
    assert sifted(NormClipping(2.5), [[4.0, 4.0], [1.0, 1.0]], [1.0, 0.0]).model.tolist() == pytest.approx([1.75, 1.5])
    assert sifted(FLTrust(), [[4.0, 4.0], [1.0, 1.0]], [1.0, 0.0]).kept == [10]


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_tiny_update_moves_the_model_no_farther_than_any_other(size: float, sign: float) -> None:
    """It is made as long as the others, whose model holds numbers many times as large."""
    previous = torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(0)), torch.zeros(1)])
    way = torch.zeros(2001)
    way[-1] = 1.0
    models = [*(previous + length * way for length in (1.0, 2.0, 3.0)), previous + sign * size * way]
    candidates = round_of(torch.stack(models), previous=previous, gradient=way * 9)
    moved = made_by(one_step(), candidates) - previous
    length = 2.0 if sign < 0 else 1.5  # the median of those that point the server's way
    assert float(moved[-1]) == pytest.approx(length, rel=1e-5) and float(moved[:-1].abs().max()) < 1e-6


@pytest.mark.parametrize("gradient", [[np.nan, np.nan], [np.inf, 1.0]])
def test_a_gradient_of_no_numbers_leaves_the_model_as_it_was(gradient: list[float]) -> None:
    selection = FLTrust().select(round_of([[1.0, 2.0], [3.0, 4.0]], gradient=gradient))
    assert selection.kept == () and selection.model is not None and selection.model.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["Krum", "MultiKrum", "Bulyan", "GeometricMedian", "NormClipping", "FLTrust"])
def test_buffers_have_no_say_in_whom_to_believe(name: str) -> None:
    """A counter of batches at the end moves with its model, and changes nothing else."""
    random = torch.Generator().manual_seed(0)
    models, counters = torch.randn(7, 5, generator=random), 1000 * torch.rand(7, 1, generator=random)
    plain = round_of(models)
    counted = replace(round_of(torch.cat([models, counters], 1), gradient=[1.0] * 5 + [0.0]), trained=5)
    one, other = (RULES[name](1).select(candidates) for candidates in (plain, counted))
    assert one.kept == other.kept
    if one.weights is not None and other.weights is not None:
        torch.testing.assert_close(one.weights, other.weights)
    else:
        assert one.model is not None and other.model is not None
        torch.testing.assert_close(one.model, other.model[:5])


def test_buffers_are_averaged_by_trust_and_not_made_longer() -> None:
    """The server's way is (1, 0); two go it one and three far, one goes back. Lengthened, 3 and 5 would come to 7."""
    models = [[1.0, 0.0, 3.0], [3.0, 0.0, 5.0], [-1.0, 0.0, 900.0]]
    candidates = replace(round_of(models, previous=[0.0, 0.0, 1.0], gradient=[9.0, 0.0, 0.0]), trained=2)
    assert made_by(one_step(), candidates).tolist() == pytest.approx([2.0, 0.0, 4.0])


def test_a_round_in_which_nobody_is_trusted_leaves_the_model_as_it_was() -> None:
    done = sifted(FLTrust(), [[-1.0, 1.0], [-2.0, 0.0]])
    assert done.model.tolist() == [0.0, 0.0] and done.kept == []
    assert (done.coefficients.previous, done.coefficients.clients.tolist()) == (1.0, [])


def test_a_filter_that_needs_no_models_is_told_of_no_previous_one() -> None:
    class Look(KeepAll):
        def select(self, candidates: Candidates) -> Selection:
            assert candidates.models is None and candidates.previous is None
            return super().select(candidates)

    assert sifted(Look(), [[1.0, 1.0]]).kept == [10]


# Bad input


@pytest.mark.parametrize(
    ("filter", "models", "message"),
    [
        (Krum(1), 4, "4 usable models, n ≥ 2f + 3 needed with f = byzantine = 1"),
        (Krum(0), 2, "2 usable models, n ≥ 2f + 3 needed with f = byzantine = 0"),
        (MultiKrum(2, 1), 6, "6 usable models, n ≥ 2f + 3 needed with f = byzantine = 2"),
        (MultiKrum(0, 5), 4, "4 usable models, keep = 5 needed"),
        (Bulyan(1), 6, "6 usable models, n ≥ 4f + 3 needed with f = byzantine = 1"),
    ],
)
def test_too_few_models_are_refused_in_one_line(filter: ModelFilter, models: int, message: str) -> None:
    with pytest.raises(TooFewUpdates) as caught:
        filter.select(round_of([[1.0]] * models))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("filter", "models", "needed"),
    [(LossRejection(2), 2, "f + 1"), (ErrorRejection(1), 1, "f + 1"), (UnionRejection(1), 2, "2f + 1")],
)
def test_rejection_must_leave_somebody(filter: ModelFilter, models: int, needed: str) -> None:
    with pytest.raises(TooFewUpdates, match=f"^{models} usable models, n ≥ {re.escape(needed)} needed"):
        filter.select(one_number_models([1.0] * models))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Krum(-1), "byzantine"),
        (lambda: Bulyan(True), "byzantine"),
        (lambda: LossRejection(1.5), "byzantine"),  # type: ignore[arg-type]
        (lambda: MultiKrum(1, 0), "keep"),
        (lambda: TrimmedMean(0.5), "share"),
        (lambda: TrimmedMean(-0.1), "share"),
        (lambda: TrimmedMean(math.nan), "share"),
        (lambda: NormClipping(0), "bound"),
        (lambda: NormClipping(math.inf), "bound"),
        (lambda: NormClipping(math.nan), "bound"),
    ],
)
def test_bad_settings_are_refused_by_name(make: Callable[[], ModelFilter], field: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{field}: .* is not allowed; use [^\n]*$"):
        make()


@given(
    models=st.integers(0, 30),
    byzantine=st.integers(0, 8),
    nonsense=st.integers(0, 8),
    times=st.integers(1, 4),
    more=st.integers(1, 3),
)
def test_liars_that_sent_nonsense_are_liars_no_longer_feared(
    models: int, byzantine: int, nonsense: int, times: int, more: int
) -> None:
    there = Candidates(torch.empty(0), torch.empty(0), torch.ones(models), nonsense=nonsense)
    allowed = [
        f for f in range(max(0, byzantine - nonsense), byzantine + 1) if models >= times * f + more
    ]  # by brute force
    if allowed:
        assert liars_among(models, there, byzantine, times, more) == max(allowed)
    else:
        with pytest.raises(TooFewUpdates):
            liars_among(models, there, byzantine, times, more)


def test_bulyan_goes_on_when_liars_unmask_themselves() -> None:
    # 15 asked with f = 3, just enough; 4 send NaN. 11 are left, enough for f = 2: Bulyan as if it had been told that.
    models = torch.randn(11, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    told = Candidates(torch.empty(0), torch.empty(0), torch.ones(11), models=models)
    with pytest.raises(TooFewUpdates):
        Bulyan(3).select(told)
    ours, expected = Bulyan(3).select(replace(told, nonsense=4)), Bulyan(2).select(told)
    assert ours.kept == expected.kept
    assert ours.model is not None and expected.model is not None and torch.equal(ours.model, expected.model)


def test_how_many_lie_may_come_from_numpy() -> None:
    assert Krum(np.int64(1)).byzantine == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("filter", "said"),
    [
        (Krum(5), "'Krum' is not allowed; use it where at least 13 clients are asked in a round, not 6"),
        (FineTuning(Bulyan(1)), "'FineTuning' is not allowed; use it where at least 7 clients are asked"),
        (LossRejection(6), "'LossRejection' is not allowed; use it where at least 7 clients are asked"),
    ],
)
def test_too_few_clients_for_a_filter_are_said_before_the_run(filter: ModelFilter, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=f"^filter: {said}"):
        fs.run(fs.Config(clients=15, ratio=0.4), filter=filter, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [{"scored_by": "weights", "clients": 13}, {"search": "exhaustive", "clients": 25}])
def test_too_many_models_to_search_are_said_before_the_run(settings: dict[str, Any]) -> None:
    most = settings["clients"] - 1
    with pytest.raises(InvalidSetting, match=f"^filter: 'CombinatorialFilter' .* at most {most} clients"):
        fs.run(fs.Config(algorithm="fedca", ratio=1.0, heterogeneity="iid", **settings))
