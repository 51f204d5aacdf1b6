"""Samplers: what every one of them promises, and how often the memoryless ones ask whom."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsieve.errors import InvalidSetting
from fedsieve.randomness import keys, torch_draws
from fedsieve.sampling import (
    AgnosticSampler,
    ClientSampler,
    CSUCBQSampler,
    CSUCBSampler,
    FavorSampler,
    FedCSSampler,
    Feedback,
    Memory,
    OortSampler,
    PowerOfChoiceSampler,
    ProportionalSampler,
    ThompsonSampler,
    UCBSampler,
    UniformSampler,
)
from fedsieve.sampling.compression import Compression
from fedsieve.sampling.double_dqn import network
from fedsieve.sampling.favor import Agent


def favor(clients: Sequence[int] = (1, 4, 7)) -> FavorSampler:
    """With an agent that has learnt nothing."""
    ids = np.array(sorted(clients), dtype=np.int64)
    with torch_draws(0, "models and a network"):
        models = torch.randn(len(ids), 5)
        compression = Compression.of(models, 1)
        values = network(1 + len(ids), len(ids), hidden=4).state_dict()
    sampler = FavorSampler(Agent(ids, compression, compression([models[0]])[0], values))
    sampler.global_model, sampler.local_models = lambda: models[0], lambda chosen: iter([list(models)])
    return sampler


def fedcs() -> FedCSSampler:
    """With time for everybody."""
    sampler = FedCSSampler(1e9)
    sampler.device_times = lambda clients: (np.ones(clients.size), np.ones(clients.size), np.ones(clients.size))
    return sampler


def power_of_choice_exact() -> PowerOfChoiceSampler:
    sampler = PowerOfChoiceSampler(losses="exact")
    sampler.local_losses = lambda round, clients, examples: keys(0, "losses", round, clients)
    return sampler


MAKERS: dict[str, Callable[[], ClientSampler]] = {
    "uniform": UniformSampler,
    "proportional": ProportionalSampler,
    "ucb fresh": UCBSampler,
    "ucb stale": lambda: UCBSampler(refresh="stale"),
    "thompson fresh": ThompsonSampler,
    "thompson stale": lambda: ThompsonSampler(refresh="stale"),
    "ucb discounted": lambda: UCBSampler(memory=Memory(0.9)),
    "ucb window": lambda: UCBSampler(memory=Memory(window=5)),
    "thompson discounted": lambda: ThompsonSampler(memory=Memory(0.9)),
    "thompson window": lambda: ThompsonSampler(memory=Memory(window=5)),
    "power-of-choice": PowerOfChoiceSampler,
    "power-of-choice exact": power_of_choice_exact,
    "oort": OortSampler,
    "fedcs": fedcs,
    "cs-ucb": CSUCBSampler,
    "cs-ucb-q": lambda: CSUCBQSampler(0.2),
    "agnostic": AgnosticSampler,
    "favor": favor,
}
WITHOUT_REPLACEMENT = [name for name in MAKERS if name not in ("proportional", "agnostic")]
BANDITS = [name for name in MAKERS if name.startswith(("ucb", "thompson"))]

every_sampler = pytest.mark.parametrize("name", MAKERS)
ANY_ID = st.integers(-(2**63), 2**63 - 1)


def begun(name: str, clients: list[int], seed: int = 3) -> ClientSampler:
    """A sampler of a run whose clients weigh 1, 2, 3, ... in the order of their ids."""
    sampler = favor(clients) if name == "favor" else MAKERS[name]()
    sampler.begin(seed, np.array(sorted(clients), dtype=np.int64), np.arange(1, len(clients) + 1, dtype=np.float64))
    return sampler


def sampled(sampler: ClientSampler, round: int, clients: list[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


def play(sampler: ClientSampler, rounds: range, clients: list[int], count: int) -> list[list[int]]:
    """Rounds in which chance, the same for every sampler, decides who is kept."""
    asked = []
    for round in rounds:
        asked.append(sampled(sampler, round, clients, count))
        coins = np.random.default_rng(round).random(max(clients) + 1)
        kept = [client for client in asked[-1] if coins[client] < 0.5]
        sampler.observe(Feedback(round, asked[-1], kept))
    return asked


@st.composite
def populations(draw: st.DrawFn) -> tuple[list[int], int]:
    clients = draw(st.lists(ANY_ID, min_size=1, max_size=30, unique=True))
    return clients, draw(st.integers(0, len(clients)))


@every_sampler
@given(case=populations(), round=st.integers(1, 1000), seed=st.integers(0, 2**32))
@example(case=([2**63 - 1, -(2**63)], 1), round=1, seed=0)
@example(case=([2**63 - 1, -(2**63), 2**63 - 2], 3), round=1, seed=0)
@settings(max_examples=60, deadline=None)
def test_as_many_available_clients_as_asked_for_in_any_listing_order(
    name: str, case: tuple[list[int], int], round: int, seed: int
) -> None:
    clients, count = case
    asked = sampled(begun(name, clients, seed), round, clients, count)
    assert len(asked) == count
    assert set(asked) <= set(clients)
    if name in WITHOUT_REPLACEMENT:
        assert len(set(asked)) == count
    assert asked == sorted(asked)
    assert asked == sampled(begun(name, clients, seed), round, clients[::-1], count)
    assert asked == sampled(begun(name, clients, seed), round, sorted(clients), count)


@every_sampler
def test_same_seed_and_round_same_clients(name: str) -> None:
    clients = list(range(40))
    one, other = begun(name, clients), begun(name, clients)
    assert [sampled(one, round, clients, 7) for round in range(1, 6)] == [
        sampled(other, round, clients, 7) for round in range(1, 6)
    ]


@every_sampler
def test_other_rounds_and_other_seeds_ask_others(name: str) -> None:
    clients = list(range(40))
    sampler = begun(name, clients)
    over_rounds = {tuple(sampled(sampler, round, clients, 7)) for round in range(1, 21)}
    over_seeds = {tuple(sampled(begun(name, clients, seed), 1, clients, 7)) for seed in range(20)}
    # a stale Thompson sampler that is told nothing keeps the draws it began with; an agent is the same for all seeds
    assert (len(over_rounds) == 1) == (name in ("thompson stale", "favor"))
    assert (len(over_seeds) == 1) == (name == "favor")


@every_sampler
def test_sampling_touches_no_global_generator(name: str) -> None:
    def states() -> tuple[Any, ...]:
        of_numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        return random.getstate(), of_numpy["key"].tolist(), of_numpy["pos"], torch.get_rng_state().tolist()

    before, clients = states(), list(range(9))
    sampler = begun(name, clients)
    for round in range(1, 31):
        asked = sampled(sampler, round, clients, 3)
        losses = {} if name == "favor" else {client: 1.0 + client for client in asked}
        sampler.observe(Feedback(round, asked, asked[:1], losses, losses))
    assert states() == before


@every_sampler
def test_a_second_run_knows_nothing_of_the_first(name: str) -> None:
    clients = list(range(12))
    used, new = begun(name, clients), begun(name, clients)
    fresh = json.dumps(new.state_dict())
    play(used, range(1, 20), clients, 4)
    assert json.dumps(used.state_dict()) != fresh or not used.state_dict() or name == "agnostic"
    used.begin(3, np.array(clients, dtype=np.int64), np.arange(1, len(clients) + 1, dtype=np.float64))
    assert json.dumps(used.state_dict()) == fresh
    assert play(used, range(1, 20), clients, 4) == play(new, range(1, 20), clients, 4)


@every_sampler
def test_beliefs_are_those_of_their_round_for_ever(name: str) -> None:
    clients = list(range(6))
    sampler = begun(name, clients)
    play(sampler, range(1, 9), clients, 3)
    beliefs = sampler.beliefs(8)
    if beliefs is None:
        return
    then = [part.tolist() for part in (beliefs.clients, beliefs.mean, beliefs.width)]
    losses = {} if name == "favor" else dict.fromkeys(clients, 2.0)
    sampler.observe(Feedback(9, clients, clients[:2], losses, losses))
    assert [part.tolist() for part in (beliefs.clients, beliefs.mean, beliefs.width)] == then


@every_sampler
def test_a_round_in_which_nobody_could_be_reached_is_no_trouble(name: str) -> None:
    clients = list(range(6))
    sampler = begun(name, clients)
    sampler.observe(Feedback(1, [], []))
    assert len(sampled(sampler, 2, clients, 3)) == 3


@every_sampler
def test_clients_may_come_and_go(name: str) -> None:
    everyone = list(range(12))
    sampler = begun(name, everyone)
    draws = np.random.default_rng(0)
    for round in range(1, 60):
        there = draws.choice(everyone, size=int(draws.integers(4, 13)), replace=False).tolist()
        asked = sampled(sampler, round, there, 4)
        assert len(asked) == 4 and set(asked) <= set(there)
        sampler.observe(Feedback(round, asked, [client for client in asked if client % 2]))


@every_sampler
def test_a_loaded_twin_continues_identically(name: str) -> None:
    clients = list(range(15))
    original = begun(name, clients)
    play(original, range(1, 20), clients, 5)
    text = json.dumps(original.state_dict())
    twin = begun(name, clients)
    twin.load_state_dict(json.loads(text))
    assert json.dumps(twin.state_dict()) == text
    assert play(original, range(20, 50), clients, 5) == play(twin, range(20, 50), clients, 5)
    assert original.state_dict() == twin.state_dict()


@pytest.mark.parametrize("name", BANDITS)
def test_without_its_state_a_bandit_goes_another_way(name: str) -> None:
    clients = list(range(15))
    original, forgetful = begun(name, clients), begun(name, clients)
    play(original, range(1, 20), clients, 5)
    assert play(original, range(20, 50), clients, 5) != play(forgetful, range(20, 50), clients, 5)


@pytest.mark.parametrize("name", BANDITS)
def test_saved_state_stays_what_it_was(name: str) -> None:
    clients = list(range(15))
    sampler = begun(name, clients)
    play(sampler, range(1, 10), clients, 5)
    state = sampler.state_dict()
    text = json.dumps(state)
    play(sampler, range(10, 20), clients, 5)
    assert json.dumps(state) == text


@every_sampler
def test_a_client_listed_twice_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^clients: 4 is not allowed; use each client id once$"):
        begun(name, [1, 4, 7]).sample(1, [4, 7, 1, 4], 2)


@pytest.mark.parametrize("name", WITHOUT_REPLACEMENT)
def test_more_clients_than_there_are_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^count: 4 is not allowed; use 0 to 3, "):
        begun(name, [1, 4, 7]).sample(1, [1, 4, 7], 4)


@every_sampler
@pytest.mark.parametrize(
    ("clients", "count", "field"),
    [
        ([1, 4, 7], -1, "count"),
        ([], 1, "count"),
        ([1.0, 4.5], 1, "clients"),
        ([[1, 4], [7, 8]], 1, "clients"),
        ([True, False], 1, "clients"),
        (["1", "4"], 1, "clients"),
    ],
)
def test_unusable_populations_are_refused_by_name(name: str, clients: Any, count: int, field: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        begun(name, [1, 4, 7]).sample(1, clients, count)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WITHOUT_REPLACEMENT)
def test_an_id_too_large_for_a_signed_integer_is_refused_not_changed(name: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        MAKERS[name]().sample(1, np.array([3, 2**63 + 5], dtype=np.uint64), 2)
    assert caught.value.field == "clients"


@every_sampler
def test_nobody_is_asked_when_nobody_should_be(name: str) -> None:
    assert sampled(begun(name, [1, 2]), 1, [1, 2], 0) == []
    assert sampled(begun(name, [1, 2]), 1, [], 0) == []


# Uniform: every set of clients equally often


def test_every_pair_is_equally_likely_under_uniform_sampling() -> None:
    clients = [-5, 0, 1, 2, 1000, 2**40]
    sampler = UniformSampler(seed=0)
    seen = Counter(tuple(sampled(sampler, round, clients, 2)) for round in range(1, 3001))
    pairs = list(combinations(clients, 2))
    assert set(seen) == set(pairs)
    statistic = sum((seen[pair] - 200) ** 2 / 200 for pair in pairs)
    assert statistic < 36.12  # chi-square, 14 degrees of freedom, p = 0.001


# Proportional: p_k, with replacement


def test_draws_follow_the_weights_independently() -> None:
    weights = {3: 0.5, -8: 0.3, 12: 0.2}
    sampler = ProportionalSampler(weights, seed=5)
    places = Counter[int]()
    pairs = Counter[tuple[int, ...]]()
    for round in range(1, 4001):
        pair = sampled(sampler, round, [3, -8, 12], 2)
        places.update(pair)
        pairs[tuple(pair)] += 1
    expected = {client: weight * 8000 for client, weight in weights.items()}
    statistic = sum((places[client] - expected[client]) ** 2 / expected[client] for client in weights)
    assert statistic < 13.82  # chi-square, 2 degrees of freedom, p = 0.001
    by_hand = {(3, 3): 0.25, (-8, -8): 0.09, (12, 12): 0.04, (-8, 3): 0.30, (3, 12): 0.20, (-8, 12): 0.12}
    assert set(pairs) == set(by_hand)
    statistic = sum((pairs[pair] - 4000 * share) ** 2 / (4000 * share) for pair, share in by_hand.items())
    assert statistic < 20.52  # chi-square, 5 degrees of freedom, p = 0.001


def test_more_places_than_clients_are_fine_with_replacement() -> None:
    asked = sampled(ProportionalSampler({1: 1, 2: 1}), 1, [1, 2], 9)
    assert len(asked) == 9 and set(asked) <= {1, 2}


def test_weights_belong_to_ids_not_to_positions() -> None:
    sampler = ProportionalSampler()
    sampler.begin(0, np.array([9, 2, 5]), np.array([0.0, 1.0, 0.0]))
    assert sampled(sampler, 1, [9, 5, 2], 6) == [2] * 6


@pytest.mark.parametrize("name", ["proportional", "power-of-choice", "power-of-choice exact"])
def test_new_weights_take_the_place_of_those_before(name: str) -> None:
    clients, weights = np.array([9, 2, 5, 7]), np.array([0.1, 0.2, 0.3, 0.4])
    told_first, told_later = MAKERS[name](), begun(name, [2, 5, 9, 11])
    told_first.begin(3, clients, weights)
    told_later.weigh(clients, weights)
    for round in range(1, 30):
        assert sampled(told_later, round, [2, 5, 7, 9], 1) == sampled(told_first, round, [2, 5, 7, 9], 1)


def test_a_client_without_weight_is_never_drawn() -> None:
    sampler = ProportionalSampler({1: 0, 2: 1, 3: 0, 4: 1, 5: 0})
    seen = {client for round in range(1, 200) for client in sampled(sampler, round, [1, 2, 3, 4, 5], 3)}
    assert seen == {2, 4}


def test_absent_clients_leave_the_others_their_proportions() -> None:
    sampler = ProportionalSampler({1: 0.6, 2: 0.3, 3: 0.1}, seed=2)
    seen = Counter(client for round in range(1, 1501) for client in sampled(sampler, round, [2, 3], 2))
    assert set(seen) == {2, 3}
    assert seen[2] / 3000 == pytest.approx(0.75, abs=0.03)  # four standard deviations


def test_the_scale_of_the_weights_does_not_matter() -> None:
    small, large = ProportionalSampler({1: 0.25, 2: 0.75}), ProportionalSampler({1: 250, 2: 750})
    for round in range(1, 50):
        assert sampled(small, round, [1, 2], 5) == sampled(large, round, [1, 2], 5)


@pytest.mark.parametrize("known", [{1: 0.5, 2: 0.5}, {8: 1.0}, {}, None])
def test_a_client_of_unknown_weight_is_named(known: dict[int, float] | None) -> None:
    with pytest.raises(InvalidSetting, match=r"^clients: 7 is not allowed; use clients whose weight is known$"):
        ProportionalSampler(known).sample(1, [7], 1)


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
def test_weights_must_be_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(InvalidSetting, match=rf"^weights: {bad} is not allowed"):
        ProportionalSampler({1: 0.5, 2: bad})


def test_some_weight_must_be_positive() -> None:
    with pytest.raises(InvalidSetting, match="weights"):
        ProportionalSampler({1: 0.0, 2: 0.0}).sample(1, [1, 2], 1)
