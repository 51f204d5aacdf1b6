"""Randomness: a draw depends on (seed, purpose, round, client) and on nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedsieve
from fedsieve.randomness import generator, keys, torch_draws

ANY_ID = st.integers(-(2**63), 2**63 - 1)
BASE = (1, "purpose", 2, 3)
OTHERS = [(9, "purpose", 2, 3), (1, "reason", 2, 3), (1, "purpose", 9, 3), (1, "purpose", 2, 9)]


def ids(*clients: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(clients, dtype=np.int64)


def chi_square(draws: np.ndarray[tuple[int], np.dtype[np.float64]], bins: int = 100) -> float:
    expected = len(draws) / bins
    seen = [0] * bins
    for draw in draws.tolist():
        seen[int(draw * bins)] += 1
    return sum((count - expected) ** 2 / expected for count in seen)


def test_generator_repeats() -> None:
    assert np.array_equal(generator(*BASE).random(50), generator(*BASE).random(50))


@pytest.mark.parametrize("other", OTHERS)
def test_generator_differs_by_each_of_its_arguments(other: tuple[int, str, int, int]) -> None:
    assert not np.isclose(generator(*BASE).random(50), generator(*other).random(50)).any()


def test_swapped_numbers_are_other_numbers() -> None:
    places = [(1, "purpose", 2, 3), (1, "purpose", 3, 2), (2, "purpose", 1, 3), (12, "purpose", 0, 3)]
    assert len({generator(*place).random() for place in places}) == len(places)


def test_generator_takes_negative_and_huge_numbers() -> None:
    clients = [-1, 1, -(2**63), 2**63 - 1, 2**100]
    assert len({generator(0, "purpose", 0, client).random() for client in clients}) == len(clients)


@given(st.lists(ANY_ID, min_size=1, max_size=20, unique=True))
def test_a_clients_key_is_the_same_whoever_else_is_there(clients: list[int]) -> None:
    together = dict(zip(clients, keys(5, "purpose", 3, ids(*clients)).tolist(), strict=True))
    backwards = dict(zip(clients[::-1], keys(5, "purpose", 3, ids(*clients[::-1])).tolist(), strict=True))
    alone = {client: keys(5, "purpose", 3, ids(client)).item() for client in clients}
    assert together == backwards == alone


@given(st.lists(ANY_ID, min_size=2, max_size=50, unique=True))
def test_keys_of_any_ids_lie_in_the_unit_interval_and_differ(clients: list[int]) -> None:
    drawn = keys(5, "purpose", 3, ids(*clients)).tolist()
    assert all(0 <= key < 1 for key in drawn)
    assert len(set(drawn)) == len(clients)


def test_keys_leave_the_ids_as_they_were() -> None:
    clients = np.arange(5, dtype=np.int64)
    keys(0, "purpose", 0, clients)
    assert clients.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("other", [(9, "purpose", 2), (1, "reason", 2), (1, "purpose", 9)])
def test_keys_differ_by_seed_purpose_and_round(other: tuple[int, str, int]) -> None:
    clients = np.arange(50, dtype=np.int64)
    assert not np.isclose(keys(1, "purpose", 2, clients), keys(*other, clients)).any()


CRITICAL_99 = 148.23  # chi-square, 99 degrees of freedom, p = 0.001


@pytest.mark.parametrize("spread", [1, -1, 2**40])
def test_keys_are_uniform_over_clients(spread: int) -> None:
    clients = np.arange(20_000, dtype=np.int64) * spread
    assert chi_square(keys(7, "purpose", 1, clients)) < CRITICAL_99


def test_keys_of_one_client_are_uniform_over_rounds_and_seeds() -> None:
    over_rounds = np.concatenate([keys(7, "purpose", round, ids(12)) for round in range(10_000)])
    over_seeds = np.concatenate([keys(seed, "purpose", 1, ids(12)) for seed in range(10_000)])
    assert chi_square(over_rounds) < CRITICAL_99
    assert chi_square(over_seeds) < CRITICAL_99


def test_neighbouring_clients_and_rounds_have_unrelated_keys() -> None:
    clients = np.arange(20_000, dtype=np.int64)
    first, second = keys(7, "purpose", 1, clients), keys(7, "purpose", 2, clients)
    bound = 4 / np.sqrt(20_000)  # four standard deviations of a correlation that is 0
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound


def test_torch_draws_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with torch_draws(1, "purpose", 2, 3):
        torch.rand(10)
        torch.nn.Linear(4, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_draws_restores_the_global_generator_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"), torch_draws(1, "purpose"):
        torch.rand(10)
        raise RuntimeError("inside")
    assert torch.equal(torch.get_rng_state(), before)


def drawn_by_torch(seed: int, purpose: str, round: int, client: int) -> list[float]:
    with torch_draws(seed, purpose, round, client):
        return torch.rand(20).tolist()


def test_torch_draws_do_not_depend_on_what_was_drawn_before() -> None:
    first = drawn_by_torch(*BASE)
    with torch.random.fork_rng():
        torch.rand(123)
        assert drawn_by_torch(*BASE) == first


@pytest.mark.parametrize("other", OTHERS)
def test_torch_draws_differ_by_each_argument(other: tuple[int, str, int, int]) -> None:
    assert drawn_by_torch(*BASE) != drawn_by_torch(*other)


def test_the_global_generators_are_used_in_one_place_where_threads_wait_for_each_other() -> None:
    """Forking them elsewhere gave runs of other threads other initial models."""
    source = Path(fedsieve.__file__).parent
    users = {file.name for file in source.rglob("*.py") if "fork_rng" in file.read_text(encoding="utf-8")}
    assert users == {"randomness.py"}
