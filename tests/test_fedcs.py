"""FedCS against its definition: greedy by added time, and never beyond the deadline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedsieve as fs
from fedsieve.errors import InvalidSetting
from fedsieve.sampling import FedCSSampler
from fedsieve.system import SystemModel

Times = dict[int, tuple[float, float, float]]


def asked(times: Times, deadline: float, round: int = 1) -> list[int]:
    sampler = FedCSSampler(deadline)
    sampler.device_times = lambda clients: tuple(np.array([times[client] for client in clients.tolist()]).T)
    return [int(client) for client in sampler.sample(round, list(times), len(times))]


def test_by_hand() -> None:
    # Download, training, upload. First 7 (1 + 2 + 1 = 4 s), then 3: 0 more to download, trained by then, 2 to upload:
    # 1 + 3 + 2 = 6. Then 9 would make it 1 + 5 + 5 = 11.
    times = {3: (1.0, 3.0, 2.0), 7: (1.0, 2.0, 1.0), 9: (1.0, 4.0, 5.0)}
    assert asked(times, 6.5) == [3, 7]
    assert asked(times, 5.9) == [7]
    assert asked(times, 12.0) == [3, 7, 9]
    assert asked(times, 0.1) == [7]  # nobody fits: the quickest


def as_the_paper_writes_it(times: Times, deadline: float) -> list[int]:
    """Algorithm 3 with T_cs = T_agg = 0, one client at a time."""
    left, theta = dict(times), 0.0
    chosen: list[int] = []
    while left:
        slowest = max((times[client][0] for client in chosen), default=0.0)

        def added(client: int, slowest: float = slowest, theta: float = theta) -> float:
            download, training, upload = times[client]
            return max(slowest, download) - slowest + upload + max(0.0, training - theta)

        best = min(sorted(left), key=added)
        download, training, upload = left.pop(best)
        then = theta + upload + max(0.0, training - theta)
        if max(slowest, download) + then < deadline:
            theta = then
            chosen.append(best)
    return sorted(chosen) or [min(sorted(times), key=lambda client: sum(times[client]))]


seconds = st.integers(0, 40).map(float)


@given(
    times=st.dictionaries(st.integers(0, 10**6), st.tuples(seconds, seconds, seconds), min_size=1, max_size=12),
    deadline=st.integers(1, 120).map(float),
)
def test_as_the_paper_writes_it(times: Times, deadline: float) -> None:
    assert asked(times, deadline) == as_the_paper_writes_it(times, deadline)


def looking_at_all_each_time(times: NDArray[np.float64], deadline: float) -> list[int]:
    """Places by Algorithm 3, for times [download, training and upload; clients]: n² steps."""
    download, training, upload = times
    left, chosen = np.arange(times.shape[1]), list[int]()
    slowest, busy = 0.0, 0.0
    while len(left):
        added = np.maximum(download[left] - slowest, 0) + upload[left] + np.maximum(training[left] - busy, 0)
        best = int(added.argmin())
        place = int(left[best])
        left = np.delete(left, best)
        then = busy + upload[place] + max(0.0, training[place] - busy)
        if max(slowest, download[place]) + then < deadline:
            slowest, busy = max(slowest, download[place]), then
            chosen.append(place)
    return sorted(chosen)


@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 300),
    most=st.tuples(*[st.sampled_from([0, 1, 3, 40, 10_000])] * 3),
    deadline=st.sampled_from([5.0, 30.0, 200.0, 3_000.0, 1e9]),
)
def test_many_are_chosen_as_if_all_were_looked_at_each_time(
    seed: int, clients: int, most: tuple[int, int, int], deadline: float
) -> None:
    """In whole seconds many add the same, and then the first is taken."""
    times = np.random.default_rng(seed).integers(0, np.array(most)[:, None] + 1, (3, clients)).astype(np.float64)
    assert FedCSSampler(deadline)._chosen(*times).tolist() == looking_at_all_each_time(times, deadline)


@pytest.mark.parametrize("deadline", [5.0, 60.0, 1e6])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_devices_are_chosen_as_if_all_were_looked_at_each_time(seed: int, deadline: float) -> None:
    ids = np.arange(1_000)
    times = np.stack(SystemModel.drawn(seed, ids).parts(ids, np.full(1_000, 250), 200_000))
    assert FedCSSampler(deadline)._chosen(*times).tolist() == looking_at_all_each_time(times, deadline)


def test_candidates_are_drawn_anew_each_round() -> None:
    sampler = FedCSSampler(100.0)
    sampler.begin(3, np.arange(50), np.full(50, 0.02))
    sampler.device_times = lambda clients: (np.ones(len(clients)), np.ones(len(clients)), np.ones(len(clients)))
    drawn = [sampler.sample(round, np.arange(50), 5).tolist() for round in range(1, 9)]
    assert all(len(set(clients)) == 5 for clients in drawn) and len({tuple(clients) for clients in drawn}) > 4
    assert sampler.sample(3, np.arange(50)[::-1], 5).tolist() == drawn[2]


def test_if_no_candidate_fits_others_are_drawn_and_if_nobody_does_the_quickest_of_all_is_asked() -> None:
    slow = {client: (1.0, 8.0 + client, 1.0) for client in range(40)}
    quick = dict.fromkeys(range(40, 43), (1.0, 1.0, 1.0))
    sampler = FedCSSampler(5.0)
    times = slow | quick
    sampler.device_times = lambda clients: tuple(np.array([times[client] for client in clients.tolist()]).T)
    drawn = {tuple(sampler.sample(round, list(times), 2).tolist()) for round in range(1, 30)}
    assert {client for clients in drawn for client in clients} == set(quick)
    # Two that fit take 1 + 1 + 1 + 1 = 4 s together.
    assert {(40, 41), (40, 42), (41, 42)} < drawn
    assert {tuple(sampler.sample(round, list(slow), 2).tolist()) for round in range(1, 30)} == {(0,)}


def test_a_run_goes_on_where_few_clients_can_be_in_time(tmp_path: Path) -> None:
    trace = tmp_path / "devices.csv"
    speeds = [1e-3] * 18 + [1e6] * 2
    lines = [f"{client},{speed},8,8,1,0\n" for client, speed in enumerate(speeds)]
    trace.write_text("client,examples_per_second,download_mbit,upload_mbit,availability,dropout\n" + "".join(lines))
    history = fs.run(fs.Config(dataset="digits", rounds=3, clients=20, system=str(trace), deadline=8, sampler="fedcs"))
    assert all(set(row["sampled"]) <= {18, 19} and row["kept"] for row in history.rows)


def test_in_a_run_nobody_is_late() -> None:
    settings = {"dataset": "digits", "rounds": 6, "algorithm": "fedpdp", "system": "drawn", "deadline": 8.0}
    plain, chosen = fs.run(fs.Config(**settings)), fs.run(fs.Config(**settings, sampler="fedcs"))
    late = [reason for row in plain.rows for reason in row["excluded"].values() if "late" in reason]
    assert late and not [reason for row in chosen.rows for reason in row["excluded"].values() if "late" in reason]
    assert all(1 <= len(row["sampled"]) <= 8 for row in chosen.rows)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InvalidSetting, match="deadline: None is not allowed; use a number of seconds with fedcs"):
        fs.run(fs.Config(sampler="fedcs", system="drawn"))
    with pytest.raises(InvalidSetting, match="sampler: 'fedcs' is not allowed"):
        FedCSSampler(3.0).sample(1, [1, 2], 1)
    with pytest.raises(InvalidSetting, match="deadline: 0 is not allowed"):
        FedCSSampler(0)
