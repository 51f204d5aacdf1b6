"""The agnostic sampler against Stochastic-AFL (Mohri et al. 2019), its projection against a quadratic programme."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedsieve.errors import InvalidSetting
from fedsieve.sampling import AgnosticSampler, Feedback
from fedsieve.sampling.agnostic import onto_simplex

CLIENTS = [-3, 0, 1, 4, 7, 20, 21, 22, 300, 2**50]


def begun(
    weights: dict[int, float], step: float | None = 0.1, exploration: float = 0.1, seed: int = 3
) -> AgnosticSampler:
    sampler = AgnosticSampler(step, exploration)
    sampler.begin(seed, np.array(list(weights), dtype=np.int64), np.array(list(weights.values()), dtype=np.float64))
    return sampler


def sampled(sampler: AgnosticSampler, round: int, clients: list[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


def mixture(sampler: AgnosticSampler) -> dict[int, float]:
    state = sampler.state_dict()
    return dict(zip(state["clients"], state["lambda"], strict=True))


# The projection


def nearest_by_trying_every_support(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point of the simplex among those that are 0 outside a set of places, for every such set."""
    places = range(point.size)
    best: NDArray[np.float64] | None = None
    for support in chain.from_iterable(combinations(places, size) for size in range(1, point.size + 1)):
        inside = list(support)
        candidate = np.zeros(point.size)
        candidate[inside] = point[inside] + (1 - point[inside].sum()) / len(inside)
        closer = best is None or np.linalg.norm(candidate - point) < np.linalg.norm(best - point)
        if candidate.min() >= 0 and closer:
            best = candidate
    assert best is not None
    return best


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=7))
@settings(max_examples=150, deadline=None)
def test_the_projection_is_the_nearest_point(values: list[float]) -> None:
    point = np.array(values)
    assert onto_simplex(point) == pytest.approx(nearest_by_trying_every_support(point), abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_the_projection_solves_the_quadratic_programme(seed: int) -> None:
    point = np.random.default_rng(seed).normal(size=12)
    solved = minimize(
        lambda x: ((x - point) ** 2).sum(),
        np.full(12, 1 / 12),
        jac=lambda x: 2 * (x - point),
        bounds=[(0, None)] * 12,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(12)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert onto_simplex(point) == pytest.approx(solved.x, abs=1e-5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_the_projection_lies_on_the_simplex_and_stays_there(values: list[float]) -> None:
    once = onto_simplex(np.array(values))
    assert once.min() >= 0
    assert once.sum() == pytest.approx(1, abs=1e-8)
    assert onto_simplex(once) == pytest.approx(once, abs=1e-8)


# The sampler


def test_one_step_by_hand() -> None:
    """λ = (0.2, 0.3, 0.5), 5 drawn once, 9 twice: gradient (0.6 / (3 · 0.2), 2 · 0.9 / (3 · 0.3), 0) = (1, 2, 0)."""
    sampler = begun({5: 2, 9: 3, 1: 5}, step=0.1, exploration=0)
    sampler.observe(Feedback(1, [5, 9, 9], [], {5: 0.6, 9: 0.9}))
    assert mixture(sampler) == pytest.approx({5: 0.3 - 0.1, 9: 0.5 - 0.1, 1: 0.5 - 0.1})


@pytest.mark.parametrize("seed", range(3))
def test_follows_a_transcription(seed: int) -> None:
    step, exploration = 0.05, 0.2
    sampler = begun(dict.fromkeys(CLIENTS, 1.0), step, exploration, seed)
    lam = dict.fromkeys(CLIENTS, 0.1)
    random = np.random.default_rng(seed)
    for round in range(1, 40):
        there = random.permutation(CLIENTS)[:7].tolist()
        asked = sampled(sampler, round, there, 4)
        assert len(asked) == 4 and set(asked) <= set(there)
        mass = sum(lam[k] for k in there)
        chance = {k: (1 - exploration) * lam[k] / mass + exploration / 7 if mass > 0 else 1 / 7 for k in there}
        losses = {k: float(random.random()) for k in asked}
        sampler.observe(Feedback(round, asked, [], losses))
        ahead = {k: lam[k] + step * losses.get(k, 0) * asked.count(k) / (4 * chance.get(k, 1)) for k in CLIENTS}
        projected = nearest_by_bisection(list(ahead.values()))
        lam = dict(zip(CLIENTS, projected, strict=True))
        assert mixture(sampler) == pytest.approx(lam, abs=1e-9)
        lam = mixture(sampler)


def nearest_by_bisection(point: list[float]) -> list[float]:
    """All fall by one amount, found by halving an interval."""
    low, high = min(point) - 1, max(point)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(x - middle, 0) for x in point) > 1 else (low, middle)
    return [max(x - low, 0) for x in point]


def test_the_step_is_right_on_average() -> None:
    """Losses divided by chances: the mean over many draws of the step before projection is the true one."""
    losses = {1: 0.5, 2: 1.0, 3: 0.25, 4: 0.75}
    moved = np.zeros(4)
    for seed in range(3000):
        sampler = begun({1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}, step=1e-4, seed=seed)
        asked = sampled(sampler, 1, [1, 2, 3, 4], 3)
        sampler.observe(Feedback(1, asked, [], {client: losses[client] for client in asked}))
        moved += np.array(list(mixture(sampler).values())) - [0.4, 0.3, 0.2, 0.1]
    # inside the simplex a projection takes the mean off
    assert moved / 3000 / 1e-4 == pytest.approx(np.array(list(losses.values())) - 0.625, abs=0.1)


def test_clients_are_drawn_by_the_mixture() -> None:
    sampler = begun({3: 0.5, -8: 0.3, 12: 0.2}, exploration=0)
    seen = Counter(client for round in range(1, 4001) for client in sampled(sampler, round, [3, -8, 12], 2))
    expected = {3: 4000, -8: 2400, 12: 1600}
    assert sum((seen[k] - expected[k]) ** 2 / expected[k] for k in expected) < 13.82  # 2 degrees of freedom, p = 0.001


def test_the_client_that_the_model_is_worst_for_gains_weight() -> None:
    sampler = begun(dict.fromkeys(CLIENTS, 1.0), step=0.01)
    for round in range(1, 300):
        asked = sampled(sampler, round, CLIENTS, 4)
        sampler.observe(Feedback(round, asked, [], {client: 1.0 if client == 20 else 0.3 for client in asked}))
    assert max(mixture(sampler), key=mixture(sampler).__getitem__) == 20
    assert mixture(sampler)[20] > 0.5


def test_exploration_brings_back_who_has_no_weight() -> None:
    alone = begun({1: 1.0, 2: 0.0}, exploration=0)
    exploring = begun({1: 1.0, 2: 0.0}, exploration=0.5)
    rounds = range(1, 100)
    assert {client for round in rounds for client in sampled(alone, round, [1, 2], 1)} == {1}
    assert {client for round in rounds for client in sampled(exploring, round, [1, 2], 1)} == {1, 2}


def test_where_nobody_there_has_weight_all_are_equally_likely() -> None:
    sampler = begun({1: 1.0, 2: 0.0, 3: 0.0}, exploration=0)
    seen = Counter(client for round in range(1, 1001) for client in sampled(sampler, round, [2, 3, 99], 1))
    assert all(seen[client] == pytest.approx(333, abs=60) for client in (2, 3, 99))  # four standard deviations


def test_a_round_without_losses_teaches_nothing() -> None:
    sampler = begun({1: 0.25, 2: 0.75})
    before = sampler.state_dict()
    sampler.observe(Feedback(1, [1, 2], [], {1: float("nan"), 9: 3.0}))
    assert sampler.state_dict() == before


def test_new_weights_leave_the_mixture_as_it_is() -> None:
    sampler = begun({1: 0.25, 2: 0.75})
    sampler.weigh(np.array([1, 2, 3]), np.array([0.8, 0.1, 0.1]))
    assert mixture(sampler) == {1: 0.25, 2: 0.75}


def test_unless_told_otherwise_a_step_is_small_beside_an_equal_share_however_many_clients_there_are() -> None:
    for clients in (10, 1000):
        stated, by_itself = (begun(dict.fromkeys(range(clients), 1.0), step) for step in (0.01 / clients, None))
        for sampler in (stated, by_itself):
            asked = sampled(sampler, 1, list(range(clients)), clients // 10)
            sampler.observe(Feedback(1, asked, [], dict.fromkeys(asked, 2.3)))
        assert mixture(by_itself) == mixture(stated)
        assert 1.1 / clients < max(mixture(by_itself).values()) < 2 / clients


@given(seed=st.integers(0, 2**32), stop=st.integers(1, 15), step=st.floats(1e-3, 10))
@settings(max_examples=30, deadline=None)
def test_neither_order_nor_a_restart_matters_while_clients_come_and_go(seed: int, stop: int, step: float) -> None:
    weights = dict.fromkeys(CLIENTS[:-2], 1.0)
    original = twin = begun(weights, step, seed=seed)
    random = np.random.default_rng(seed)
    for round in range(1, 20):
        if round == stop:
            twin = begun(weights, step, seed=seed)
            twin.load_state_dict(json.loads(json.dumps(original.state_dict(), allow_nan=False)))
        there = random.permutation(CLIENTS)[: int(random.integers(1, 11))].tolist()
        before = original.state_dict()
        asked = sampled(original, round, there, 4)
        assert asked == sampled(twin, round, there[::-1], 4)
        assert original.state_dict() == before
        losses = {client: float(random.random()) for client in asked}
        for sampler in {id(original): original, id(twin): twin}.values():
            sampler.observe(Feedback(round, asked, [], losses))
        assert sum(mixture(original).values()) == pytest.approx(1)
    assert original.state_dict() == twin.state_dict()


@pytest.mark.parametrize("wrong", [{"step": 0}, {"exploration": 1.5}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        AgnosticSampler(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(wrong))


@pytest.mark.parametrize("weights", [{1: 0.0, 2: 0.0}, {1: -1.0, 2: 2.0}, {1: float("nan"), 2: 1.0}])
def test_weights_that_are_no_mixture_are_refused(weights: dict[int, float]) -> None:
    with pytest.raises(InvalidSetting, match=r"^weights: "):
        begun(weights)


def test_who_could_not_be_drawn_teaches_nothing() -> None:
    """On Flower somebody may turn out to be another than who was asked."""
    sampler = AgnosticSampler(exploration=0)
    sampler.begin(0, np.array([1, 2]), np.array([0.5, 0.5]))
    sampler.sample(1, [1, 2], 2)
    sampler.observe(Feedback(1, [1, 7], [], {1: 0.0, 7: 1.0}))
    assert mixture(sampler) == {1: 0.5, 2: 0.5}
    unbegun = AgnosticSampler()
    unbegun.observe(Feedback(1, [3], [], {3: 1.0}))
    assert sum(mixture(unbegun).values()) == pytest.approx(1)
