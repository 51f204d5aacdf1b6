"""What trackers write, read back with each package's own reader, and runs as frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fedsieve as fs
from fedsieve.cli.experiments import tracked
from fedsieve.errors import InvalidSetting, MissingData
from fedsieve.runs import RunDirectory, compare
from fedsieve.runs.frames import load_run
from fedsieve.runs.trackers import TRACKERS, Tracker, tracker

QUICK: dict[str, Any] = {"rounds": 3, "clients": 10, "local_epochs": 1, "device": "cpu", "engine": "sequential"}
OF_VALIDATION = {"score", "validation_accuracy", "validation_loss"}
EACH_ROUND = {"test_accuracy", "test_loss", "train_loss", "seconds", "kept", "excluded"} | OF_VALIDATION
SET_BY_TRACKERS = ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING")
AT_THE_END = {"seed", "rounds", "final_accuracy", "best_accuracy", "mean_last_10", "duration", "requests_gini"}


@dataclass
class Seen:
    """A run as its tracker has it: parameters, points (step, value) of each number, how it ended."""

    parameters: dict[str, Any]
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    finished: bool = False


def see_tensorboard(folder: Path) -> list[Seen]:
    EventAccumulator = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    HParamsPluginData = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    runs = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        events = EventAccumulator(str(place))
        events.Reload()
        about = {
            tag: HParamsPluginData.FromString(content) for tag, content in events.PluginTagToContent("hparams").items()
        }
        start = about["_hparams_/session_start_info"].session_start_info.hparams
        seen = Seen({name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()})
        for name in events.Tags()["scalars"]:
            seen.points[name] = [(event.step, event.value) for event in events.Scalars(name)]
        seen.finished = "_hparams_/session_end_info" in about
        runs.append(seen)
    return runs


def see_mlflow(folder: Path) -> list[Seen]:
    client = import_module("mlflow").MlflowClient(folder.as_uri())
    experiment = client.get_experiment_by_name("fedsieve")
    assert experiment is not None
    runs = []
    for run in client.search_runs([experiment.experiment_id]):
        seen = Seen(run.data.params, finished=run.info.status == "FINISHED")
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            seen.points[name] = sorted((metric.step, metric.value) for metric in history)
        runs.append(seen)
    return runs


def see_wandb(folder: Path) -> list[Seen]:
    Record = import_module("wandb.proto.wandb_internal_pb2").Record
    runs: dict[str, Seen] = {}
    for file in settled(folder):
        for content in log_records(file.read_bytes()):
            record = Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                given = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update if item.key != "_wandb"
                }
                seen = runs.setdefault(record.run.run_id, Seen(given))
            elif kind == "history":
                for item in record.history.item:
                    name = item.key or ".".join(item.nested_key)
                    if not name.startswith("_"):
                        point = (record.history.step.num, json.loads(item.value_json))
                        seen.points.setdefault(name, []).append(point)
            elif kind == "exit":
                seen.finished = record.exit.exit_code == 0
    return list(runs.values())


def settled(folder: Path) -> list[Path]:
    """W&B's files once they no longer change: a process of its own writes them, a little after `finish` returns."""
    before: list[tuple[Path, int]] = []
    for _ in range(20):
        files = [(file, file.stat().st_size) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
        if files and files == before:
            break
        before = files
        time.sleep(0.7)
    return [file for file, _ in before]


def log_records(content: bytes) -> list[bytes]:
    """The records of W&B's file, which is a LevelDB log behind a header of 7 bytes."""
    records, part, at = [], b"", 7
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little for a record's header: the block's end is unused
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(part)
            part = b""
    return records


SEE: dict[str, Callable[[Path], list[Seen]]] = {
    "tensorboard": see_tensorboard,
    "mlflow": see_mlflow,
    "wandb": see_wandb,
}


@pytest.fixture(params=list(TRACKERS))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of each tracker whose package is here; the environment says nothing about where to write."""
    if find_spec(request.param) is None:
        pytest.skip(f"needs the package {request.param}: pip install 'fedsieve[track]'")
    for variable in [*(known for known in os.environ if known.startswith(("WANDB_", "MLFLOW_"))), *SET_BY_TRACKERS]:
        monkeypatch.setenv(variable, "")  # so that it is put back afterwards, whatever happens to it
        monkeypatch.delenv(variable)
    return str(request.param)


class Interrupt(fs.Callback):
    """Stands for a kill after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


def plain(values: Mapping[str, Any]) -> dict[str, float | str]:
    """Values as the trackers' kinds of text and number agree on them."""

    def one(value: Any) -> float | str:
        try:
            return {"True": 1.0, "False": 0.0}[str(value)] if str(value) in ("True", "False") else float(str(value))
        except ValueError:
            return str(value)

    return {name: one(value) for name, value in values.items()}


def check(seen: Seen, history: fs.History) -> None:
    """`seen` is all of `history`, once."""
    assert plain(seen.parameters) == plain(history.config.model_dump(mode="json"))
    assert set(seen.points) == EACH_ROUND | AT_THE_END
    for name in EACH_ROUND:
        values = [len(row[name]) if name in ("kept", "excluded") else row[name] for row in history.rows]
        assert [step for step, _ in seen.points[name]] == list(range(1, len(values) + 1))
        assert [value for _, value in seen.points[name]] == pytest.approx(values, rel=1e-6)
    for name in AT_THE_END:
        ((step, last),) = seen.points[name]
        assert step == history.config.rounds and last == pytest.approx(history.summary[name], rel=1e-6)
    assert seen.finished


def test_a_run_is_tracked_whole_and_once(name: str, tmp_path: Path) -> None:
    config = fs.Config(algorithm="fedca", **QUICK)
    for _ in range(2):  # the second time the finished run is only read
        history = fs.run(config, out=tmp_path / "run", resume=True, callbacks=[tracker(name, tmp_path)])
    (seen,) = SEE[name](tmp_path / name)
    check(seen, history)


def test_a_resumed_run_goes_on_in_its_tracker(name: str, tmp_path: Path) -> None:
    config = fs.Config(algorithm="fedca", **QUICK)
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, out=tmp_path / "run", callbacks=[tracker(name, tmp_path), Interrupt(after=2)])
    if name == "wandb":
        time.sleep(1.1)  # it names the parts of a run by the second
    moved = config.model_copy(update={"data_dir": tmp_path})  # may differ, and MLflow refuses to change parameters
    history = fs.run(moved, out=tmp_path / "run", resume=True, callbacks=[tracker(name, tmp_path)])
    (seen,) = SEE[name](tmp_path / name)
    seen.parameters["data_dir"] = history.config.data_dir
    check(seen, history)


def test_rounds_played_again_are_logged_as_the_package_does_it(name: str, tmp_path: Path) -> None:
    config = fs.Config(algorithm="fedca", **QUICK)
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, out=tmp_path / "run", callbacks=[tracker(name, tmp_path), Interrupt(after=2)])
    (tmp_path / "run" / "checkpoints" / "round-000002.safetensors").write_bytes(b"damaged")
    if name == "wandb":
        time.sleep(1.1)
    fs.run(config, out=tmp_path / "run", resume=True, callbacks=[tracker(name, tmp_path)])
    (seen,) = SEE[name](tmp_path / name)
    steps = [step for step, _ in seen.points["test_accuracy"]]
    assert steps == ([1, 2, 3] if name == "tensorboard" else [1, 2, 2, 3])


def test_the_same_run_made_anew_is_another_run(name: str, tmp_path: Path) -> None:
    config = fs.Config(algorithm="fedca", **QUICK)
    shared = tracker(name, tmp_path)
    histories = [fs.run(config, callbacks=[shared]) for _ in range(2)]
    runs = SEE[name](tmp_path / name)
    for seen, history in zip(
        sorted(runs, key=lambda seen: [round(value, 4) for _, value in seen.points["seconds"]]),
        sorted(histories, key=lambda history: [row["seconds"] for row in history.rows]),
        strict=True,
    ):
        check(seen, history)


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_runs_of_a_comparison_are_told_apart(name: str, at_once: int, tmp_path: Path) -> None:
    config = fs.Config(**QUICK)
    callbacks = [tracker(name, tmp_path)]
    histories = compare(config, ["fedca", "fedcm-ucb"], 2, tmp_path / "runs", callbacks, at_once=at_once)
    runs = {(seen.parameters["algorithm"], int(seen.parameters["seed"])): seen for seen in SEE[name](tmp_path / name)}
    assert len(runs) == 4
    for algorithm, ended in histories.items():
        for history in ended:
            check(runs[algorithm, history.config.seed], history)


def test_a_tracker_may_be_shared_by_threads_of_ones_own(name: str, tmp_path: Path) -> None:
    shared = tracker(name, tmp_path)
    configs = [fs.Config(algorithm="fedca", seed=seed, **QUICK) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        histories = list(threads.map(lambda config: fs.run(config, callbacks=[shared]), configs))
    runs = sorted(SEE[name](tmp_path / name), key=lambda seen: int(seen.parameters["seed"]))
    for seen, history in zip(runs, histories, strict=True):
        check(seen, history)


def test_a_run_that_fails_is_closed_before_the_next(name: str, tmp_path: Path) -> None:
    shared = tracker(name, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fs.run(fs.Config(algorithm="fedca", seed=1, **QUICK), callbacks=[shared, Interrupt(after=1)])
    history = fs.run(fs.Config(algorithm="fedca", seed=2, **QUICK), callbacks=[shared])
    failed, good = sorted(SEE[name](tmp_path / name), key=lambda seen: int(seen.parameters["seed"]))
    assert not failed.finished and set(failed.points) == EACH_ROUND
    check(good, history)


def test_filters_without_a_score_log_none(name: str, tmp_path: Path) -> None:
    fs.run(fs.Config(algorithm="fedavg", **QUICK), callbacks=[tracker(name, tmp_path)])
    (seen,) = SEE[name](tmp_path / name)
    assert set(seen.points) == (EACH_ROUND | AT_THE_END) - OF_VALIDATION


def test_a_folder_that_cannot_be_written_to_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a file")
    with pytest.raises(InvalidSetting, match=r"^track: .* a folder that can be written to") as raised:
        fs.run(fs.Config(**QUICK), callbacks=[tracker(name, tmp_path)])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in SET_BY_TRACKERS:
        monkeypatch.setenv(variable, "true")
    for module in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidSetting) as raised:
        tracker(name, tmp_path)
    assert raised.value.field == "track" and "pip install 'fedsieve[track]'" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_tracker_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="track: 'tensorbord' is not allowed; use 'tensorboard'"):
        tracker("tensorbord", tmp_path)


def test_a_tracker_that_fails_at_the_start_is_one_line(tmp_path: Path) -> None:
    class Away(Tracker):
        def create(self, config: fs.Config) -> str:
            raise ConnectionError("no server\nat all")

    with pytest.raises(InvalidSetting, match=r"^track: 'away' is not .* \(ConnectionError: no server at all\)$"):
        fs.run(fs.Config(**QUICK), callbacks=[Away(tmp_path / "away")])


def test_trackers_are_only_loaded_when_asked_for() -> None:
    code = (
        "import sys, fedsieve, fedsieve.runs.trackers, fedsieve.runs.frames; "
        "print([name for name in ('tensorboard', 'mlflow', 'wandb', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_becomes_frames(tmp_path: Path) -> None:
    history = fs.run(fs.Config(algorithm="fedca", **QUICK), out=tmp_path)
    run = load_run(tmp_path)
    assert run.config == history.config and run.summary == history.summary
    assert run.rounds.index.tolist() == [1, 2, 3] and run.rounds["test_accuracy"].tolist() == history.accuracy
    assert run.rounds["kept"].tolist() == [len(row["kept"]) for row in history.rows]
    assert run.clients.groupby("round")["client"].apply(list).tolist() == [row["sampled"] for row in history.rows]
    assert run.clients["kept"].sum() == run.rounds["kept"].sum()
    shares = run.clients.groupby("round")["coefficient"].sum() + run.rounds["previous"]
    assert shares.tolist() == pytest.approx([1, 1, 1])
    kept = run.clients.query("kept and round == 2")
    assert dict(zip(kept["client"], kept["coefficient"], strict=True)) == dict(
        zip(history.rows[1]["kept"], history.rows[1]["coefficients"]["clients"], strict=True)
    )


def test_frames_have_the_types_they_promise_even_without_rows(tmp_path: Path) -> None:
    rounds = {
        **dict.fromkeys(("test_accuracy", "test_loss", "train_loss", "score", "seconds"), "float64"),
        **dict.fromkeys(("sampled", "kept", "excluded"), "int64"),
        "previous": "float64",
    }
    clients = {"round": "int64", "client": "int64", "kept": "bool", "coefficient": "float64", "excluded": "string"}
    config = fs.Config(algorithm="fedavg", **QUICK)
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, out=tmp_path / "some", callbacks=[Interrupt(after=2)])
    RunDirectory(tmp_path / "none").create(config)
    for place, rows in (("some", 2), ("none", 0)):
        run = load_run(tmp_path / place)
        assert run.summary is None and len(run.rounds) == rows
        assert run.rounds.dtypes.astype(str).to_dict() == rounds and run.rounds.index.name == "round"
        assert run.clients.dtypes.astype(str).to_dict() == clients
    assert load_run(tmp_path / "some").rounds["score"].isna().all()


def test_frames_have_simulated_time_and_a_backdoors_success(tmp_path: Path) -> None:
    settings = {**QUICK, "system": "drawn", "attack": "backdoor", "hostile": 0.5}
    history = fs.run(fs.Config(algorithm="fedavg", **settings), out=tmp_path)
    rounds = load_run(tmp_path).rounds
    assert rounds["simulated_seconds"].tolist() == [row["simulated"]["seconds"] for row in history.rows]
    assert rounds["simulated_bytes"].sum() == history.summary["simulated"]["bytes"]
    assert rounds["backdoor_success"].tolist() == [row["backdoor_success"] for row in history.rows]


def test_excluded_clients_say_why(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create(fs.Config(**QUICK))
    row = {"round": 1, "sampled": [4, 7], "kept": [7], "coefficients": {"previous": 0.5, "clients": [0.5]}}
    row |= {"score": None, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0, "seconds": 0.1}
    directory.append(row | {"excluded": {"4": "no answer"}})
    clients = load_run(tmp_path).clients.set_index("client")
    assert clients["excluded"].dropna().to_dict() == {4: "no answer"}
    assert clients["coefficient"].to_dict() == {4: 0.0, 7: 0.5}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "rounds: [\n"),
        ("config.yaml", "rounds: many\n"),
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("metrics.jsonl", ""),
        ("metrics.jsonl", '{"round": 1}\n{"round": 2}\n{"round": 3}\n'),
        ("metrics.jsonl", None),
    ],
)
def test_a_damaged_run_directory_is_one_line(file: str, content: str | None, tmp_path: Path) -> None:
    fs.run(fs.Config(**QUICK), out=tmp_path)
    if content is None:
        content = (tmp_path / file).read_text().replace('"kept": [', '"kept": [99, ')
    (tmp_path / file).write_text(content)
    with pytest.raises(InvalidSetting) as raised:
        load_run(tmp_path)
    assert "\n" not in str(raised.value)


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="there is no run in"):
        load_run(tmp_path / "nothing")


def test_who_is_drawn_twice_has_one_row(tmp_path: Path) -> None:
    config = fs.Config(**QUICK | {"algorithm": "fedprox", "heterogeneity": "client", "clients": 4, "ratio": 1.0})
    fs.run(config, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert not run.clients.duplicated(["round", "client"]).any()
    assert run.clients.groupby("round")["coefficient"].sum().tolist() == pytest.approx([1.0] * config.rounds)


def test_a_tracker_named_twice_is_one(tmp_path: Path) -> None:
    with tracked("tensorboard, tensorboard", tmp_path) as trackers:
        assert len(trackers) == 1
