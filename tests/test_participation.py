"""How evenly clients were asked and whose models were kept, in numbers worked out by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsieve as fs
from fedsieve.runs import assemble, gini, requests, share_of, summarise

ROWS: list[dict[str, Any]] = [
    {"sampled": [0, 2, 2], "kept": [2]},
    {"sampled": [2, 3], "kept": [2, 3]},
    {"sampled": [0, 2], "kept": []},
]


def test_a_client_drawn_twice_in_a_round_is_asked_once() -> None:
    assert requests(ROWS, [0, 1, 2, 3]).tolist() == [2, 0, 3, 1]


def test_the_gini_coefficient_by_hand() -> None:
    assert gini([5, 5, 5]) == 0
    assert gini([0, 0, 0, 8]) == 3 / 4
    # |0-1|, |0-2|, |0-3|, |1-2|, |1-3|, |2-3| are 1, 2, 3, 1, 2, 1: 20 over all 16 pairs, and twice the mean is 3.
    assert gini([2, 0, 3, 1]) == pytest.approx(20 / 16 / 3)
    assert gini([0, 0]) == 0  # nobody was asked: nobody more than another


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any))
def test_the_gini_coefficient_is_the_mean_difference_over_twice_the_mean(counts: list[int]) -> None:
    difference = sum(abs(one - other) for one, other in product(counts, counts)) / len(counts) ** 2
    assert gini(counts) == pytest.approx(difference / (2 * sum(counts) / len(counts)), abs=1e-12)


def test_shares_count_requests_and_models() -> None:
    assert share_of({0}, ROWS, "sampled") == 2 / 6
    assert share_of({3, 1}, ROWS, "kept") == 1 / 3
    assert share_of({0}, [{"kept": []}], "kept") is None


def test_a_run_says_how_evenly_it_asked_those_that_hold_data() -> None:
    quick: dict[str, Any] = {"rounds": 3, "clients": 30, "local_epochs": 1, "device": "cpu"}
    history = fs.run(fs.Config(heterogeneity="client", alpha=0.1, seed=1, **quick))
    federation, engine = assemble(history.config)
    engine.close()
    assert len(federation.clients) < 30
    asked = requests(history.rows, federation.clients.tolist())
    assert history.summary["requests_gini"] == pytest.approx(gini(asked), abs=1e-4)


def test_a_comparison_knows_what_attacks_and_devices_cost() -> None:
    history = fs.run(
        fs.Config(algorithm="fedca", rounds=3, clients=8, system="drawn", attack="backdoor", hostile=0.5, device="cpu")
    )
    rows, hostile = history.rows, set(history.summary["hostile"])
    (line,) = summarise({"fedca": [history]})
    assert line.rounds_to_target is not None and line.seconds_to_target is not None
    until = rows[: int(line.rounds_to_target.mean)]
    assert line.seconds_to_target.mean == pytest.approx(sum(row["simulated"]["seconds"] for row in until))
    assert line.bytes_to_target is not None
    assert line.bytes_to_target.mean == sum(row["simulated"]["bytes"] for row in until)
    kept = [client in hostile for row in rows for client in row["kept"]]
    assert line.hostile_kept is not None and line.hostile_kept.mean == pytest.approx(sum(kept) / len(kept))
    assert line.backdoor_success is not None
    assert line.backdoor_success.mean == pytest.approx(sum(row["backdoor_success"] for row in rows) / 3)


def test_a_comparison_of_plain_runs_knows_nothing_of_them() -> None:
    (line,) = summarise({"fedavg": [fs.run(fs.Config(algorithm="fedavg", rounds=2, clients=8, device="cpu"))]})
    assert line.requests_gini is not None
    assert (line.seconds_to_target, line.bytes_to_target) == (None, None)
    assert (line.hostile_sampled, line.hostile_kept, line.backdoor_success) == (None, None, None)
