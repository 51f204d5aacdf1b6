"""Averaging: Table 1 of the paper row by row, and what holds for any clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsieve.averaging import Coefficients, Kept, Scheme, add_up, combine, fedavg, fedpdp, mean, rounded, share_of

# Four clients with p = 0.1, 0.2, 0.3, 0.4. The global model is 10, theirs are 1, 2, 3, 4.
P = np.array([0.1, 0.2, 0.3, 0.4])
PREVIOUS = torch.tensor([10.0], dtype=torch.float64)
MODELS = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)


def literal(kept: Kept) -> Coefficients:
    return fedpdp(kept, normalise=False)


def averaged(scheme: Scheme, clients: list[int], counts: list[int] | None = None) -> tuple[list[float], float]:
    """All coefficients, the previous model's first, and the new model."""
    drawn = np.ones(len(clients), dtype=np.int64) if counts is None else np.array(counts)
    coefficients = scheme(Kept(P[clients], population=4, counts=drawn))
    return [coefficients.previous, *coefficients.clients.tolist()], combine(
        PREVIOUS, MODELS[clients], coefficients
    ).item()


def test_fedavg_row_of_table_1() -> None:
    """S^t = {2, 4}: p_1 + p_3 = 0.4 stays with the previous model, 0.4·10 + 0.2·2 + 0.4·4 = 6."""
    coefficients, model = averaged(fedavg, [1, 3])
    assert coefficients == pytest.approx([0.4, 0.2, 0.4])
    assert model == pytest.approx(6.0)


def test_fedavg_of_everyone_forgets_the_previous_model() -> None:
    coefficients, model = averaged(fedavg, [0, 1, 2, 3])
    assert coefficients == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert model == pytest.approx(0.1 + 0.4 + 0.9 + 1.6)


def test_fedprox_row_of_table_1() -> None:
    """S^t = {1, 2, 2, 4}: (1 + 2 + 2 + 4) / 4 = 2.25, whatever the p_k."""
    coefficients, model = averaged(mean, [0, 1, 3], counts=[1, 2, 1])
    assert coefficients == pytest.approx([0, 0.25, 0.5, 0.25])
    assert model == pytest.approx(2.25)


def test_fedprox_with_each_client_once_is_the_plain_mean() -> None:
    coefficients, model = averaged(mean, [1, 2, 3])
    assert coefficients == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert model == pytest.approx(3.0)


def test_fedpdp_row_of_table_1_as_printed() -> None:
    """S^t = {2, 4}, |S|/|S^t| = 2: 0.4·2 + 0.8·4 = 4."""
    coefficients, model = averaged(literal, [1, 3])
    assert coefficients == pytest.approx([0, 0.4, 0.8])
    assert model == pytest.approx(4.0)


def test_fedpdp_row_of_table_1_normalised() -> None:
    """S^t = {2, 4}: 0.2/0.6 = 1/3 and 0.4/0.6 = 2/3, so 2/3 + 8/3 = 10/3."""
    coefficients, model = averaged(fedpdp, [1, 3])
    assert coefficients == pytest.approx([0, 1 / 3, 2 / 3])
    assert model == pytest.approx(10 / 3)


def test_fedca_and_fedcm_rows_of_table_1() -> None:
    """S^t = {1, 2, 4} of which S_opt = {1, 4} is kept: as printed p_k·4/2, normalised 0.1/0.5 and 0.4/0.5."""
    coefficients, model = averaged(literal, [0, 3])
    assert coefficients == pytest.approx([0, 0.2, 0.8])
    assert model == pytest.approx(0.2 + 3.2)
    coefficients, model = averaged(fedpdp, [0, 3])
    assert coefficients == pytest.approx([0, 0.2, 0.8])
    assert model == pytest.approx(3.4)


def test_fedca_with_one_model_kept() -> None:
    """S_opt = {4}: as printed 0.4·4/1 = 1.6 times the model, normalised the model itself."""
    coefficients, model = averaged(literal, [3])
    assert coefficients == pytest.approx([0, 1.6]) and model == pytest.approx(6.4)
    coefficients, model = averaged(fedpdp, [3])
    assert coefficients == pytest.approx([0, 1.0]) and model == pytest.approx(4.0)


def test_clients_that_weigh_nothing_share_equally() -> None:
    assert fedpdp(Kept(np.zeros(4), population=9)).clients.tolist() == [0.25] * 4


def test_a_client_is_counted_once_unless_said_otherwise() -> None:
    assert mean(Kept(np.array([0.2, 0.3, 0.5]), population=3)).clients.tolist() == pytest.approx([1 / 3] * 3)


@st.composite
def kept_clients(draw: st.DrawFn) -> Kept:
    sizes = np.array(draw(st.lists(st.integers(1, 1000), min_size=1, max_size=30)), dtype=np.float64)
    chosen = draw(st.integers(1, len(sizes)))
    counts = draw(st.lists(st.integers(1, 5), min_size=chosen, max_size=chosen))
    return Kept((sizes / sizes.sum())[:chosen], population=len(sizes), counts=np.array(counts))


def reordered(kept: Kept, order: NDArray[np.int64]) -> Kept:
    return Kept(kept.weights[order], kept.population, kept.counts[order])


every_scheme = pytest.mark.parametrize("scheme", [fedavg, mean, fedpdp, literal])


@pytest.mark.parametrize("scheme", [fedavg, mean, fedpdp])
@given(kept=kept_clients())
def test_coefficients_sum_to_one_and_none_is_negative(scheme: Scheme, kept: Kept) -> None:
    coefficients = scheme(kept)
    assert coefficients.previous + coefficients.clients.sum() == pytest.approx(1)
    assert coefficients.previous >= 0 and (coefficients.clients >= 0).all()


@every_scheme
@given(kept=kept_clients(), seed=st.integers(0, 2**32))
def test_the_order_of_clients_does_not_matter(scheme: Scheme, kept: Kept, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(kept.weights))
    straight, shuffled = scheme(kept), scheme(reordered(kept, order))
    assert shuffled.previous == pytest.approx(straight.previous, abs=1e-12)
    np.testing.assert_allclose(shuffled.clients, straight.clients[order], rtol=1e-12)


@given(population=st.integers(1, 50), share=st.floats(0, 1))
def test_literal_and_normalised_agree_when_clients_are_of_equal_size(population: int, share: float) -> None:
    chosen = max(1, round(share * population))
    kept = Kept(np.full(chosen, 1 / population), population)
    np.testing.assert_allclose(literal(kept).clients, fedpdp(kept).clients, rtol=1e-12)


@given(kept=kept_clients())
def test_literal_is_normalised_times_a_factor(kept: Kept) -> None:
    factor = kept.weights.sum() * kept.population / len(kept.weights)
    np.testing.assert_allclose(literal(kept).clients, fedpdp(kept).clients * factor, rtol=1e-12)


@pytest.mark.parametrize("share_of_previous", [0.0, 0.3])
@pytest.mark.parametrize("stacked", [True, False])
def test_combining_is_a_weighted_sum_of_every_entry(share_of_previous: float, stacked: bool) -> None:
    random = np.random.default_rng(0)
    previous, models, shares = random.normal(size=7), random.normal(size=(5, 7)), random.random(5)
    vectors = torch.from_numpy(models)
    combined = combine(
        torch.from_numpy(previous), vectors if stacked else list(vectors), Coefficients(share_of_previous, shares)
    )
    for entry in range(7):
        by_hand = share_of_previous * previous[entry]
        for model, share in zip(models, shares, strict=True):
            by_hand += share * model[entry]
        assert combined[entry].item() == pytest.approx(by_hand)


def test_combining_changes_none_of_its_inputs() -> None:
    previous, models = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    result = combine(previous, models, Coefficients(0.5, np.array([0.25, 0.25])))
    assert result.tolist() == [2.5, 3.5]
    assert previous.tolist() == [1, 2] and models.tolist() == [[3, 4], [5, 6]]


def test_a_broken_previous_model_with_no_share_does_no_harm() -> None:
    result = combine(torch.tensor([float("nan")]), [torch.tensor([2.0])], Coefficients(0.0, np.array([1.0])))
    assert result.tolist() == [2.0]


def test_one_coefficient_per_model_or_none_is_combined() -> None:
    with pytest.raises(ValueError, match="shorter"):
        combine(torch.zeros(1), [torch.ones(1), torch.ones(1)], Coefficients(0.0, np.array([1.0])))


@given(seed=st.integers(0, 10**6), count=st.integers(2, 12))
def test_a_sum_is_the_same_in_any_order(seed: int, count: int) -> None:
    """Weights a few steps of single precision apart: their sums often lie halfway between two numbers."""
    random = np.random.default_rng(seed)
    start = torch.from_numpy(random.normal(size=500).astype(np.float32))
    steps = torch.from_numpy(random.integers(-9, 10, size=(count, 500)).astype(np.int32))
    models = (start.view(torch.int32) + steps).view(torch.float32)
    shares, order = np.full(count, 1 / count), random.permutation(count)
    whole = combine(start, list(models), Coefficients(0.0, shares))
    assert torch.equal(whole, combine(start, [models[place] for place in order], Coefficients(0.0, shares[order])))
    parts = [add_up(share_of(start, 0.0), models[chosen], shares[chosen]) for chosen in (order[:1], order[1:])]
    assert torch.equal(whole, rounded(parts[1] + parts[0], torch.float32))


def test_large_models_are_added_up_in_their_order_whatever_the_threads() -> None:
    models = torch.randn(19, 1_200_001, generator=torch.Generator().manual_seed(0))
    shares = np.random.default_rng(0).dirichlet(np.ones(19)).tolist()
    expected = torch.zeros(1_200_001, dtype=torch.float64)
    for model, share in zip(models, shares, strict=True):
        expected.add_(model.double(), alpha=share)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found = add_up(torch.zeros(1_200_001, dtype=torch.float64), iter(models), shares)  # asked for one by one
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(threads)
