"""Power-of-choice against the steps of Cho et al. 2020: draw d by p_k, ask those of highest loss."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

import fedsieve as fs
from fedsieve.engines import SequentialEngine
from fedsieve.errors import InvalidSetting
from fedsieve.runs import assemble
from fedsieve.sampling import Feedback, PowerOfChoiceSampler
from fedsieve.sampling.base import Ids
from fedsieve.sampling.power_of_choice import Losses
from fedsieve.sampling.weighted import drawn_by_weight


def begun(
    weights: dict[int, float],
    candidates: int | None = None,
    losses: Losses = "last",
    seed: int = 3,
    mini_batch: int = 64,
) -> PowerOfChoiceSampler:
    sampler = PowerOfChoiceSampler(candidates, losses, mini_batch=mini_batch)
    sampler.begin(seed, np.array(list(weights), dtype=np.int64), np.array(list(weights.values()), dtype=np.float64))
    return sampler


def sampled(sampler: PowerOfChoiceSampler, round: int, clients: list[int], count: int) -> list[int]:
    return [int(client) for client in sampler.sample(round, clients, count)]


# Drawing by weight without replacement


def chance_of_set(weights: dict[int, float], chosen: frozenset[int]) -> float:
    """That the first places of draws, one after the other among those left, are taken by exactly these."""
    total = 0.0
    for order in permutations(chosen):
        chance, left = 1.0, sum(weights.values())
        for client in order:
            chance *= weights[client] / left
            left -= weights[client]
        total += chance
    return total


def test_sets_are_drawn_as_often_as_drawing_one_by_one_says() -> None:
    weights = {-7: 0.1, 2: 0.2, 5: 0.3, 900: 0.4}
    clients, p = np.array(list(weights), dtype=np.int64), np.array(list(weights.values()))
    seen = Counter(
        frozenset(clients[drawn_by_weight(1, "a test", round, clients, p, 2)].tolist()) for round in range(6000)
    )
    assert sum(chance_of_set(weights, pair) for pair in seen) == pytest.approx(1)
    statistic = sum(
        (seen[pair] - 6000 * chance_of_set(weights, pair)) ** 2 / (6000 * chance_of_set(weights, pair)) for pair in seen
    )
    assert statistic < 20.52  # chi-square, 5 degrees of freedom, p = 0.001


def test_who_has_no_weight_is_drawn_last_and_fairly() -> None:
    clients, weights = np.arange(6, dtype=np.int64), np.array([0, 1e-300, 0, 5e-324, 1e300, 0])
    draws = [clients[drawn_by_weight(1, "a test", round, clients, weights, 4)].tolist() for round in range(600)]
    assert all({1, 3, 4} < set(draw) for draw in draws)
    last = Counter(client for draw in draws for client in draw if client not in (1, 3, 4))
    assert all(last[client] == pytest.approx(200, abs=47) for client in (0, 2, 5))  # four standard deviations


# Highest loss


@pytest.mark.parametrize("seed", range(5))
def test_asks_those_of_highest_loss_among_the_candidates(seed: int) -> None:
    """The candidates are those the sampler shows to `local_losses`; losses and rounds are dictionaries here."""
    random = np.random.default_rng(seed)
    clients = [-9, 0, 3, 4, 8, 15, 77, 78, 2**40]
    last, exact = begun(dict.fromkeys(clients, 1.0), 5), begun(dict.fromkeys(clients, 1.0), 5, "exact")
    shown: list[int] = []
    known: dict[int, float] = {}

    def losses_of(round: int, candidates: NDArray[np.int64], examples: int | None) -> NDArray[np.float64]:
        assert examples is None
        shown[:] = candidates.tolist()
        return np.array([known.get(client, np.inf) for client in shown])

    exact.local_losses = losses_of
    for round in range(1, 40):
        there = random.permutation(clients)[:7].tolist()
        asked = sampled(last, round, there, 3)
        assert asked == sampled(exact, round, there, 3)
        assert len(shown) == 5 and set(asked) <= set(shown) <= set(there)
        by_loss = sorted((known.get(client, np.inf) for client in shown), reverse=True)
        assert sorted((known.get(client, np.inf) for client in asked), reverse=True) == by_loss[:3]
        losses = {client: float(random.random()) for client in asked}
        known |= losses
        last.observe(Feedback(round, asked, asked, losses))


def test_a_loss_belongs_to_an_id_not_to_a_position() -> None:
    sampler = begun({40: 1, 10: 1, 30: 1, 20: 1}, candidates=4)
    sampler.observe(Feedback(1, [10, 20, 30, 40], [], {40: 0.1, 10: 0.4, 30: 0.9, 20: 0.2}))
    assert sampled(sampler, 2, [40, 20, 10, 30], 2) == [10, 30]
    assert sampled(sampler, 2, [40, 20], 1) == [20]


def test_who_was_never_asked_comes_first_and_who_never_answered_last() -> None:
    sampler = begun({1: 1, 2: 1, 3: 1, 4: 1}, candidates=4)
    sampler.observe(Feedback(1, [1, 2, 3], [1], {1: 5.0, 2: -1.0}))
    assert sampled(sampler, 2, [1, 2, 3, 4], 1) == [4]
    assert sampled(sampler, 2, [1, 2, 3], 2) == [1, 2]
    sampler.observe(Feedback(2, [1], [], {}))
    assert sampled(sampler, 3, [1, 2, 3], 1) == [1]


def test_as_many_candidates_as_places_leave_it_to_the_weights() -> None:
    sampler = begun({1: 1, 2: 2, 3: 7}, candidates=1)
    sampler.observe(Feedback(1, [1, 2, 3], [], {1: 9, 2: 3, 3: 1}))
    seen = Counter(sampled(sampler, round, [1, 2, 3], 1)[0] for round in range(2, 2002))
    assert [seen[client] for client in (1, 2, 3)] == pytest.approx([200, 400, 1400], abs=85)


def test_ties_are_broken_at_random() -> None:
    sampler = begun(dict.fromkeys(range(6), 1.0), candidates=6)
    seen = Counter(client for round in range(1, 601) for client in sampled(sampler, round, list(range(6)), 2))
    assert all(seen[client] == pytest.approx(200, abs=47) for client in range(6))


def test_who_joins_late_can_be_asked() -> None:
    assert sampled(begun({1: 0.5, 2: 0.5}), 5, [7], 1) == [7]


@given(
    clients=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20, unique=True),
    round=st.integers(1, 99),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_neither_order_nor_a_restart_matters(clients: list[int], round: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(clients)))
    weights = {client: float(position) for position, client in enumerate(sorted(clients))}
    sampler, twin = begun(weights), begun(weights)
    asked = clients[: data.draw(st.integers(0, len(clients)))]
    sampler.observe(Feedback(1, asked, [], {client: client % 7 / 7 for client in asked[1:]}))
    before = sampler.state_dict()
    twin.load_state_dict(json.loads(json.dumps(before, allow_nan=False)))
    chosen = sampled(sampler, round, clients, count)
    assert chosen == sampled(twin, round, clients[::-1], count)
    assert len(set(chosen)) == count and chosen == sorted(chosen)
    assert sampler.state_dict() == before == twin.state_dict()


# What is refused


@pytest.mark.parametrize("losses", ["exact", "mini-batch"])
def test_losses_of_the_current_model_must_come_from_somewhere(losses: Losses) -> None:
    with pytest.raises(InvalidSetting, match=rf"^losses: '{losses}' is not allowed; use 'last', or set local_losses$"):
        begun({1: 1, 2: 1}, losses=losses).sample(1, [1, 2], 1)


def test_who_has_no_loss_comes_last() -> None:
    sampler = begun({1: 1, 2: 1, 3: 1}, losses="exact", candidates=3)
    sampler.local_losses = lambda round, candidates, examples: np.array([np.nan, 0.0, -1.0])
    assert sampler.sample(1, [1, 2, 3], 2).tolist() == [2, 3]
    assert sampler.sample(1, [1, 2, 3], 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("losses", "examples"), [("exact", None), ("mini-batch", 7)])
def test_a_mini_batch_is_asked_for_where_it_is_wanted(losses: Losses, examples: int | None) -> None:
    sampler = begun({1: 1, 2: 1}, losses=losses, mini_batch=7)
    asked: list[int | None] = []

    def local_losses(round: int, candidates: Ids, examples: int | None) -> NDArray[np.float64]:
        asked.append(examples)
        return np.zeros(candidates.size)

    sampler.local_losses = local_losses
    sampler.sample(1, [1, 2], 1)
    assert asked == [examples]


def test_a_mini_batch_has_an_example() -> None:
    with pytest.raises(InvalidSetting, match=r"^mini_batch: 0 is not allowed; use 1 or more examples$"):
        PowerOfChoiceSampler(losses="mini-batch", mini_batch=0)


def test_wrong_local_losses_are_refused() -> None:
    sampler = begun({1: 1, 2: 1}, losses="mini-batch")
    sampler.local_losses = lambda round, candidates, examples: np.zeros(3)
    with pytest.raises(InvalidSetting) as caught:
        sampler.sample(1, [1, 2], 1)
    assert caught.value.field == "local_losses"


def test_fewer_candidates_than_places_are_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"^candidates: 2 is not allowed; use 3 or more, as many as are asked$"):
        begun(dict.fromkeys(range(5), 1.0), candidates=2).sample(1, range(5), 3)
    with pytest.raises(InvalidSetting, match=r"^candidates: 0 "):
        PowerOfChoiceSampler(0)
    with pytest.raises(InvalidSetting, match=r"^losses: 'exakt' is not allowed; use 'exact' \(nearest\)"):
        PowerOfChoiceSampler(losses="exakt")  # type: ignore[arg-type]


def test_a_run_asks_the_clients_for_the_losses_of_its_model() -> None:
    settings = fs.Config(rounds=1, clients=10, algorithm="fedpdp", sampler="power-of-choice-exact")
    federation, engine = assemble(settings)
    assert isinstance(engine, SequentialEngine)
    start = federation.model.clone()
    by_hand = []
    for client in range(10):
        inputs, labels = engine._examples("train", engine.partition[client])
        engine.layout.write(start, engine.module)
        with torch.no_grad():
            by_hand.append(float(cross_entropy(engine.module.eval()(inputs), labels)))
    assert engine.local_losses(start, range(10), round=1) == pytest.approx(by_hand, rel=1e-5)
    few = engine.local_losses(start, [4, 7], round=1, examples=5)
    assert few[1] == engine.local_losses(start, [7], round=1, examples=5)[0]  # whoever else is asked
    assert few[1] != engine.local_losses(start, [7], round=2, examples=5)[0] != by_hand[7]
    sampler = federation.sampler
    assert isinstance(sampler, PowerOfChoiceSampler)
    sampler.candidates = 10  # then losses alone decide
    assert federation.play(1).sampled == sorted(np.argsort(by_hand)[-4:].tolist())


@pytest.mark.parametrize("sampler", ["power-of-choice-exact", "power-of-choice-batch"])
def test_a_client_whose_data_the_model_cannot_take_ends_nothing(sampler: str) -> None:
    class Picky(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x == 7).any():
                raise ValueError("a seven")
            return torch.nn.functional.linear(x, self.layer.weight, self.layer.bias)

    inputs = np.random.default_rng(0).standard_normal((80, 2)).astype(np.float32)
    inputs[5, 0], inputs[25, 1] = np.nan, 7
    mine = fs.data.Dataset.from_arrays(inputs, np.arange(80) % 2, inputs[40:] * 0, np.arange(40) % 2)
    settings = {
        "algorithm": "fedpdp",
        "heterogeneity": "iid",
        "clients": 4,
        "ratio": 0.75,
        "rounds": 3,
        "augment": False,
    }
    config = fs.Config(sampler=sampler, validation_per_class=0, device="cpu", local_epochs=1, **settings)
    rows = fs.run(config, model=Picky(), dataset=mine).rows
    assert len(rows) == 3 and all(row["kept"] for row in rows)
