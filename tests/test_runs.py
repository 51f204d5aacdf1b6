"""What a run records, and what a comparison makes of several."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsieve as fs
from fedsieve import data
from fedsieve.locking import locked
from fedsieve.runs import RunDirectory, Spread, assemble, compare, rounds_to, summarise
from fedsieve.stopwatch import PHASES
from fedsieve.vector import Layout

QUICK: dict[str, Any] = {"rounds": 3, "clients": 10, "local_epochs": 1, "device": "cpu"}


@pytest.mark.parametrize("algorithm", fs.algorithms.ALGORITHMS)
def test_every_algorithm_learns(algorithm: str) -> None:
    history = fs.run(fs.Config(algorithm=algorithm, rounds=8, batch_size=16, lr=0.05, heterogeneity="iid"))
    assert history.accuracy[-1] > 0.6


def test_a_run_directory_holds_what_it_promises(tmp_path: Path) -> None:
    config = fs.Config(algorithm="fedca", **QUICK)
    history = fs.run(config, out=tmp_path / "run")
    assert fs.Config.load(tmp_path / "run" / "config.yaml") == config
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == history.rows
    for row in rows:
        assert list(row) == [
            *("round", "sampled", "kept", "coefficients", "score", "search"),
            *("test_accuracy", "test_loss", "validation_accuracy", "validation_loss"),
            *("train_loss", "excluded", "per_class", "seconds", "phases"),
        ]
        assert set(row["kept"]) <= set(row["sampled"]) and len(row["sampled"]) == 4
        assert len(row["coefficients"]["clients"]) == len(row["kept"])
        assert sum(row["coefficients"]["clients"]) == pytest.approx(1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    accuracies = [row["test_accuracy"] for row in rows]
    assert (summary["algorithm"], summary["seed"], summary["rounds"]) == ("fedca", 0, 3)
    assert (summary["final_accuracy"], summary["best_accuracy"]) == (accuracies[-1], max(accuracies))
    assert summary["mean_last_10"] == pytest.approx(np.mean(accuracies))
    assert summary["versions"]["torch"] == torch.__version__ and summary["hardware"]["cores"] >= 1
    assert summary["duration"] > 0


def test_recorded_accuracy_and_loss_are_those_of_the_saved_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = fs.Config(**QUICK)
    history = fs.run(config, out=tmp_path)
    module = fs.models.build("mlp", (1, 8, 8), 10)
    module.load_state_dict(load_file(tmp_path / "checkpoints" / "round-000003.safetensors"))
    digits = data.load("digits")
    labels = torch.from_numpy(np.asarray(digits.test_labels, dtype=np.int64))
    with torch.no_grad():
        logits = module(digits.prepare(digits.test_inputs))
    assert history.rows[-1]["test_accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    expected = float(torch.nn.functional.cross_entropy(logits, labels))
    assert history.rows[-1]["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_batch_norm_buffers_are_averaged_with_the_parameters() -> None:
    class Normed(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))

    federation, engine = assemble(fs.Config(algorithm="fedpdp", **QUICK), model=Normed)
    start = federation.model.clone()
    played = federation.play(1)
    updates = engine.train(start, played.sampled, 1)
    stack = torch.stack([update.model for update in updates if update.model is not None])
    shares = torch.tensor(played.coefficients.clients, dtype=torch.float32)
    torch.testing.assert_close(federation.model, (shares[:, None] * stack).sum(0))
    buffers = slice(engine.layout.parameters, engine.layout.size)
    assert not torch.equal(federation.model[buffers], start[buffers])


def test_clients_without_data_are_never_asked(caplog: pytest.LogCaptureFixture) -> None:
    config = fs.Config(algorithm="fedavg", heterogeneity="client", alpha=0.01, clients=60, ratio=1.0, rounds=1)
    with caplog.at_level("INFO", "fedsieve"):
        federation, _ = assemble(config)
    empty = 60 - len(federation.clients)
    assert empty > 0 and f"{empty} of 60 clients hold no data" in caplog.text
    assert len(federation.sampler.sample(1, federation.clients, federation.per_round)) == 60 - empty
    assert federation.weights.sum() == pytest.approx(1)


def test_a_client_with_poisoned_data_is_left_out_and_recorded() -> None:
    digits = data.load("digits")
    poisoned = np.array(digits.train_inputs, dtype=np.float32)
    config = fs.Config(algorithm="fedcm-ucb", **QUICK | {"ratio": 1.0})
    _, engine = assemble(config)
    poisoned[engine.partition[3]] = np.nan  # type: ignore[attr-defined]
    dataset = fs.Dataset.from_arrays(poisoned, digits.train_labels, digits.test_inputs, digits.test_labels)
    history = fs.run(config, dataset=dataset)
    for row in history.rows:
        assert row["excluded"] == {"3": "model with NaN or infinity"}
        assert 3 in row["sampled"] and 3 not in row["kept"]
    assert np.isfinite(history.accuracy).all()


def test_callbacks_hear_start_rounds_and_end() -> None:
    class Listener(fs.Callback):
        def __init__(self) -> None:
            self.heard: list[object] = []

        def on_start(self, config: fs.Config, done: int) -> None:
            self.heard.append(("start", config.seed, done))

        def on_round(self, row: Mapping[str, Any]) -> None:
            self.heard.append(row["round"])

        def on_end(self, summary: Mapping[str, Any]) -> None:
            self.heard.append(("end", summary["rounds"]))

    listener = Listener()
    fs.run(fs.Config(seed=5, **QUICK), callbacks=[listener])
    assert listener.heard == [("start", 5, 0), 1, 2, 3, ("end", 3)]


def test_a_history_becomes_a_frame() -> None:
    history = fs.run(fs.Config(**QUICK))
    assert history.frame()["test_accuracy"].tolist() == history.accuracy


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (fs.run(fs.Config(seed=seed, **QUICK)) for seed in (1, 1, 2))
    assert first.model is not None and again.model is not None and other.model is not None
    assert torch.equal(first.model, again.model)
    assert not torch.equal(first.model, other.model)


def test_schedules_epochs_and_steps_reach_the_clients() -> None:
    runs = [
        fs.run(fs.Config(**QUICK | change))
        for change in ({}, {"schedule": "constant"}, {"local_steps": 1}, {"weight_decay": 0.1}, {"momentum": 0.0})
    ]
    finals = [run.rows[-1]["train_loss"] for run in runs]
    assert len(set(finals)) == len(finals)


def test_scoring_averaged_weights_runs_end_to_end() -> None:
    history = fs.run(fs.Config(algorithm="fedca", scored_by="weights", **QUICK))
    score = history.rows[-1]["score"]
    assert history.model is not None
    _, engine = assemble(fs.Config(algorithm="fedca", **QUICK))
    reached = fs.filtering.accuracy(engine.logits([history.model], "validation")[0], engine.labels("validation"))
    assert score == pytest.approx(float(reached))  # the model that was scored is the model that was kept


def test_a_comparison_runs_the_grid_and_skips_what_is_finished(tmp_path: Path) -> None:
    config = fs.Config(**QUICK)
    histories = compare(config, ["fedavg", "fedca"], 2, tmp_path)
    assert [history.config.seed for history in histories["fedca"]] == [0, 1]
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    again = compare(config, ["fedavg", "fedca"], 2, tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == stamps
    assert summarise(again) == summarise(histories)


class Helper(fs.Callback):
    """Makes the same comparison, from the first round of the first run on."""

    def __init__(self, out: Path) -> None:
        self.out, self.begun, self.found = out, 0, 0

    def on_start(self, config: fs.Config, done: int) -> None:
        self.begun += not done

    def on_round(self, row: Mapping[str, Any]) -> None:
        if self.begun == 1:
            made = compare(fs.Config(**QUICK), ["fedavg", "fedca"], 2, self.out, [self])
            self.found = sum(len(runs) for runs in made.values())


def test_processes_that_make_the_same_comparison_share_its_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    helper = Helper(tmp_path)
    histories = compare(fs.Config(**QUICK), ["fedavg", "fedca"], 2, tmp_path, [helper])
    assert helper.begun == 4 and helper.found == 3  # the first run was not its own
    assert [message for message in caplog.messages if message.startswith("1 of 4 runs are missing: ")]
    assert [[history.config.seed for history in runs] for runs in histories.values()] == [[0, 1], [0, 1]]


def test_what_another_process_has_finished_in_the_end_is_part_of_a_comparison(tmp_path: Path) -> None:
    whole = compare(fs.Config(**QUICK), ["fedavg", "fedca"], 1, tmp_path)
    with locked(tmp_path / "fedavg" / "seed-0"):  # it still has its folder
        again = compare(fs.Config(**QUICK), ["fedavg", "fedca"], 1, tmp_path)
    assert {name: [run.accuracy for run in runs] for name, runs in again.items()} == {
        name: [run.accuracy for run in runs] for name, runs in whole.items()
    }


def test_a_summary_is_mean_and_sample_deviation_over_seeds(tmp_path: Path) -> None:
    histories = compare(fs.Config(**QUICK), ["fedavg", "fedcm-ts"], 3, tmp_path)
    first, second = summarise(histories)
    finals = [history.accuracy[-1] for history in histories["fedcm-ts"]]
    mean = sum(finals) / 3
    assert second.final.mean == pytest.approx(mean)
    assert second.final.std == pytest.approx((sum((value - mean) ** 2 for value in finals) / 2) ** 0.5)
    target = first.final.mean
    reached = [rounds_to(target, history.accuracy) for history in histories["fedcm-ts"]]
    assert second.reached == sum(value is not None for value in reached)


def test_rounds_to_a_target_count_from_one() -> None:
    assert rounds_to(0.5, [0.1, 0.5, 0.4, 0.9]) == 2
    assert rounds_to(0.95, [0.1, 0.5]) is None


def test_a_record_reaches_its_own_accuracy_though_it_has_six_digits() -> None:
    exact = 181 / 355
    assert round(exact, 6) < exact and rounds_to(exact, [0.1, round(exact, 6)]) == 2
    assert rounds_to(exact, [0.1, exact - 1e-4]) is None
    assert Spread.of([2.0]) == Spread(2.0, 0.0)


def test_runs_at_the_same_time_are_those_one_after_the_other(tmp_path: Path) -> None:
    config = fs.Config(**QUICK)
    seen: list[tuple[str, int]] = []

    class Watch(fs.Callback):
        inside = 0

        def on_round(self, row: Mapping[str, Any]) -> None:
            assert self.inside == 0, "two runs at once in a callback"
            self.inside += 1
            time.sleep(0.001)
            self.inside -= 1
            seen.append((str(row["sampled"]), row["round"]))

    alone = compare(config, ["fedca", "fedcm-ucb"], 2, tmp_path / "alone")
    together = compare(config, ["fedca", "fedcm-ucb"], 2, tmp_path / "together", [Watch()], at_once=3)
    assert len(seen) == 12
    for name, histories in alone.items():
        for one, other in zip(histories, together[name], strict=True):
            assert one.config == other.config
            assert one.model is not None and other.model is not None and torch.equal(one.model, other.model)
            assert one.accuracy == other.accuracy


def test_an_error_in_one_run_stops_those_beside_it(tmp_path: Path) -> None:
    rounds = []

    class Fails(fs.Callback):
        def on_round(self, row: Mapping[str, Any]) -> None:
            rounds.append(row["round"])
            if len(rounds) == 4:
                raise RuntimeError("enough")

    config = fs.Config(**QUICK | {"rounds": 500})
    with pytest.raises(RuntimeError, match="enough"):
        compare(config, ["fedca", "fedpdp", "fedcm-ts"], 2, tmp_path, [Fails()], at_once=2)
    assert len(rounds) < 50
    assert not list(tmp_path.glob("*/*/summary.json"))


def test_a_profile_accounts_for_a_round(tmp_path: Path) -> None:
    history = fs.run(fs.Config(algorithm="fedca", **QUICK), out=tmp_path)
    assert [list(round) for round in history.profile] == [list(PHASES)] * 3
    for row, phases in zip(history.rows, history.profile, strict=True):
        assert all(seconds > 0 for seconds in phases.values())
        played = sum(phases.values()) - phases["write"]
        assert 0.5 * row["seconds"] < played <= row["seconds"] + 0.01
    assert fs.run(fs.Config(algorithm="fedca", **QUICK), out=tmp_path, resume=True).profile == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_checkpoints_are_safetensors_whatever_the_model_is_made_of(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(dtype)
    layout = Layout.of(module)
    directory = RunDirectory(tmp_path / "run")
    directory.create(fs.Config())
    directory.append({"round": 1})
    directory.save(1, layout.read(module), layout, {"state": [1]})
    saved = load_file(tmp_path / "run" / "checkpoints" / "round-000001.safetensors")
    for name, tensor in module.state_dict().items():
        assert saved[name].dtype == dtype and torch.equal(saved[name], tensor.to(dtype))
    checkpoint, _ = directory.latest()
    assert checkpoint is not None and torch.equal(checkpoint.model(layout), layout.read(module))


def test_rows_hold_per_class_accuracies_and_what_a_bandit_believes() -> None:
    seen = []

    class Look(fs.filtering.CombinatorialFilter):
        def select(self, candidates: fs.filtering.Candidates) -> fs.filtering.Selection:
            seen.append((candidates.logits.clone(), candidates.labels.clone()))
            return super().select(candidates)

    history = fs.run(fs.Config(algorithm="fedcm-ucb", **QUICK), filter=Look())
    for row, (logits, labels) in zip(history.rows, seen, strict=True):
        assert list(map(int, row["per_class"])) == row["sampled"]
        for place, shares in enumerate(row["per_class"].values()):
            for label, share in enumerate(shares):
                guesses = [int(outputs.argmax()) for outputs in logits[place][labels == label]]
                assert share == pytest.approx(guesses.count(label) / len(guesses), abs=1e-4)
        assert set(row["sampled"]) <= set(row["bandit"]["clients"])
        for mean, low, high in zip(row["bandit"]["mean"], row["bandit"]["low"], row["bandit"]["high"], strict=True):
            assert 0 <= mean <= 1 and mean - low == pytest.approx(high - mean, abs=2e-4)
        assert row["search"]["single"] <= row["score"] and row["search"]["all"] <= row["score"]
    unfiltered = fs.run(fs.Config(algorithm="fedpdp", **QUICK)).rows[0]
    assert "per_class" not in unfiltered and "bandit" not in unfiltered


def test_server_only_is_the_model_trained_on_the_validation_data_alone() -> None:
    config = fs.Config(algorithm="server-only", momentum=0.9, **QUICK)
    history = fs.run(config)
    digits = data.load("digits")
    validation, _ = data.validation_split(digits.train_labels, config.validation_per_class, 10, config.seed)
    own = data.Partition(validation, np.array([0, len(validation)]), validation[:0])
    settings = config.local_training(fs.clients.Plain())
    engine = fs.engines.SequentialEngine(
        lambda: fs.models.build("mlp", (1, 8, 8), 10), digits, own, validation, settings, config.seed
    )
    model = engine.initial_model()
    for number in range(1, config.rounds + 1):
        trained = engine.train(model, [0], number)[0].model
        assert trained is not None
        model = trained
    assert history.model is not None and torch.allclose(history.model, model, atol=1e-7)
    assert [row["sampled"] for row in history.rows] == [[0]] * 3
    with pytest.raises(fs.FedSieveError, match=r"validation_per_class: 0 .* server-only"):
        fs.run(fs.Config(algorithm="server-only", validation_per_class=0, **QUICK))
