"""CS-UCB and CS-UCB-Q against Xia et al. 2020, written down once more in dictionaries and loops."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import InvalidSetting
from fedsieve.sampling import CSUCBQSampler, CSUCBSampler, Feedback

CLIENTS = [-3, 0, 1, 4, 7, 20, 21, 22, 300, 2**50]
both = pytest.mark.parametrize("make", [CSUCBSampler, lambda: CSUCBQSampler(0.2)], ids=["CS-UCB", "CS-UCB-Q"])


def sampled(sampler: CSUCBSampler, round: int, clients: list[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


def seconds_of(client: int, random: np.random.Generator) -> float:
    """Clients later in the list take longer, now and then longer than 8 seconds."""
    return float(CLIENTS.index(client) + 2 * random.random())


class Transcribed:
    """y_k (mean reward), z_k (times asked) and D_k (queue) of every client, there or not."""

    def __init__(self, longest: float, c: float, beta: float) -> None:
        self.longest, self.c, self.beta = longest, c, beta
        self.y = dict.fromkeys(CLIENTS, 0.0)
        self.z = dict.fromkeys(CLIENTS, 0)
        self.D = dict.fromkeys(CLIENTS, 0.0)

    def cs_ucb(self, k: int, t: int, m: int) -> float:
        return self.y[k] + math.sqrt((m + 1) * math.log(t) / self.z[k]) if self.z[k] else math.inf

    def cs_ucb_q(self, k: int, t: int, m: int) -> float:
        truncated = min(self.y[k] + math.sqrt(2 * math.log(t) / self.z[k]), 1) if self.z[k] else 1
        return (1 - self.beta) * truncated + self.beta * self.D[k]

    def update(self, asked: list[int], durations: dict[int, float]) -> None:
        for k in CLIENTS:
            b = 1 if k in asked else 0
            self.D[k] = max(self.D[k] + self.c - b, 0)
            if b:
                reward = max(1 - durations.get(k, math.inf) / self.longest, 0)
                self.y[k] = (self.y[k] * self.z[k] + reward) / (self.z[k] + 1)
                self.z[k] += 1


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_follows_the_paper(queues: bool, seed: int) -> None:
    sampler = CSUCBQSampler(0.3, 0.4, longest=8, seed=seed) if queues else CSUCBSampler(longest=8, seed=seed)
    paper = Transcribed(8, 0.3, 0.4)
    random = np.random.default_rng(seed)
    for t in range(1, 81):
        there = random.permutation(CLIENTS)[:7].tolist()
        asked = sampled(sampler, t, there, 3)
        assert len(set(asked)) == 3 and set(asked) <= set(there)
        index = {k: (paper.cs_ucb_q if queues else paper.cs_ucb)(k, t, 3) for k in there}
        weakest = min(index[k] for k in asked)
        assert weakest >= max(index[k] for k in there if k not in asked) - 1e-8, f"round {t}"
        durations = {k: seconds_of(k, random) for k in asked if random.random() < 0.9}
        sampler.observe(Feedback(t, asked, [], durations, durations))
        paper.update(asked, durations)
        everyone = np.array(CLIENTS, dtype=np.int64)
        tried = np.array([k for k in CLIENTS if paper.z[k]], dtype=np.int64)
        assert sampler.mean_rewards(tried) == pytest.approx([paper.y[int(k)] for k in tried])
        if isinstance(sampler, CSUCBQSampler):
            assert sampler.queues(everyone) == pytest.approx([paper.D[k] for k in CLIENTS], abs=1e-9)


def test_by_hand() -> None:
    sampler = CSUCBSampler(longest=10)
    sampler.observe(Feedback(1, [5, 9], [], {}, {5: 2.0, 9: 12.0}))
    sampler.observe(Feedback(2, [5], [], {}, {5: 4.0}))
    bonus = math.sqrt(2 * math.log(3))
    index = sampler.index(3, np.array([5, 9]), 1)
    assert index.tolist() == pytest.approx([0.7 + bonus / math.sqrt(2), 0 + bonus])
    assert sampled(sampler, 3, [5, 9, 11], 1) == [11]


def test_the_longest_time_seen_is_the_measure_where_none_is_given() -> None:
    sampler = CSUCBSampler()
    sampler.observe(Feedback(1, [1, 2], [], {}, {1: 1.0, 2: 2.0}))
    assert sampler.mean_rewards(np.array([1, 2])).tolist() == [0.5, 0]
    sampler.observe(Feedback(2, [3, 4], [], {}, {3: 4.0}))
    assert sampler.mean_rewards(np.array([1, 2, 3, 4])).tolist() == [0.75, 0.5, 0, 0]


@both
def test_no_answer_is_worth_nothing_however_long_others_take_later(make: Callable[[], CSUCBSampler]) -> None:
    sampler = make()
    sampler.observe(Feedback(1, [1], [], {}, {}))
    assert sampler.mean_rewards(np.array([1, 2])).tolist() == [0, 1]  # 2 was never asked
    sampler.observe(Feedback(2, [1, 2], [], {}, {2: 1.0}))
    sampler.observe(Feedback(3, [2, 3], [], {}, {3: 100.0}))
    # 2 answered once of twice, in a hundredth of the longest time
    assert sampler.mean_rewards(np.array([1, 2, 3])).tolist() == pytest.approx([0, 1 - (0.01 + 1) / 2, 0])


def test_beliefs_show_what_the_index_adds() -> None:
    plain, fair = CSUCBSampler(longest=10), CSUCBQSampler(0.5, longest=10)
    for sampler in (plain, fair):
        sampler.observe(Feedback(1, [5, 9, 11], [], {}, {5: 2.0, 9: 8.0}))
        sampler.observe(Feedback(2, [5, 9], [], {}, {5: 4.0, 9: 8.0}))
    shown = plain.beliefs(3)
    assert shown.clients.tolist() == [5, 9, 11] and shown.mean.tolist() == pytest.approx([0.7, 0.2, 0])
    assert shown.width == pytest.approx(np.sqrt(3 * math.log(3) / np.array([2, 2, 1])))
    assert shown.mean + shown.width == pytest.approx(plain.index(3, shown.clients, 2))
    assert fair.beliefs(3).width == pytest.approx(np.sqrt(2 * math.log(3) / np.array([2, 2, 1])))


def test_fast_clients_are_asked_more() -> None:
    sampler = CSUCBSampler(longest=1)
    asked: Counter[int] = Counter()
    for round in range(1, 2001):
        now = sampled(sampler, round, [10, 20, 30, 40], 1)
        asked.update(now)
        sampler.observe(Feedback(round, now, [], {}, {client: 0.02 * client for client in now}))
    assert asked[10] > asked[20] > asked[30] > asked[40]
    assert asked[10] > 1000


def test_whole_numbers_in_settings_do_not_cut_off_fractions() -> None:
    sampler = CSUCBQSampler(1, 1, longest=2)
    sampler.observe(Feedback(1, [1], [], {}, {1: 0.5}))
    assert sampler.mean_rewards(np.array([1])).tolist() == [0.75]
    assert sampler.queues(np.array([1, 2])).dtype == np.float64


@pytest.mark.parametrize("weight", [0.1, 0.5])
def test_everybody_gets_the_guaranteed_rate_even_the_slowest(weight: float) -> None:
    sampler = CSUCBQSampler(0.2, weight, longest=1)
    asked: Counter[int] = Counter()
    random = np.random.default_rng(0)
    for round in range(1, 1001):
        there = [client for client in (10, 20, 30, 40) if random.random() < 0.8 or client == 10]
        now = sampled(sampler, round, there, 1)
        asked.update(now)
        sampler.observe(Feedback(round, now, [], {}, {client: 0.024 * client for client in now}))
    assert min(asked.values()) > 0.18 * 1000
    assert asked[10] == max(asked.values())


def test_a_client_not_there_is_never_chosen_and_its_queue_grows() -> None:
    sampler = CSUCBQSampler(0.5, 1.0)
    for round in range(1, 11):
        now = sampled(sampler, round, [1, 2], 1)
        assert now in ([1], [2])
        sampler.observe(Feedback(round, now, [], {}, {}))
    assert sampler.queues(np.array([3])).item() == pytest.approx(5)
    assert [sampled(sampler, round, [1, 2, 3], 1) for round in (11, 12)] == [[3], [3]]


@both
def test_ties_are_broken_at_random(make: Callable[[], CSUCBSampler]) -> None:
    seen = Counter(client for round in range(1, 601) for client in sampled(make(), round, list(range(6)), 2))
    assert all(seen[client] == pytest.approx(200, abs=47) for client in range(6))  # four standard deviations


@both
@given(seed=st.integers(0, 2**32), stop=st.integers(1, 25))
@settings(max_examples=30, deadline=None)
def test_neither_order_nor_a_restart_matters_while_clients_come_and_go(
    make: Callable[[], CSUCBSampler], seed: int, stop: int
) -> None:
    original = twin = make()
    original.seed = seed
    random = np.random.default_rng(seed)
    for round in range(1, 30):
        if round == stop:
            twin = make()
            twin.seed = seed
            twin.load_state_dict(json.loads(json.dumps(original.state_dict(), allow_nan=False)))
        there = random.permutation(CLIENTS)[: int(random.integers(4, 11))].tolist()
        before = original.state_dict()
        asked = sampled(original, round, there, 4)
        assert asked == sampled(twin, round, there[::-1], 4)
        assert original.state_dict() == before
        durations = {client: seconds_of(client, random) for client in asked[1:]}
        for sampler in {id(original): original, id(twin): twin}.values():
            sampler.observe(Feedback(round, asked[::-1], [], durations, durations))
    assert original.state_dict() == twin.state_dict()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CSUCBSampler(longest=0), "longest"),
        (lambda: CSUCBQSampler(1.1), "guaranteed_rate"),
        (lambda: CSUCBQSampler(0.1, -0.1), "fairness_weight"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], CSUCBSampler], field: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        make()
    assert caught.value.field == field
