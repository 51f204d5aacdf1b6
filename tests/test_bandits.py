"""Bandit samplers against Algorithms 2 and 3 of the paper, written down once more in dictionaries and loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import count as numbers

import numpy as np
import pytest

from fedsieve.errors import InvalidSetting
from fedsieve.randomness import generator, keys
from fedsieve.sampling import BanditSampler, Feedback, ThompsonSampler, UCBSampler
from fedsieve.sampling.bandit import Refresh

CLIENTS = [-3, 0, 1, 4, 7, 20, 21, 22, 300, 2**50]
both_readings = pytest.mark.parametrize("refresh", ["fresh", "stale"])
both_bandits = pytest.mark.parametrize("bandit", [UCBSampler, ThompsonSampler])


def ids(clients: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(clients, dtype=np.int64)


def sampled(sampler: BanditSampler, round: int, clients: Sequence[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


def memory(sampler: BanditSampler, *columns: str) -> dict[int, tuple[float, ...]]:
    """What the sampler has learnt of each client it has asked."""
    state = sampler.state_dict()
    return dict(zip(state["clients"], zip(*(state[column] for column in columns), strict=True), strict=True))


def ucb_starting_with(means: dict[int, int], refresh: Refresh = "fresh") -> UCBSampler:
    """A sampler whose coins fell this way."""
    for seed in numbers():
        sampler = UCBSampler(refresh, seed)
        if sampler.start(ids(list(means)))["mean"].tolist() == list(means.values()):
            return sampler
    raise AssertionError


def keep(random: np.random.Generator, asked: list[int]) -> list[int]:
    """Chance keeps clients, those later in the list more often."""
    return [client for client in asked if random.random() < (CLIENTS.index(client) + 1) / len(CLIENTS)]


# Algorithm 2, FedCM-UCB


class TranscribedUCB:
    """Lines 1-4, with a_k for the undefined a_t."""

    def __init__(self, first_means: dict[int, float], refresh: Refresh) -> None:
        self.refresh = refresh
        self.mean = dict(first_means)
        self.a = dict.fromkeys(first_means, 1)
        self.index = dict(first_means)  # before the first round: t = 1, ln 1 = 0
        self.before: list[int] = []

    def indices(self, t: int) -> dict[int, float]:
        for k in self.mean:
            if self.refresh == "fresh" or k in self.before:
                self.index[k] = self.mean[k] + math.sqrt(3 * math.log(t) / (2 * self.a[k]))
        return self.index

    def update(self, asked: list[int], kept: list[int]) -> None:
        for k in asked:
            reward = 1 if k in kept else 0
            self.mean[k] = (self.a[k] * self.mean[k] + reward) / (self.a[k] + 1)
            self.a[k] += 1
        self.before = asked


@both_readings
@pytest.mark.parametrize("seed", range(5))
def test_ucb_follows_algorithm_2(refresh: Refresh, seed: int) -> None:
    sampler = UCBSampler(refresh, seed)
    first = dict(zip(CLIENTS, sampler.start(ids(CLIENTS))["mean"].tolist(), strict=True))
    paper = TranscribedUCB(first, refresh)
    random = np.random.default_rng(seed)
    for t in range(1, 81):
        there = random.permutation(CLIENTS)[:7].tolist()
        index = paper.indices(t)
        asked = sampled(sampler, t, there, 4)
        weakest = min(index[client] for client in asked)
        strongest_left = max(index[client] for client in there if client not in asked)
        assert weakest >= strongest_left - 1e-8, f"round {t}"
        kept = keep(random, asked)
        sampler.observe(Feedback(t, asked, kept))
        paper.update(asked, kept)
        for client, (mean, count) in memory(sampler, "mean", "count").items():
            assert mean == pytest.approx(paper.mean[client], abs=1e-12)
            assert count == paper.a[client]


def test_ucb_by_hand() -> None:
    """Three clients, two asked; √(1.5 ln t / a) is 1.0197 and 0.7210 in round 2 for a = 1, 2, and so on."""
    sampler = ucb_starting_with({1: 1, 2: 0, 3: 1})
    assert sampled(sampler, 1, [1, 2, 3], 2) == [1, 3]  # ln 1 = 0: indices 1, 0, 1
    sampler.observe(Feedback(1, [1, 3], kept=[1]))
    assert memory(sampler, "mean", "count") == {1: (1, 2), 3: (0.5, 2)}

    assert sampled(sampler, 2, [1, 2, 3], 2) == [1, 3]  # 1.7210, 1.0197, 1.2210
    sampler.observe(Feedback(2, [1, 3], kept=[1]))
    assert memory(sampler, "mean", "count") == {1: (1, 3), 3: (pytest.approx(1 / 3), 3)}

    assert sampled(sampler, 3, [1, 2, 3], 2) == [1, 2]  # 1.7412, 1.2837, 1.0745
    sampler.observe(Feedback(3, [1, 2], kept=[2]))
    assert memory(sampler, "mean", "count") == {1: (0.75, 4), 2: (0.5, 2), 3: (pytest.approx(1 / 3), 3)}

    assert sampled(sampler, 4, [1, 2, 3], 1) == [2]  # 1.4710, 1.5197, 1.1659


def test_ucb_index_by_hand() -> None:
    arms = {"mean": np.array([0.5, 0.25]), "count": np.array([2.0, 8.0])}
    index = UCBSampler().tried_index(4, ids([1, 2]), arms)
    assert index.tolist() == pytest.approx([0.5 + 1.0196670, 0.25 + 0.5098335], abs=1e-6)


def test_ucb_prefers_arms_tried_less() -> None:
    sampler = ucb_starting_with({1: 1, 2: 1, 3: 1})
    for round in (1, 2):
        sampler.observe(Feedback(round, [1, 3], kept=[1, 3]))
    sampler.observe(Feedback(3, [2], kept=[2]))
    assert memory(sampler, "mean", "count") == {1: (1, 3), 2: (1, 2), 3: (1, 3)}
    assert sampled(sampler, 4, [1, 2, 3], 1) == [2]


def test_ucb_starts_from_fair_coins() -> None:
    means = UCBSampler(seed=4).start(np.arange(10_000, dtype=np.int64))["mean"]
    assert set(means.tolist()) == {0.0, 1.0}
    assert means.mean() == pytest.approx(0.5, abs=0.02)  # four standard deviations


def test_starved_under_the_stale_reading_asked_under_the_fresh_one() -> None:
    """An arm whose first mean was 0 keeps index 0, below any that is refreshed: the reason for the default."""
    asked: dict[Refresh, Counter[int]] = {}
    for refresh in ("fresh", "stale"):
        sampler = ucb_starting_with({1: 1, 2: 0, 3: 1, 4: 0}, refresh)
        asked[refresh] = Counter()
        for round in range(1, 61):
            now = sampled(sampler, round, [1, 2, 3, 4], 2)
            asked[refresh].update(now)
            sampler.observe(Feedback(round, now, kept=[client for client in now if client in (2, 4)]))
    assert asked["stale"] == {1: 60, 3: 60}  # although they are never kept
    assert asked["fresh"][2] + asked["fresh"][4] > 90


# Algorithm 3, FedCM-TS


class TranscribedThompson:
    """Lines 1-4. The draws are the sampler's: one generator a round, arms that are drawn anew in the order of ids."""

    def __init__(self, clients: list[int], refresh: Refresh, seed: int) -> None:
        self.refresh = refresh
        self.seed = seed
        self.alpha = dict.fromkeys(clients, 1)
        self.beta = dict.fromkeys(clients, 1)
        self.theta = {k: keys(seed, "thompson untried", 0, ids([k])).item() for k in clients}
        self.before: list[int] = []

    def draws(self, t: int) -> dict[int, float]:
        random = generator(self.seed, "thompson", t)
        for k in sorted(self.theta):
            untried = self.alpha[k] + self.beta[k] == 2
            if self.refresh == "fresh" and untried:
                self.theta[k] = keys(self.seed, "thompson untried", t, ids([k])).item()
            elif self.refresh == "fresh" or k in self.before:
                self.theta[k] = random.beta(self.alpha[k], self.beta[k])
        return self.theta

    def update(self, asked: list[int], kept: list[int]) -> None:
        for k in asked:
            reward = 1 if k in kept else 0
            self.alpha[k] += reward
            self.beta[k] += 1 - reward
        self.before = asked


@both_readings
@pytest.mark.parametrize("seed", range(5))
def test_thompson_follows_algorithm_3(refresh: Refresh, seed: int) -> None:
    sampler = ThompsonSampler(refresh, seed)
    paper = TranscribedThompson(CLIENTS, refresh, seed)
    random = np.random.default_rng(seed)
    for t in range(1, 81):
        there = random.permutation(CLIENTS)[:7].tolist()
        theta = paper.draws(t)
        asked = sampled(sampler, t, there, 4)
        by_theta = sorted(there, key=theta.__getitem__)
        assert asked == sorted(by_theta[-4:]), f"round {t}"
        kept = keep(random, asked)
        sampler.observe(Feedback(t, asked, kept))
        paper.update(asked, kept)
        for client, learnt in memory(sampler, "alpha", "beta").items():
            assert learnt == (paper.alpha[client], paper.beta[client])


def test_thompson_by_hand() -> None:
    sampler = ThompsonSampler()
    assert sampler.start(ids([5]))["alpha"] == sampler.start(ids([5]))["beta"] == 1
    sampler.observe(Feedback(1, [5, 8], kept=[8]))
    sampler.observe(Feedback(2, [5, 8, 9], kept=[5, 8]))
    assert memory(sampler, "alpha", "beta") == {5: (2, 2), 8: (3, 1), 9: (1, 2)}


def test_thompson_draws_from_the_beta_distribution() -> None:
    arms = {"alpha": np.array([1.0, 8.0, 2.0]), "beta": np.array([1.0, 2.0, 18.0])}
    drawn = np.array([ThompsonSampler(seed=6).tried_index(round, ids([1, 2, 3]), arms) for round in range(1, 3001)])
    for arm, (a, b) in enumerate([(1, 1), (8, 2), (2, 18)]):
        mean, variance = a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1))
        assert drawn[:, arm].mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / 3000))
        assert drawn[:, arm].var() == pytest.approx(variance, rel=0.15)


def test_untried_arms_of_thompson_are_drawn_uniformly() -> None:
    drawn = ThompsonSampler(seed=6).untried_index(3, np.arange(10_000, dtype=np.int64))
    quarters = np.bincount((drawn * 4).astype(int))
    assert quarters.tolist() == pytest.approx([2500] * 4, abs=180)  # four standard deviations


# Both


@both_bandits
def test_an_arm_that_is_always_kept_is_asked_more(bandit: type[BanditSampler]) -> None:
    clients = list(range(10))
    for seed in range(5):
        sampler = bandit(seed=seed)
        asked = Counter[int]()
        for round in range(1, 201):
            now = sampled(sampler, round, clients, 2)
            asked.update(now)
            sampler.observe(Feedback(round, now, kept=[client for client in now if client == 6]))
        assert asked[6] > 120
        assert all(asked[client] < 60 for client in clients if client != 6)


@both_bandits
@both_readings
def test_every_client_is_equally_likely_to_be_asked_first(bandit: type[BanditSampler], refresh: Refresh) -> None:
    first = Counter(client for seed in range(1000) for client in sampled(bandit(refresh, seed), 1, range(10), 4))
    assert all(first[client] == pytest.approx(400, abs=62) for client in range(10))  # four standard deviations


def test_ties_are_broken_at_random_and_anew_each_round() -> None:
    clients = list(range(8))
    sampler = ucb_starting_with(dict.fromkeys(clients, 1))
    asked = Counter(client for round in range(1, 1001) for client in sampled(sampler, round, clients, 2))
    assert all(asked[client] == pytest.approx(250, abs=55) for client in clients)


def test_rounding_of_equal_means_breaks_no_tie() -> None:
    """0.1 + 0.2 is not 0.3 in binary; two arms whose means agree but for that must both get their turn."""
    sampler = UCBSampler()
    state = UCBSampler().state_dict() | {"clients": [1, 2], "mean": [0.1 + 0.2, 0.3], "count": [5, 5], "index": [0, 0]}
    sampler.load_state_dict(state)
    assert {tuple(sampled(sampler, round, [1, 2], 1)) for round in range(2, 30)} == {(1,), (2,)}


@both_bandits
def test_a_client_drawn_twice_is_rewarded_once(bandit: type[BanditSampler]) -> None:
    once, twice = bandit(), bandit()
    once.observe(Feedback(1, [3, 5], kept=[3]))
    twice.observe(Feedback(1, [3, 5, 3], kept=[3, 3]))
    assert once.state_dict() == twice.state_dict()


@both_bandits
@both_readings
def test_the_order_of_feedback_does_not_matter(bandit: type[BanditSampler], refresh: Refresh) -> None:
    one, other = bandit(refresh), bandit(refresh)
    for round in range(1, 30):
        asked = sampled(one, round, CLIENTS, 4)
        assert asked == sampled(other, round, CLIENTS[::-1], 4)
        one.observe(Feedback(round, asked, asked[:2]))
        other.observe(Feedback(round, asked[::-1], asked[1::-1]))
    assert one.state_dict() == other.state_dict()


@both_bandits
@both_readings
def test_a_latecomer_starts_as_it_would_have_at_first(bandit: type[BanditSampler], refresh: Refresh) -> None:
    sampler = bandit(refresh, seed=2)
    expected = bandit(refresh, seed=2)
    expected.observe(Feedback(1, [99], kept=[99]))
    for round in range(1, 10):
        now = sampled(sampler, round, CLIENTS, 4)
        sampler.observe(Feedback(round, now, kept=now[:2]))
    assert 99 not in memory(sampler, *sampler.columns)
    sampler.observe(Feedback(10, [99], kept=[99]))
    assert memory(sampler, *sampler.columns)[99] == memory(expected, *sampler.columns)[99]


@both_bandits
@both_readings
def test_who_left_is_remembered_on_return(bandit: type[BanditSampler], refresh: Refresh) -> None:
    sampler = bandit(refresh, seed=2)
    sampler.observe(Feedback(1, [4, 7], kept=[4]))
    before = memory(sampler, *sampler.columns)
    for round in range(2, 12):
        now = sampled(sampler, round, [0, 1, 20], 2)
        sampler.observe(Feedback(round, now, kept=[]))
    after = memory(sampler, *sampler.columns)
    assert {client: after[client] for client in (4, 7)} == before
    assert sampled(sampler, 12, [4, 7], 2) == [4, 7]


@both_bandits
@both_readings
def test_asking_alone_teaches_nothing(bandit: type[BanditSampler], refresh: Refresh) -> None:
    """A round that fails after the asking can be played again, or given up, as if it had not been begun."""
    sampler = bandit(refresh, seed=2)
    for round in range(1, 6):
        now = sampled(sampler, round, CLIENTS, 4)
        sampler.observe(Feedback(round, now, kept=now[:2]))
    before = sampler.state_dict()
    asked = sampled(sampler, 6, CLIENTS, 4)
    assert sampler.state_dict() == before
    assert sampled(sampler, 6, CLIENTS, 4) == asked


@both_bandits
def test_an_unknown_reading_is_refused(bandit: type[BanditSampler]) -> None:
    with pytest.raises(InvalidSetting, match=r"^refresh: 'fresch' is not allowed; use 'fresh' \(nearest\)"):
        bandit("fresch")  # type: ignore[arg-type]


def test_beliefs_of_ucb_are_its_means_and_bonuses() -> None:
    sampler = UCBSampler(seed=1)
    assert sampler.beliefs(1).clients.size == 0
    starts = sampler.start(np.array([3, 5]))["mean"]
    sampler.observe(Feedback(1, [3, 5], [5], {}, {}))
    beliefs = sampler.beliefs(4)
    assert beliefs.clients.tolist() == [3, 5]
    assert beliefs.mean == pytest.approx([starts[0] / 2, (starts[1] + 1) / 2])
    assert beliefs.width == pytest.approx(math.sqrt(3 * math.log(4) / (2 * 2)))


def test_beliefs_of_thompson_are_its_posteriors() -> None:
    sampler = ThompsonSampler(seed=1)
    for number in range(1, 4):
        sampler.observe(Feedback(number, [2, 9], [9], {}, {}))
    beliefs = sampler.beliefs(3)
    assert beliefs.clients.tolist() == [2, 9]
    assert beliefs.mean == pytest.approx([1 / 5, 4 / 5])  # Beta(1, 4) and Beta(4, 1)
    assert beliefs.width**2 == pytest.approx([4 / (25 * 6)] * 2)
