"""Records: a finished run as one small file that can be read back and merged with others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import fedsieve as fs
from fedsieve.errors import InvalidSetting
from fedsieve.report.page import write_page
from fedsieve.runs import History, find_runs, read_record, write_record
from fedsieve.runs.config import PLACE

SMALL: dict[str, Any] = {"rounds": 5, "clients": 6, "local_epochs": 1, "ratio": 0.5, "device": "cpu"}


@pytest.fixture(scope="module")
def bandit() -> History:
    return fs.run(fs.Config(algorithm="fedcm-ts", watch_models=True, **SMALL))


def test_what_is_read_is_what_was_run(bandit: History, tmp_path: Path) -> None:
    back = read_record(write_record(bandit, tmp_path))
    assert not back.config.differences(bandit.config)
    assert back.summary == bandit.summary
    for row, was in zip(back.rows, bandit.rows, strict=True):
        for name in ("round", "sampled", "kept", "excluded"):
            assert row[name] == was[name]
        for name in ("test_accuracy", "test_loss", "train_loss", "score", "seconds"):
            assert row[name] == pytest.approx(was[name], rel=1e-5)
        assert row["search"]["single"] == pytest.approx(was["search"]["single"], rel=1e-5)
    assert back.rows[-1]["bandit"] == bandit.rows[-1]["bandit"]


def test_a_record_keeps_simulated_times_and_a_backdoors_success(tmp_path: Path) -> None:
    run = fs.run(fs.Config(algorithm="fedavg", system="drawn", attack="backdoor", hostile=0.5, **SMALL))
    back = read_record(write_record(run, tmp_path))
    for row, was in zip(back.rows, run.rows, strict=True):
        assert row["simulated"] == pytest.approx(was["simulated"], rel=1e-5)
        assert row["backdoor_success"] == pytest.approx(was["backdoor_success"], rel=1e-5)


def test_a_record_has_each_clients_last_model_of_the_first_half(bandit: History, tmp_path: Path) -> None:
    back = read_record(write_record(bandit, tmp_path))
    expected: dict[str, tuple[int, list[float]]] = {}
    for row in bandit.rows[:3]:  # of 5 rounds
        expected |= {client: (row["round"], shares) for client, shares in row["per_class"].items()}
    found = {client: (row["round"], shares) for row in back.rows for client, shares in row.get("per_class", {}).items()}
    assert found == expected
    unwatched = History(bandit.config.model_copy(update={"watch_models": False}), bandit.rows, bandit.summary)
    assert not any("per_class" in row for row in read_record(write_record(unwatched, tmp_path)).rows)


def test_a_record_says_nothing_of_folders_and_is_small(bandit: History, tmp_path: Path) -> None:
    path = write_record(bandit, tmp_path)
    record = json.loads(path.read_text())
    assert not PLACE & set(record["config"])
    assert {"command", "versions", "hardware", "duration"} <= set(record["summary"])
    assert path.stat().st_size < 1000 * len(bandit.rows)


def test_runs_that_differ_have_records_of_different_names(bandit: History, tmp_path: Path) -> None:
    same = History(bandit.config.model_copy(update={"workers": 3}), bandit.rows, bandit.summary)
    other = History(bandit.config.model_copy(update={"lr": 0.5}), bandit.rows, bandit.summary)
    first = write_record(bandit, tmp_path)
    assert write_record(same, tmp_path) == first
    assert write_record(other, tmp_path) != first


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda text: text[:-200], "Expecting"),
        (lambda text: text.replace("fedsieve run 1", "another thing"), "no 'fedsieve run 1'"),
        (lambda text: text.replace('"rounds": 5,', '"rounds": 6,', 1), "rounds"),
        (lambda text: text.replace('"lr": 0.05', '"lr": -1'), "lr"),
        (lambda text: "[]", "no 'fedsieve run 1'"),
        (lambda text: text.replace('"excluded"', '"else"'), "excluded"),
    ],
)
def test_a_damaged_record_is_named(bandit: History, tmp_path: Path, damage: Any, problem: str) -> None:
    path = write_record(bandit, tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(InvalidSetting, match=path.name) as raised:
        read_record(path)
    assert problem in str(raised.value)


def test_records_and_run_directories_are_found_together(
    bandit: History, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = write_record(bandit, tmp_path / "all")
    fs.run(fs.Config(algorithm="fedavg", **SMALL), out=tmp_path / "all" / "run")
    (tmp_path / "all" / "other.json").write_text("{}")
    (tmp_path / "all" / "cut.json").write_text(written.read_text()[:400])
    with caplog.at_level(logging.WARNING, "fedsieve"):
        found = find_runs([tmp_path / "all"])
    assert sorted(history.config.algorithm for history in found) == ["fedavg", "fedcm-ts"]
    assert "cut.json is left out: it is damaged" in caplog.text and "other.json" not in caplog.text
    assert [history.config.algorithm for history in find_runs([written])] == ["fedcm-ts"]
    with pytest.raises(InvalidSetting, match="runs: "):
        find_runs([tmp_path / "all" / "other.json"])
    assert write_page(found, tmp_path / "page.html").stat().st_size > 1000


def test_watching_models_changes_nothing_but_the_notes() -> None:
    plain, watched = (fs.run(fs.Config(algorithm="fedpdp", watch_models=watch, **SMALL)) for watch in (False, True))
    assert watched.accuracy == plain.accuracy
    assert [row["kept"] for row in watched.rows] == [row["kept"] for row in plain.rows]
    assert not any("per_class" in row for row in plain.rows)
    for row in watched.rows:
        assert sorted(row["per_class"]) == sorted(map(str, row["sampled"]))
        assert all(len(shares) == 10 for shares in row["per_class"].values())
    with pytest.raises(InvalidSetting, match="at least 1 with watch_models"):
        fs.run(fs.Config(algorithm="fedpdp", watch_models=True, validation_per_class=0, **SMALL))
