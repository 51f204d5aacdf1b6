"""The clients' devices: times by hand, draws that belong to clients, and who is asked, dropped and waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Typed
from hypothesis import given
from hypothesis import strategies as st

import fedsieve as fs
from fedsieve.clients import LocalTraining
from fedsieve.errors import InvalidSetting, MissingData, TooFewUpdates
from fedsieve.runs import RunDirectory, assemble
from fedsieve.runs.assembly import split_data
from fedsieve.sampling import (
    ClientSampler,
    CSUCBQSampler,
    CSUCBSampler,
    FedCSSampler,
    Feedback,
    OortSampler,
    UniformSampler,
)
from fedsieve.system import SystemModel

HEAD = "client,examples_per_second,download_mbit,upload_mbit,availability,dropout\n"


EVERYBODY = "".join(f"{client},100,8,8,{{0}}\n" for client in range(10))


def config(**changes: Any) -> fs.Config:
    settings: dict[str, Any] = {"dataset": "digits", "rounds": 4, "batch_size": 16, "lr": 0.05, "clients": 10}
    return fs.Config(**settings | changes)


def trace(folder: Path, lines: str) -> Path:
    file = folder / "devices.csv"
    file.write_text(HEAD + lines)
    return file


def test_times_by_hand(tmp_path: Path) -> None:
    file = trace(tmp_path, "4,10,8,2,1,0\n7,50,16,4,1,0\n")
    system = SystemModel.from_trace(file, 0, np.array([4, 7]))
    # 1 MB = 8 Mbit: client 4 gets it in 1 s, sends it in 4 s, and trains on 30 examples in 3 s.
    assert system.seconds(np.array([4, 7]), np.array([30, 100]), 1_000_000).tolist() == [8.0, 0.5 + 2 + 2]
    assert system.seconds(np.array([7]), np.array([0]), 0).tolist() == [0.0]


def test_drawn_devices_have_the_distributions_that_are_documented() -> None:
    system = SystemModel.drawn(3, np.arange(50_000))
    for values, median in ((system.speed, 100), (system.download, 20e6 / 8), (system.upload, 5e6 / 8)):
        logarithms = np.log(values)
        assert np.exp(np.median(logarithms)) == pytest.approx(median, rel=0.02)
        assert logarithms.std() == pytest.approx(0.8, rel=0.02)
    assert system.availability.mean() == pytest.approx(0.8, abs=0.005)
    assert system.availability.std() == pytest.approx(np.sqrt(0.8 * 0.2 / 11), rel=0.03)  # of a Beta(8, 2)
    assert np.corrcoef(system.speed, system.upload)[0, 1] == pytest.approx(0, abs=0.02)
    asked = [np.isin(np.arange(50_000), system.available(round, np.arange(50_000))) for round in range(1, 21)]
    assert np.corrcoef(np.mean(asked, axis=0), system.availability)[0, 1] > 0.7
    assert len(system.dropped(1, np.arange(50_000))) / 50_000 == pytest.approx(0.05, abs=0.005)


@given(seed=st.integers(0, 99), some=st.sets(st.integers(0, 500), min_size=1, max_size=20))
def test_a_device_is_its_clients_own(seed: int, some: set[int]) -> None:
    chosen = np.array(sorted(some))
    few, all_of_them = SystemModel.drawn(seed, chosen), SystemModel.drawn(seed, np.arange(501))
    examples = np.full(len(chosen), 100)
    assert (few.seconds(chosen, examples, 10**6) == all_of_them.seconds(chosen, examples, 10**6)).all()
    for round in (1, 2):
        there = set(all_of_them.available(round, np.arange(501)).tolist())
        assert set(few.available(round, chosen).tolist()) == there & some


@given(
    examples=st.integers(0, 70),
    batch=st.integers(1, 20),
    steps=st.integers(1, 12) | st.none(),
    epochs=st.integers(1, 3),
)
def test_examples_are_those_of_all_batches(examples: int, batch: int, steps: int | None, epochs: int) -> None:
    settings = LocalTraining(batch_size=batch, steps=steps, epochs=epochs)
    assert settings.example_count(examples) == sum(map(len, settings.batches(examples, 0, 1, 0)))


class Watching(UniformSampler):
    """Notes what it is offered and told."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[list[int]] = []
        self.told: list[Feedback] = []

    def sample(self, round: int, clients: Any, count: int) -> Any:
        self.offered.append(clients.tolist())
        return super().sample(round, clients, count)

    def observe(self, feedback: Feedback) -> None:
        self.told.append(feedback)


def test_only_who_is_there_is_asked_and_only_who_answers_in_time_is_averaged(tmp_path: Path) -> None:
    lines = "".join(f"{client},100,8,8,{1 if client < 8 else 0},{1 if client == 3 else 0}\n" for client in range(10))
    file = trace(tmp_path, lines.replace("5,100,", "5,0.1,"))
    sampler = Watching()
    history = fs.run(config(system=str(file), deadline=60.0, ratio=1.0, heterogeneity="iid"), sampler=sampler)
    assert sampler.offered == [list(range(8))] * 4  # 8 and 9 are never there
    for row in history.rows:
        assert row["excluded"]["3"] == "dropped out" and row["excluded"]["5"].startswith("too late: ")
        assert set(row["excluded"]) == {"3", "5"} and row["simulated"]["seconds"] == 60.0
    size = history.model.numel() * 4 if history.model is not None else 0
    assert history.rows[0]["simulated"]["bytes"] == size * (8 + 6)
    assert history.summary["simulated"] == {"seconds": 240.0, "bytes": 4 * 14 * size}
    told = sampler.told[0].durations
    assert set(told) == {0, 1, 2, 4, 6, 7}
    _, partition = split_data(config(heterogeneity="iid"), fs.data.load("digits"))
    assert told[0] == pytest.approx(2 * size / 1e6 + 5 * len(partition[0]) / 100)


def test_a_round_without_a_deadline_waits_for_the_slowest() -> None:
    history = fs.run(config(system="drawn", ratio=1.0))
    federation, _ = assemble(config(system="drawn", ratio=1.0))
    assert federation.system is not None
    times = federation.system.seconds(federation.clients, federation.examples, federation._model_bytes)
    for row in history.rows:
        slowest = max(times[np.searchsorted(federation.clients, client)] for client in row["sampled"])
        assert row["simulated"]["seconds"] == pytest.approx(slowest)


def test_a_run_with_devices_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = config(system="drawn", deadline=20.0, algorithm="fedcm-ucb", rounds=6)

    class Stop(fs.Callback):
        def on_round(self, row: Any) -> None:
            if row["round"] == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(settings, out=tmp_path, callbacks=[Stop()])
    resumed, whole = fs.run(settings, out=tmp_path, resume=True), fs.run(settings)
    assert [row["simulated"] for row in resumed.rows] == [row["simulated"] for row in whole.rows]
    assert resumed.model is not None and whole.model is not None and torch.equal(resumed.model, whole.model)


def test_without_a_system_nothing_is_simulated() -> None:
    history = fs.run(config())
    assert "simulated" not in history.rows[0] and "simulated" not in history.summary


def test_nobody_there_is_said(tmp_path: Path) -> None:
    file = trace(tmp_path, "".join(f"{client},100,8,8,1e-9,0\n" for client in range(10)))
    with pytest.raises(TooFewUpdates, match="round 10: no client can be reached"):
        fs.run(config(system=str(file), rounds=12), out=tmp_path / "run")
    rows = RunDirectory(tmp_path / "run").rows()
    assert [row["simulated"] for row in rows] == [{"seconds": 0.0, "bytes": 0}] * 9


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,100,8,8,1,0\n", "a trace with a line for every client; 1 has none"),
        ("0,100,8,8,1\n", "line 2 of devices.csv' is not allowed; use numbers client, examples_per_second"),
        ("0,100,8,8,1,0\n1,fast,8,8,1,0\n", "line 3 of devices.csv' is not allowed; use numbers"),
        ("0,100,8,8,1,0\n1,100,8,8,1,0,5\n", "line 3 of devices.csv' is not allowed; use no more values than"),
        ("0,100,0,8,1,0\n", "use speeds from 1e-06 to 1e+12, and availability and dropout from 0 to 1"),
        ("0,9e-7,8,8,1,0\n", "use speeds from 1e-06 to 1e+12"),
        ("0,100,8,2e12,1,0\n", "use speeds from 1e-06 to 1e+12"),
        ("0,100,nan,8,1,0\n", "use speeds from 1e-06 to 1e+12"),
        ("0,100,8,8,1.5,0\n", "use speeds from 1e-06 to 1e+12, and availability and dropout from 0 to 1"),
        (EVERYBODY.format("0,0"), "a trace with at least one client that can be reached (availability above 0)"),
        (EVERYBODY.format("1,1"), "a trace with at least one client that can be reached"),
        (EVERYBODY.replace("{0}", "0,0", 1).format("1,1"), "at least one client that can be reached"),
        ("\n0,100,8,8,1.5,0\n", "line 3 of devices.csv"),
        ("nan,100,8,8,1,0\n", "'line 2 of devices.csv: client nan' is not allowed; use a whole number for each client"),
        ("inf,100,8,8,1,0\n", "'line 2 of devices.csv: client inf' is not allowed; use a whole number for each client"),
        ("0,100,8,8,1,0\n1.7,100,8,8,1,0\n", "'line 3 of devices.csv: client 1.7' is not allowed; use a whole number"),
        (",100,8,8,1,0\n", "'line 2 of devices.csv: client ' is not allowed; use a whole number for each client"),
        (
            "7,100,8,8,1,0\n7,9,8,8,1,0\n",
            "'line 3 of devices.csv: client 7' is not allowed; use one line for each client",
        ),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        assemble(config(system=str(trace(tmp_path, lines))))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "it lacks client, examples_per_second, download_mbit, upload_mbit, availability, dropout"),
        (
            HEAD.replace(",", ";"),
            "it lacks client, examples_per_second, download_mbit, upload_mbit, availability, dropout",
        ),
        (HEAD.replace("availability", "available"), "it lacks availability"),
    ],
)
def test_a_header_that_lacks_columns_is_named(tmp_path: Path, header: str, message: str) -> None:
    (tmp_path / "devices.csv").write_text(header + EVERYBODY.format("1,0"))
    with pytest.raises(InvalidSetting) as caught:
        assemble(config(system=str(tmp_path / "devices.csv")))
    said = str(caught.value)
    assert said.startswith("system: 'line 1 of devices.csv' is not allowed; use a header with client, ")
    assert said.endswith(message) and "\n" not in said


def test_a_trace_may_come_from_excel_and_have_more_columns(tmp_path: Path) -> None:
    header, lines = HEAD.replace("\n", ",town\r\n"), "4,10,8,2,1,0,Ulm\r\n7,50,16,4,1,0,Bonn\r\n"
    (tmp_path / "devices.csv").write_bytes((header + lines).encode("utf-8-sig"))
    assert SystemModel.from_trace(tmp_path / "devices.csv", 0, np.array([4, 7])).speed.tolist() == [10.0, 50.0]


def test_the_slowest_devices_take_long_but_not_for_ever(tmp_path: Path) -> None:
    file = trace(tmp_path, EVERYBODY.format("1,0").replace("100,8,8", "1e-6,1e-6,1e-6"))
    history = fs.run(config(system=str(file)))
    assert all(np.isfinite(row["simulated"]["seconds"]) for row in history.rows)
    assert np.isfinite(history.summary["simulated"]["seconds"])


@pytest.mark.parametrize("system", ["", "Drawn", "drwan"])
def test_a_system_that_is_no_file_is_said_in_one_line(typed: Typed, system: str) -> None:
    status, _, said = typed("run", "--system", system, "--out", "run")
    hint = "'drawn' (nearest), or a CSV file" if system else "none, drawn or a CSV file"
    assert status == 2 and said == f"error: system: {system!r} is not allowed; use {hint}\n"
    assert not Path("run").exists()


def test_a_file_may_have_a_name_like_one_of_ours(tmp_path: Path) -> None:
    file = trace(tmp_path, EVERYBODY.format("1,0")).rename(tmp_path / "drawn.csv")
    assert assemble(config(system=str(file)))[0].system is not None


def test_a_deadline_that_nobody_can_meet_is_refused_before_the_run(typed: Typed, tmp_path: Path) -> None:
    """The two quickest never answer; client 2 gets the model at 10 KB a second and sends it at 1 MB."""
    lines = "0,1e9,1e9,1e9,0,0\n1,1e9,1e9,1e9,1,1\n2,1000,0.08,8,1,0\n"
    file = trace(tmp_path, lines + "".join(f"{client},10,0.08,8,1,0\n" for client in range(3, 10)))
    federation, _ = assemble(config(system=str(file), heterogeneity="iid"))
    download = federation.model.numel() * 4 / 1e4
    takes = download + download / 100 + federation.examples[2] / 1000
    words = ["run", "--clients", "10", "--heterogeneity", "iid", "--rounds", "2", "--ratio", "1", "--out", "run"]
    status, _, said = typed(*words, "--system", file, "--deadline", str(takes - 0.02))
    least = said.split("use at least ")[1].split(":")[0]
    assert status == 2 and said.count("\n") == 1 and said.startswith("error: deadline: ")
    assert takes <= float(least) <= takes + 0.01 and not Path("run").exists()
    assert typed(*words, "--system", file, "--deadline", least)[0] == 0
    other = [*words, "--out", "other", "--sampler", "power-of-choice-exact"]  # who has evaluated the model has it
    assert typed(*other, "--system", file, "--deadline", str(takes - download - 0.01))[0] == 2
    assert typed(*other, "--system", file, "--deadline", str(takes - download + 0.01))[0] == 0


def test_a_missing_trace_and_a_deadline_without_devices(typed: Typed) -> None:
    with pytest.raises(MissingData, match="system: there is no file"):
        assemble(config(system="nowhere.csv"))
    status, _, said = typed("run", "--deadline", "5")
    assert status == 2
    assert said == "error: deadline: 5.0 is not allowed; use it with --system drawn or a CSV file\n"


def test_who_evaluates_the_model_gets_it_first(tmp_path: Path) -> None:
    """Downloads of all twelve candidates, then the rest of what the six asked take; six others got it for nothing."""
    settings = {"clients": 12, "ratio": 0.5, "rounds": 2, "system": "drawn", "heterogeneity": "iid", "seed": 2}
    config = fs.Config(algorithm="fedpdp", sampler="power-of-choice-exact", **settings)
    federation, engine = assemble(config)
    assert federation.system is not None
    for number in (1, 2):
        there = federation.system.available(number, federation.clients)
        played = federation.play(number)
        examples, size = federation._examples_of(there), federation._model_bytes
        download, training, upload = federation.system.parts(there, examples, size)
        asked = np.isin(there, played.sampled)
        assert asked.sum() == min(6, len(there)) and played.simulated is not None
        assert played.simulated["seconds"] == pytest.approx(download.max() + (training + upload)[asked].max())
        answered = len(set(played.sampled) - {int(client) for client in played.excluded})
        assert played.simulated["bytes"] == size * (len(there) + answered)
    engine.close()


def test_who_has_the_model_already_is_not_late_for_having_had_to_get_it(tmp_path: Path) -> None:
    file = trace(tmp_path, "0,1e6,1e3,1e3,1,0\n" + "".join(f"{client},1e6,1,1e3,1,0\n" for client in range(1, 10)))
    settings = {"system": str(file), "heterogeneity": "iid", "ratio": 0.5, "algorithm": "fedpdp", "rounds": 1}
    size = assemble(config(**settings))[0].model.numel() * 4
    late = config(**settings, deadline=size / 125_000 / 2)  # half of what a slow download takes
    plain, evaluated = (
        fs.run(config(**late.model_dump() | {"sampler": sampler})).rows[0]
        for sampler in ("uniform", "power-of-choice-exact")
    )
    assert any(reason.startswith("too late") for reason in plain["excluded"].values())
    assert evaluated["excluded"] == {} and evaluated["simulated"]["seconds"] == pytest.approx(size / 125_000, rel=0.01)


def test_who_drops_out_has_nothing_to_do_with_who_is_there_or_with_other_rounds() -> None:
    clients = np.arange(4000)
    system = replace(SystemModel.drawn(0, clients), availability=np.full(4000, 0.5), dropout=np.full(4000, 0.5))
    there = [np.isin(clients, system.available(round, clients)) for round in (1, 2)]
    dropped = [np.isin(clients, system.dropped(round, clients)) for round in (1, 2)]
    for one, other in ((there[0], dropped[0]), (dropped[0], dropped[1]), (there[0], there[1])):
        assert 0.4 < one.mean() < 0.6 and abs(np.corrcoef(one, other)[0, 1]) < 0.06  # some four standard deviations


def test_devices_are_their_clients_in_whatever_order_they_are_listed(tmp_path: Path) -> None:
    file = trace(tmp_path, "7,10,8,8,1,0\n4,100,8,8,1,0\n")
    for system in (SystemModel.from_trace(file, 0, np.array([7, 4])), SystemModel.drawn(0, np.array([7, 4]))):
        examples = np.array([100, 100])
        taken = system.seconds(np.array([4, 7]), examples, 0)
        assert taken[::-1].tolist() == system.seconds(np.array([7, 4]), examples, 0).tolist()
    assert SystemModel.from_trace(file, 0, np.array([7, 4])).seconds(np.array([7]), examples[:1], 0) == 10


@pytest.mark.parametrize("sampler", [CSUCBSampler(), CSUCBQSampler(0.2), FedCSSampler(9.0)])
def test_a_sampler_that_goes_by_time_is_refused_without_devices(sampler: ClientSampler, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"^sampler: '{type(sampler).__name__}' is not allowed; use it with a system"
    ):
        fs.run(config(), sampler=sampler, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_devices_no_sampler_hears_of_time() -> None:
    """Of a computer's own speed, which differs from run to run, least of all."""
    sampler = Watching()
    fs.run(config(), sampler=sampler)
    assert sampler.told[0].losses and not any(feedback.durations for feedback in sampler.told)
    rows = [fs.run(config(rounds=8), sampler=OortSampler()).rows for _ in range(2)]
    assert [row["sampled"] for row in rows[0]] == [row["sampled"] for row in rows[1]]
