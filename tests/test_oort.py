"""Oort against Algorithm 1 of Lai et al. 2021, written down once more in dictionaries and loops."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import InvalidSetting
from fedsieve.sampling import Feedback, OortSampler
from fedsieve.sampling.oort import exploration

SIZES = {-3: 5.0, 0: 1.0, 1: 3.0, 4: 8.0, 7: 2.0, 20: 9.0, 21: 4.0, 22: 6.0, 300: 7.0, 2**50: 10.0}
CLIENTS = list(SIZES)


def begun(
    sizes: dict[int, float], pacer_step: float | None = None, pacer_window: int = 20, seed: int = 3
) -> OortSampler:
    sampler = OortSampler(pacer_step=pacer_step, pacer_window=pacer_window)
    weights = np.array(list(sizes.values())) / sum(sizes.values())
    sampler.begin(seed, np.array(list(sizes), dtype=np.int64), weights)
    return sampler


def sampled(sampler: OortSampler, round: int, clients: list[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


class TranscribedOort:
    """E, U, L, D, T of Algorithm 1, with utilities in units of their 95th percentile and a look at T every W rounds.

    `asked` and `answered` count rounds, for those that do not answer, whom Algorithm 1 does not mention.
    """

    def __init__(self, sizes: dict[int, float], alpha: float, delta: float, window: int) -> None:
        self.sizes, self.alpha, self.delta, self.window = sizes, alpha, delta, window
        self.U: dict[int, float] = {}
        self.L: dict[int, int] = {}
        self.D: dict[int, float] = {}
        self.T = delta
        self.asked: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.achieved: list[float] = []
        self.epsilon = 0.9

    def feedback(self, round: int, asked: list[int], losses: dict[int, float], durations: dict[int, float]) -> None:
        for i, loss in losses.items():
            self.U[i] = self.sizes[i] * math.sqrt(loss**2)
            self.L[i] = round
            self.D[i] = durations[i]
        self.asked.update(asked)
        self.answered.update(list(losses))
        longest = max(self.D.values())
        for i in set(asked) - set(losses):
            mean = sum(self.U[k] for k in losses) / len(losses)
            self.U[i] = mean * (self.answered[i] + 1) / (self.asked[i] + 1)
            self.L[i] = round
            self.D[i] = longest
        self.achieved.append(sum(self.U[i] for i in losses))
        if self.epsilon > 0.2:
            self.epsilon = max(self.epsilon * 0.98, 0.2)

    def pace(self) -> None:
        rounds, w = len(self.achieved), self.window
        if rounds >= 2 * w and rounds % w == 0:
            before = sum(self.achieved[rounds - 2 * w : rounds - w])
            if before > sum(self.achieved[rounds - w : rounds]):
                self.T += self.delta

    def percentile(self, values: list[float]) -> float:
        ordered = sorted(values)
        place = 0.95 * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    def util(self, R: int, explored: list[int]) -> dict[int, float]:
        top = self.percentile([self.U[i] for i in explored])
        util = {}
        for i in explored:
            util[i] = min(self.U[i], top) / top + math.sqrt(0.1 * math.log(R) / self.L[i])
            if self.D[i] > self.T:
                util[i] *= (self.T / self.D[i]) ** self.alpha
        return util


@pytest.mark.parametrize("seed", range(5))
def test_follows_algorithm_1(seed: int) -> None:
    sampler = begun(SIZES, pacer_step=0.3, pacer_window=4, seed=seed)
    paper = TranscribedOort(SIZES, alpha=2, delta=0.3, window=4)
    random = np.random.default_rng(seed)
    for R in range(1, 81):
        there = random.permutation(CLIENTS)[:8].tolist()
        paper.pace()
        explored = sorted(set(there) & set(paper.U))
        asked = sampled(sampler, R, there, 4)
        assert exploration(R) == pytest.approx(paper.epsilon)
        by_utility = [i for i in asked if i in paper.U]
        wanted = round_half_up((1 - paper.epsilon) * 4)
        unexplored = len(there) - len(explored)
        assert len(by_utility) == max(min(wanted, len(explored)), 4 - unexplored), f"round {R}"
        if explored:
            util = paper.util(R, explored)
            ours = sampler.utilities(R, np.array(explored, dtype=np.int64))
            assert ours == pytest.approx([util[i] for i in explored])
            if by_utility:
                cut_off = 0.95 * sorted(util.values(), reverse=True)[len(by_utility) - 1]
                assert all(util[i] >= cut_off - 1e-9 for i in by_utility), f"round {R}"
        losses = {i: float(random.random()) * 0.97**R for i in asked if i == asked[R % 4] or random.random() < 0.9}
        durations = {i: float(random.random()) for i in losses}
        sampler.observe(Feedback(R, asked, [], losses, durations))
        paper.feedback(R, asked, losses, durations)
    paper.pace()
    state = sampler.state_dict()
    assert state["preferred"] == pytest.approx(paper.T)
    assert paper.T > 0.3


def round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def test_utility_by_hand() -> None:
    """Sizes 1 and 3, losses 0.6 and 0.5: 0.6 and 1.5 in units of their 95th percentile, 0.6 + 0.95 · 0.9 = 1.455."""
    sampler = begun({5: 1, 9: 3}, pacer_step=2)
    sampler.observe(Feedback(4, [5, 9], [], {5: 0.6, 9: 0.5}, {5: 1.0, 9: 4.0}))
    bonus = math.sqrt(0.1 * math.log(10) / 4)
    utilities = sampler.utilities(10, np.array([5, 9]))
    assert utilities.tolist() == pytest.approx([0.6 / 1.455 + bonus, (1 + bonus) * (2 / 4) ** 2])


def test_no_answer_by_hand() -> None:
    """Sizes 1 and 3 of 13, losses 0.6 and 0.5: utilities 0.6 and 1.5, half of whose mean stands for a first failure."""
    sampler = begun({5: 1, 9: 3, 11: 7, 12: 2})
    sampler.observe(Feedback(1, [12], [], {}))
    assert row(sampler, 12) == {"utility": 0, "round": 1, "duration": 0, "rounds": 1}
    sampler.observe(Feedback(4, [5, 9, 11], [], {5: 0.6, 9: 0.5}, {5: 1.0, 9: 4.0}))
    assert row(sampler, 11) == pytest.approx({"utility": 0.525 / 13, "round": 4, "duration": 4, "rounds": 1})
    sampler.observe(Feedback(5, [9, 11, 20], [], {}))  # 1.05 is the mean of those who have answered before
    assert row(sampler, 9) == pytest.approx({"utility": 2 / 3 * 1.05 / 13, "round": 5, "duration": 4, "rounds": 2})
    assert row(sampler, 11) == pytest.approx({"utility": 1 / 3 * 1.05 / 13, "round": 5, "duration": 4, "rounds": 2})
    assert row(sampler, 20) == pytest.approx({"utility": 1 / 2 * 1.05 / 13, "round": 5, "duration": 4, "rounds": 1})
    sampler.device_times = lambda clients: (np.ones(clients.size), clients.astype(np.float64), np.ones(clients.size))
    sampler.observe(Feedback(6, [5, 9, 12], [], {5: 0.6}, {5: 1.0}))
    assert row(sampler, 9) == pytest.approx({"utility": 2 / 4 * 0.6 / 13, "round": 6, "duration": 11, "rounds": 3})
    assert row(sampler, 12) == pytest.approx({"utility": 1 / 3 * 0.6 / 13, "round": 6, "duration": 14, "rounds": 2})


def row(sampler: OortSampler, client: int) -> dict[str, float]:
    state = sampler.state_dict()
    at = state["clients"].index(client)
    utility = float(sampler._utility(np.array([client]))[0])
    return {"utility": utility, **{name: state[name][at] for name in ("round", "duration", "rounds")}}


def test_exploration_decays_from_most_to_a_fifth() -> None:
    assert [exploration(round) for round in (1, 2, 3)] == pytest.approx([0.9, 0.882, 0.86436])
    assert exploration(75) > 0.2 == exploration(76) == exploration(5000)


def test_chances_are_proportional_to_utility_among_those_above_the_cut_off() -> None:
    """All clients are known, so that one is asked by utility: 0.96, 0.98, 1, 1 pass, 0.5 does not."""
    sampler = begun(dict.fromkeys(range(41), 1.0), pacer_step=100)
    losses = {0: 0.96, 1: 0.98, 2: 0.5} | dict.fromkeys(range(3, 41), 1.0)
    sampler.observe(Feedback(1, list(losses), [], losses, dict.fromkeys(losses, 1.0)))
    seen: Counter[int] = Counter()
    for round in range(1, 4001):
        sampler.seed = round
        seen.update(sampled(sampler, 1, [0, 1, 2, 3, 4], 1))
    assert seen[2] == 0
    total = 0.96 + 0.98 + 1 + 1
    expected = {0: 4000 * 0.96 / total, 1: 4000 * 0.98 / total, 3: 4000 / total, 4: 4000 / total}
    assert sum((seen[i] - expected[i]) ** 2 / expected[i] for i in expected) < 16.27  # 3 degrees of freedom, p = 0.001


def test_a_useful_client_is_asked_more_often_than_others_that_pass_the_cut_off() -> None:
    """Two places; utilities 10, 1, 1, 1 pass, as 1 is the second highest, and are clipped at their 95th percentile."""
    sampler = begun(dict.fromkeys(range(4), 1.0), pacer_step=100)
    losses = {0: 10.0, 1: 1.0, 2: 1.0, 3: 1.0}
    sampler.observe(Feedback(1, list(losses), [], losses, dict.fromkeys(losses, 1.0)))
    small = 1 / np.quantile(list(losses.values()), 0.95)
    left_out = 3 * small / (1 + 3 * small) * 2 * small / (1 + 2 * small)
    times = 0
    for seed in range(2000):
        sampler.seed = seed
        times += 0 in sampled(sampler, 1, [0, 1, 2, 3], 2)
    assert times / 2000 == pytest.approx(1 - left_out, abs=0.02)  # four standard deviations; by chance it would be 0.5


def test_untried_clients_are_tried_equally_often() -> None:
    sampler = begun(SIZES)
    seen = Counter(client for round in range(1, 1001) for client in sampled(sampler, round, CLIENTS, 3))
    assert all(seen[client] == pytest.approx(300, abs=58) for client in CLIENTS)  # four standard deviations


@pytest.mark.parametrize(
    ("told", "seconds"), [("device times", 60.0), ("device times", 0.1), ("durations", 60.0), ("nothing", 60.0)]
)
def test_clients_that_never_answer_are_not_asked_more_often_than_by_chance(told: str, seconds: float) -> None:
    """Of 30 clients 9 are asked, each in 0.3 of the rounds by chance; 0 to 3 are too late or drop out."""
    sampler = begun(dict.fromkeys(range(30), 1.0))
    if told == "device times":
        sampler.device_times = lambda clients: (
            np.zeros(clients.size),
            np.array([seconds if client < 4 else 2.0 for client in clients.tolist()]),
            np.zeros(clients.size),
        )
    random = np.random.default_rng(3)
    in_vain = 0
    for round in range(1, 121):
        asked = sampled(sampler, round, list(range(30)), 9)
        in_vain += sum(client < 4 for client in asked) if round > 20 else 0
        losses = {client: float(random.uniform(0.5, 1)) for client in asked if client >= 4}
        sampler.observe(Feedback(round, asked, [], losses, {} if told == "nothing" else dict.fromkeys(losses, 2.0)))
    assert in_vain <= 0.3 * 4 * 100


def test_untried_clients_are_tried_by_speed_where_it_is_known() -> None:
    sampler = begun(SIZES)
    speeds = dict(zip(CLIENTS, [1, 2, 3, 4, 5, 6, 7, 8, 9, 15], strict=True))
    sampler.device_times = lambda clients: (
        np.array([0.5 / speeds[client] for client in clients.tolist()]),
        np.array([0.25 / speeds[client] for client in clients.tolist()]),
        np.array([0.25 / speeds[client] for client in clients.tolist()]),
    )
    seen = Counter(sampled(sampler, round, CLIENTS, 1)[0] for round in range(1, 3001))
    statistic = sum((seen[client] - 50 * speed) ** 2 / (50 * speed) for client, speed in speeds.items())
    assert statistic < 27.88  # chi-square, 9 degrees of freedom, p = 0.001


def test_who_took_part_too_often_is_left_out_while_others_are_there() -> None:
    sampler = OortSampler(most_rounds=2)
    sampler.begin(0, np.arange(4), np.ones(4))
    for round in (1, 2):
        sampler.observe(Feedback(round, [0, 1, 2, 3], [], {0: 9.0, 1: 9.0, 2: 1.0, 3: 1.0}))
    assert sampled(sampler, 3, [0, 1, 2, 3], 2) == [0, 1]
    sampler.observe(Feedback(3, [0, 1], [], {0: 9.0, 1: 9.0}))
    assert sampled(sampler, 4, [0, 1, 2, 3], 2) == [2, 3]
    assert sampled(sampler, 4, [0, 1, 7], 1) == [7]  # never tried
    assert sampled(sampler, 4, [0, 1, 2], 2) in ([0, 1], [0, 2], [1, 2])
    assert sampled(sampler, 4, [0, 1], 2) == [0, 1]  # nobody else is there


def test_everybody_known_or_nobody_known_still_fills_all_places() -> None:
    sampler = begun(SIZES)
    assert len(sampled(sampler, 200, CLIENTS, 7)) == 7
    sampler.observe(Feedback(1, CLIENTS, [], dict.fromkeys(CLIENTS, 0.0), dict.fromkeys(CLIENTS, 0.0)))
    assert len(sampled(sampler, 1, CLIENTS, 7)) == 7
    assert sampled(sampler, 1, CLIENTS, 10) == sorted(CLIENTS)


def test_slow_clients_are_asked_less_until_the_pacer_lets_them() -> None:
    sampler = begun({1: 1, 2: 1}, pacer_step=1, pacer_window=2)
    both = np.array([1, 2])
    for round, loss in enumerate([4.0, 4.0, 3.0, 3.0], start=1):
        assert sampler.state_dict()["preferred"] == 1
        sampler.observe(Feedback(round, [1, 2], [], {1: loss, 2: loss}, {1: 1.0, 2: 2.0}))
        fast, slow = sampler.utilities(round, both)
        assert slow == pytest.approx(fast / 4 if round < 4 else fast)
    assert sampler.state_dict()["preferred"] == 2


def test_growing_utility_leaves_the_pace() -> None:
    sampler = begun({1: 1, 2: 1}, pacer_step=1, pacer_window=2)
    for round in range(1, 20):
        sampler.observe(Feedback(round, [1, 2], [], {1: round, 2: round}, {1: 1.0, 2: 2.0}))
    assert sampler.state_dict()["preferred"] == 1


def test_the_first_durations_set_the_pace_where_no_step_is_given() -> None:
    sampler = begun(SIZES)
    sampler.observe(Feedback(1, [0], [], {0: 1.0}))
    assert sampler.state_dict()["preferred"] is None
    sampler.observe(Feedback(2, [0, 1, 4], [], {0: 1, 1: 1, 4: 1}, {0: 3.0, 1: 5.0, 4: 50.0}))
    assert sampler.state_dict()["preferred"] == sampler.state_dict()["step"] == 5


def test_the_unit_of_size_does_not_matter() -> None:
    small, large = begun(SIZES), OortSampler()
    large.begin(3, np.array(CLIENTS), np.array(list(SIZES.values())) * 1000)
    for round in range(1, 30):
        asked = sampled(small, round, CLIENTS, 4)
        assert asked == sampled(large, round, CLIENTS, 4)
        for sampler in (small, large):
            sampler.observe(Feedback(round, asked, [], {client: client % 5 + 1 for client in asked}))


def test_utilities_go_by_the_weights_of_now() -> None:
    losses = {client: client % 5 + 1.0 for client in CLIENTS}
    weights = np.array(list(SIZES.values()))
    told_first, told_later = begun(SIZES), begun(dict.fromkeys(CLIENTS, 1.0))
    for sampler in (told_first, told_later):
        sampler.observe(Feedback(1, CLIENTS, [], losses))
    everybody = np.array(sorted(CLIENTS))
    assert told_later.utilities(2, everybody) != pytest.approx(told_first.utilities(2, everybody))
    told_later.weigh(np.array(CLIENTS), weights)
    assert told_later.utilities(2, everybody) == pytest.approx(told_first.utilities(2, everybody))


@given(seed=st.integers(0, 2**32), stop=st.integers(1, 25))
@settings(max_examples=30, deadline=None)
def test_neither_order_nor_a_restart_matters_while_clients_come_and_go(seed: int, stop: int) -> None:
    original = twin = begun(SIZES, pacer_window=3, seed=seed)
    random = np.random.default_rng(seed)
    for round in range(1, 30):
        if round == stop:
            twin = begun(SIZES, pacer_window=3, seed=seed)
            twin.load_state_dict(json.loads(json.dumps(original.state_dict(), allow_nan=False)))
        there = random.permutation(CLIENTS)[: int(random.integers(4, 11))].tolist()
        before = original.state_dict()
        asked = sampled(original, round, there, 4)
        assert asked == sampled(twin, round, there[::-1], 4)
        assert len(set(asked)) == 4 and set(asked) <= set(there)
        assert original.state_dict() == before
        losses = {client: float(random.random()) for client in asked[1:]}
        for sampler in {id(original): original, id(twin): twin}.values():
            sampler.observe(Feedback(round, asked, [], losses, losses))
    assert original.state_dict() == twin.state_dict()


@pytest.mark.parametrize("wrong", [{"penalty": -1}, {"pacer_step": 0}, {"pacer_window": 0}, {"most_rounds": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        OortSampler(**wrong)
    assert caught.value.field == next(iter(wrong))
