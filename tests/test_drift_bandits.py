"""Bandits that forget, against sums over the whole history, weighed as Garivier & Moulines 2011 and others do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import InvalidSetting
from fedsieve.sampling import BanditSampler, Feedback, Memory, ThompsonSampler, UCBSampler

CLIENTS = [-3, 0, 1, 4, 7, 20, 21, 22, 300, 2**50]
FADING = [Memory(discount=0.9), Memory(discount=0.5), Memory(window=1), Memory(window=6)]
every_memory = pytest.mark.parametrize("memory", FADING, ids=str)
both_bandits = pytest.mark.parametrize("bandit", [UCBSampler, ThompsonSampler])


def ids(clients: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(clients, dtype=np.int64)


def sampled(sampler: BanditSampler, round: int, clients: Sequence[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


def learnt(sampler: BanditSampler, client: int) -> list[float]:
    state = sampler.state_dict()
    return [state[column][state["clients"].index(client)] for column in sampler.columns]


class History:
    """Every reward of every round, weighed afresh whenever one asks: slow and plain."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.rounds: list[dict[int, float]] = []

    def sums(self, client: int) -> tuple[float, float]:
        """N_t and N_t X̄_t: how often the client was asked and kept, by the weight of each round."""
        asked = kept = 0.0
        for age, rewards in enumerate(reversed(self.rounds)):
            inside = self.memory.window is None or age < self.memory.window
            if client in rewards and inside:
                asked += self.memory.discount**age
                kept += self.memory.discount**age * rewards[client]
        return asked, kept

    def effective_rounds(self, t: int) -> float:
        ages = range(t if self.memory.window is None else min(t, self.memory.window))
        return sum(self.memory.discount**age for age in ages)


@every_memory
@pytest.mark.parametrize("seed", range(3))
def test_ucb_follows_the_weighted_sums_of_its_source(memory: Memory, seed: int) -> None:
    sampler = UCBSampler(seed=seed, memory=memory)
    coins = dict(zip(CLIENTS, sampler.start(ids(CLIENTS))["mean"].tolist(), strict=True))
    history = History(memory)
    random = np.random.default_rng(seed)
    for t in range(1, 61):
        there = random.permutation(CLIENTS)[:7].tolist()
        index = {}
        for client in CLIENTS:
            asked_before, kept_before = history.sums(client)
            mean = (coins[client] + kept_before) / (1 + asked_before)
            index[client] = mean + math.sqrt(1.5 * math.log(history.effective_rounds(t)) / (1 + asked_before))
        asked = sampled(sampler, t, there, 4)
        weakest = min(index[client] for client in asked)
        assert weakest >= max(index[client] for client in there if client not in asked) - 1e-8, f"round {t}"
        kept = [client for client in asked if random.random() < 0.5]
        sampler.observe(Feedback(t, asked, kept))
        history.rounds.append({client: float(client in kept) for client in asked})
        for client in sampler.state_dict()["clients"]:
            times, sum_kept = history.sums(client)
            assert learnt(sampler, client) == pytest.approx(
                [(coins[client] + sum_kept) / (1 + times), 1 + times], abs=1e-10
            )


@every_memory
def test_thompson_follows_the_weighted_sums_of_its_source(memory: Memory) -> None:
    """Beta(S_k + 1, F_k + 1) with S_k ← γ S_k + r_k, or S_k the sum over the window."""
    sampler = ThompsonSampler(seed=1, memory=memory)
    history = History(memory)
    random = np.random.default_rng(1)
    for t in range(1, 61):
        asked = sampled(sampler, t, random.permutation(CLIENTS)[:7].tolist(), 4)
        kept = [client for client in asked if random.random() < 0.5]
        sampler.observe(Feedback(t, asked, kept))
        history.rounds.append({client: float(client in kept) for client in asked})
        for client in sampler.state_dict()["clients"]:
            times, successes = history.sums(client)
            assert learnt(sampler, client) == pytest.approx([1 + successes, 1 + times - successes], abs=1e-10)


def test_discounted_thompson_by_hand() -> None:
    sampler = ThompsonSampler(memory=Memory(discount=0.5))
    sampler.observe(Feedback(1, [5, 8], kept=[8]))
    sampler.observe(Feedback(2, [5], kept=[5]))
    assert learnt(sampler, 5) == [2, 1.5]
    assert learnt(sampler, 8) == [1.5, 1]


def test_a_window_of_one_round_by_hand() -> None:
    sampler = UCBSampler(memory=Memory(window=1))
    coin = sampler.start(ids([8]))["mean"].item()
    sampler.observe(Feedback(1, [5, 8], kept=[8]))
    assert learnt(sampler, 8) == [(coin + 1) / 2, 2]
    sampler.observe(Feedback(2, [5], kept=[5]))
    assert learnt(sampler, 8) == [coin, 1]


@pytest.mark.parametrize(
    ("memory", "rounds"),
    [(Memory(), 7), (Memory(window=3), 3), (Memory(window=9), 7), (Memory(discount=0.5), 2 - 2**-6)],
)
def test_how_many_rounds_count(memory: Memory, rounds: float) -> None:
    assert memory.rounds(7) == pytest.approx(rounds, rel=1e-12)


@both_bandits
@pytest.mark.parametrize("memory", [Memory(discount=1.0), Memory(window=1000)], ids=str)
def test_a_memory_that_reaches_back_to_the_start_changes_nothing(bandit: type[BanditSampler], memory: Memory) -> None:
    plain, remembering = bandit(seed=4), bandit(seed=4, memory=memory)
    for round in range(1, 60):
        asked = sampled(plain, round, CLIENTS, 4)
        assert asked == sampled(remembering, round, CLIENTS, 4)
        for sampler in (plain, remembering):
            sampler.observe(Feedback(round, asked, kept=asked[::2]))
    states = plain.state_dict(), remembering.state_dict()
    assert all(states[1][name] == value for name, value in states[0].items())


@both_bandits
def test_a_bandit_that_remembers_everything_saves_what_it_always_did(bandit: type[BanditSampler]) -> None:
    assert set(bandit().state_dict()) == {"clients", *bandit.columns, "index", "to_refresh"}


@both_bandits
@pytest.mark.parametrize("memory", [Memory(discount=0.97), Memory(window=60)], ids=str)
def test_a_client_that_turned_bad_is_soon_known_to_be(bandit: type[BanditSampler], memory: Memory) -> None:
    lasting, fading = bandit(), bandit(memory=memory)
    for round in range(1, 1061):
        for sampler in (lasting, fading):
            sampler.observe(Feedback(round, [3], kept=[3] if round <= 1000 else []))
    assert lasting.beliefs(1060).mean.item() > 0.9
    assert fading.beliefs(1060).mean.item() < 0.2


@pytest.mark.parametrize("memory", [Memory(discount=0.98), Memory(window=60)], ids=str)
def test_thompson_finds_the_new_best_client_sooner(memory: Memory) -> None:
    """Client 3 is the only useful one for 1000 rounds, client 6 for the 200 after."""
    right: dict[Memory, int] = {}
    for how in (Memory(), memory):
        sampler = ThompsonSampler(seed=1, memory=how)
        right[how] = 0
        for round in range(1, 1201):
            useful = 3 if round <= 1000 else 6
            now = sampled(sampler, round, [3, 5, 6], 1)
            right[how] += round > 1000 and now == [useful]
            sampler.observe(Feedback(round, now, kept=[client for client in now if client == useful]))
    assert right[memory] > 150 > right[Memory()]


@both_bandits
@every_memory
def test_a_loaded_twin_continues_identically(bandit: type[BanditSampler], memory: Memory) -> None:
    original = bandit(seed=2, memory=memory)
    twin = original
    for round in range(1, 50):
        if round == 20:
            text = json.dumps(original.state_dict())
            twin = bandit(seed=2, memory=memory)
            twin.load_state_dict(json.loads(text))
            assert json.dumps(twin.state_dict()) == text
        asked = sampled(original, round, CLIENTS, 4)
        assert asked == sampled(twin, round, CLIENTS[::-1], 4)
        for sampler in {id(original): original, id(twin): twin}.values():
            sampler.observe(Feedback(round, asked, kept=asked[:2]))
    assert original.state_dict() == twin.state_dict()


@both_bandits
@given(
    memory=st.one_of(
        st.floats(0.05, 1).map(lambda discount: Memory(discount=discount)),
        st.integers(1, 9).map(lambda window: Memory(window=window)),
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_parameters_stay_in_range_while_clients_come_and_go(
    bandit: type[BanditSampler], memory: Memory, seed: int
) -> None:
    sampler = bandit(seed=seed, memory=memory)
    random = np.random.default_rng(seed)
    for round in range(1, 30):
        there = random.permutation(CLIENTS)[: int(random.integers(3, 11))].tolist()
        asked = sampled(sampler, round, there, 3)
        assert len(set(asked)) == 3 and set(asked) <= set(there)
        sampler.observe(Feedback(round, asked, kept=[client for client in asked if random.random() < 0.5]))
    state = sampler.state_dict()
    least = {"mean": 0, "count": 1, "alpha": 1, "beta": 1}
    assert all(min(state[column]) >= least[column] - 1e-9 for column in sampler.columns)
    assert max(state.get("mean", [0])) <= 1 + 1e-9
    assert len(state.get("window", [])) <= (memory.window or 0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"discount": 0}, "discount"),
        ({"discount": 1.1}, "discount"),
        ({"discount": float("nan")}, "discount"),
        ({"window": 0}, "window"),
        ({"window": 5, "discount": 0.9}, "window"),
    ],
)
def test_an_impossible_memory_is_refused(settings: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Memory(**settings)  # type: ignore[arg-type]
    assert caught.value.field == field


@both_bandits
def test_the_stale_reading_cannot_forget(bandit: type[BanditSampler]) -> None:
    with pytest.raises(InvalidSetting, match=r"^refresh: 'stale' is not allowed; use 'fresh' where memory fades$"):
        bandit("stale", memory=Memory(window=4))
