"""The server's validation data: few, uneven, wrong; who sees that, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsieve as fs
from fedsieve import data
from fedsieve.engines import SequentialEngine
from fedsieve.filtering import accuracy, log_likelihood
from fedsieve.runs import assemble, load_run, read_record, record_name, write_record
from fedsieve.runs.assembly import split_data

SETTINGS: dict[str, Any] = {
    "rounds": 3, "clients": 6, "ratio": 0.5, "local_epochs": 1, "lr": 0.05, "batch_size": 16, "device": "cpu"
}  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "workers", pytest.param("lanes", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("algorithm", ["fedca", "fedpdp-server-client"])
def test_the_server_sees_wrong_labels_and_nobody_else_does(algorithm: str, engine: str) -> None:
    place = {"engine": engine, "device": "cuda" if engine == "lanes" else "cpu"}
    config = fs.Config(algorithm=algorithm, validation_errors=0.25, **SETTINGS | place)
    digits = data.load("digits")
    validation, _ = split_data(config, digits)
    federation, built = assemble(config)
    assert isinstance(built, SequentialEngine)
    known = built.labels("validation")
    assert (known.cpu().numpy() != digits.train_labels[validation]).sum() == 50  # of 200
    assert np.array_equal(built.labels("test").cpu().numpy(), digits.test_labels)
    for client in federation.clients.tolist():
        held = built.partition[client]
        assert np.array_equal(built._examples("train", held)[1].cpu().numpy(), digits.train_labels[held])
    if federation.server is not None:  # it learns from what it takes for the truth
        assert torch.equal(built._examples("train", built.partition[federation.server.client])[1], known)
    score, _ = built.score_and_gradient(federation.model)
    logits = built.logits([federation.model], "validation")[0]
    assert float(score) == pytest.approx(float(log_likelihood(logits, known)), rel=1e-4)
    built.close()


def test_errors_and_an_attack_go_together() -> None:
    config = fs.Config(algorithm="fedca", validation_errors=0.1, attack="label-flip", hostile=0.5, **SETTINGS)
    digits = data.load("digits")
    validation, partition = split_data(config, digits)
    _, engine = assemble(config)
    assert (engine.labels("validation").numpy() != digits.train_labels[validation]).sum() == 20
    inner = engine.engine  # type: ignore[attr-defined]
    flipped = [
        client
        for client in range(6)
        if np.array_equal(inner.dataset.train_labels[partition[client]], 9 - digits.train_labels[partition[client]])
    ]
    assert len(flipped) == 3
    engine.close()


def test_an_imbalanced_run_has_as_much_data_as_a_balanced_one() -> None:
    digits = data.load("digits")
    plain, uneven = (fs.Config(algorithm="fedca", validation_imbalance=factor, **SETTINGS) for factor in (1.0, 10.0))
    counts = [np.bincount(digits.train_labels[split_data(config, digits)[0]]) for config in (plain, uneven)]
    assert counts[0].tolist() == [20] * 10
    assert counts[1].sum() == 200 and (counts[1].max(), counts[1].min()) == (49, 5)
    assert 0 <= fs.run(uneven).rows[-1]["validation_accuracy"] <= 1


@pytest.mark.parametrize("errors", [0.0, 0.2])
def test_an_evened_out_run_looks_at_every_class_as_often(errors: float) -> None:
    flaws = {"validation_imbalance": 10.0, "validation_errors": errors}
    plain, evened = (fs.Config(algorithm="fedca", even_classes=on, **flaws, **SETTINGS) for on in (False, True))
    labels, held = [], []
    for config in (plain, evened):
        federation, engine = assemble(config)
        assert isinstance(engine, SequentialEngine)
        labels.append(engine.labels("validation").numpy())
        held.append([engine.partition[client].tolist() for client in federation.clients.tolist()])
        engine.close()
    counts = [np.bincount(some) for some in labels]
    assert counts[0].min() < counts[0].max() and counts[1].tolist() == [counts[0].max()] * 10
    assert held[0] == held[1]
    rows = fs.run(evened).rows
    assert rows[0]["kept"] and 0 <= rows[-1]["validation_accuracy"] <= 1


def test_who_trains_on_validation_data_as_a_client_has_it_once() -> None:
    flaws = {"validation_imbalance": 10.0, "even_classes": True}
    config = fs.Config(algorithm="fedpdp-server-client", **flaws, **SETTINGS)
    federation, engine = assemble(config)
    assert federation.server is not None and isinstance(engine, SequentialEngine)
    own = engine.partition[federation.server.client]
    assert len(set(own.tolist())) == len(own) == 200
    held = sum(len(engine.partition[client]) for client in federation.clients.tolist())
    assert federation.server.weight == pytest.approx(200 / held)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_imbalance": 0.5}, "validation_imbalance: 0.5 is not allowed; use a number of at least 1"),
        ({"validation_errors": 1.5}, "validation_errors: 1.5 is not allowed; use a number of at least 0 and at most 1"),
        ({"validation_errors": -0.1}, "validation_errors: -0.1 is not allowed; use a number of at least 0"),
    ],
)
def test_what_can_not_be_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.FedSieveError) as caught:
        fs.Config(**settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_runs_without_flaws_are_those_they_were_before_there_were_flaws(tmp_path: Path) -> None:
    history = fs.run(fs.Config(algorithm="fedavg", **SETTINGS))
    record = write_record(history, tmp_path)
    older = json.loads(record.read_text())
    for flaw in ("validation_imbalance", "even_classes", "validation_errors"):
        del older["config"][flaw]
    record.write_text(json.dumps(older))
    assert read_record(record).config.differences(history.config) == []
    others = [
        history.config.model_copy(update=flaw) for flaw in ({"validation_errors": 0.1}, {"validation_imbalance": 2.0})
    ]
    assert len({record_name(config) for config in (history.config, *others)}) == 3


@pytest.mark.parametrize("algorithm", ["fedca", "fedsieve", "server-only", "fedpdp-finetune", "fedpdp-server-client"])
def test_rows_say_how_the_new_model_does_on_validation_data(algorithm: str, tmp_path: Path) -> None:
    history = fs.run(fs.Config(algorithm=algorithm, **SETTINGS), out=tmp_path / "run")
    _, engine = assemble(history.config)
    assert history.model is not None
    logits, labels = engine.logits([history.model], "validation")[0], engine.labels("validation")
    last = history.rows[-1]
    assert last["validation_accuracy"] == pytest.approx(float(accuracy(logits, labels)))
    assert last["validation_loss"] == pytest.approx(-float(log_likelihood(logits, labels)), rel=1e-5)
    engine.close()
    back = read_record(write_record(history, tmp_path))
    frame = load_run(tmp_path / "run").rounds
    for name in ("validation_accuracy", "validation_loss"):
        values = [row[name] for row in history.rows]
        assert [row[name] for row in back.rows] == pytest.approx(values, rel=1e-5)
        assert frame[name].tolist() == values


def test_who_never_looks_at_validation_data_is_not_judged_by_it(tmp_path: Path) -> None:
    history = fs.run(fs.Config(algorithm="fedpdp", watch_models=True, **SETTINGS), out=tmp_path / "run")
    assert not any("validation_accuracy" in row for row in history.rows)
    assert "validation_accuracy" not in load_run(tmp_path / "run").rounds
    assert "validation_accuracy" not in read_record(write_record(history, tmp_path)).rows[0]
    filtered = fs.run(fs.Config(algorithm="fedpdp", filter="fltrust", **SETTINGS))
    assert all("validation_accuracy" in row for row in filtered.rows)


def test_validation_data_leaves_something_for_clients() -> None:
    own = data.Dataset.from_arrays(
        np.zeros((40, 3), np.float32), np.arange(40) % 2, np.zeros((4, 3), np.float32), [0, 1, 0, 1]
    )
    with pytest.raises(fs.FedSieveError, match=r"^validation_per_class: 20 is not allowed; use fewer: "):
        fs.run(fs.Config(validation_per_class=20, augment=False, model="mlp", clients=2), dataset=own)
