"""A run that is killed and gone on with ends as an undisturbed one, bit for bit."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsieve as fs
from fedsieve.errors import InvalidSetting, MissingData, RunInUse, TooFewUpdates
from fedsieve.filtering import Candidates, KeepAll, Selection
from fedsieve.runs import RunDirectory, load_run
from fedsieve.sampling import Feedback, UniformSampler

SETTINGS: dict[str, Any] = {
    "algorithm": "fedcm-ts",
    "rounds": 4,
    "clients": 10,
    "local_epochs": 1,
    "device": "cpu",
    "refresh": "stale",
    "server_momentum": 0.3,
    "smoothing": 0.5,
}
CONFIG = fs.Config(**SETTINGS)

# What a round does to the disk: flush the row; flush, rename, flush the folder for the model; the same for the JSON.
STEPS_TO_BEGIN, STEPS_A_ROUND = 3, 7

KILLER = """
import json, os, signal, sys
import fedsieve as fs

settings, folder, points = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

def run_and_be_killed(point):
    steps = 0
    def counted(function):
        def called(*arguments, **options):
            nonlocal steps
            steps += 1
            if steps == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return called
    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    fs.run(fs.Config(**settings), out=f"{folder}/killed-at-{point}")

for point in points:
    child = os.fork()
    if child == 0:
        run_and_be_killed(point)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)
"""


def results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what may differ: how long they took."""
    return [{name: value for name, value in row.items() if name not in ("seconds", "phases")} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    fs.run(CONFIG, out=folder)
    return folder


def final_model(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"round-{CONFIG.rounds:06d}.safetensors").read_bytes()


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(file.stem[-6:]) for file in (folder / "checkpoints").glob("*.safetensors"))


class StopsAfter(fs.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self.round:
            raise KeyboardInterrupt


def test_a_run_killed_at_any_step_on_disk_and_resumed_equals_an_undisturbed_one(
    undisturbed: Path, tmp_path: Path
) -> None:
    first_rounds = range(1, STEPS_TO_BEGIN + 2 * STEPS_A_ROUND + 1)
    last_summary = STEPS_TO_BEGIN + CONFIG.rounds * STEPS_A_ROUND + 2
    points = [*first_rounds, last_summary - 3, last_summary - 1, last_summary]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, json.dumps(SETTINGS), str(tmp_path), json.dumps(points)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for point in points:
        folder = tmp_path / f"killed-at-{point}"
        assert not RunDirectory(folder).finished
        history = fs.run(CONFIG, out=folder, resume=True)
        assert results(history.rows) == results(RunDirectory(undisturbed).rows()), point
        assert results(RunDirectory(folder).rows()) == results(history.rows)
        assert final_model(folder) == final_model(undisturbed), point
        assert history.summary["final_accuracy"] == RunDirectory(undisturbed).summary()["final_accuracy"]


@pytest.mark.parametrize("damage", ["cut the model", "flip a bit of the model", "cut the JSON", "change the sampler"])
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before_and_says_so(
    damage: str, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_as_unfinished(undisturbed, tmp_path)
    model, state = (folder / "checkpoints" / f"round-{CONFIG.rounds:06d}.{kind}" for kind in ("safetensors", "json"))
    if damage == "cut the model":
        model.write_bytes(model.read_bytes()[:-100])
    elif damage == "flip a bit of the model":
        content = bytearray(model.read_bytes())
        content[-7] ^= 1
        model.write_bytes(content)
    elif damage == "cut the JSON":
        state.write_text(state.read_text()[:40])
    else:
        saved = json.loads(state.read_text())
        saved["sampler"]["alpha"][0] += 1
        state.write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING, "fedsieve"):
        history = fs.run(CONFIG, out=folder, resume=True)
    assert f"checkpoint of round {CONFIG.rounds} can't be used" in caplog.text
    assert results(history.rows) == results(RunDirectory(undisturbed).rows())
    assert final_model(folder) == final_model(undisturbed)


@pytest.mark.parametrize("left", ["empty files", "nothing"])
def test_without_any_usable_checkpoint_the_run_starts_again(left: str, undisturbed: Path, tmp_path: Path) -> None:
    folder = copy_as_unfinished(undisturbed, tmp_path)
    for file in (folder / "checkpoints").iterdir():
        file.write_bytes(b"")
    if left == "nothing":
        shutil.rmtree(folder / "checkpoints")
    fs.run(CONFIG, out=folder, resume=True)
    assert final_model(folder) == final_model(undisturbed)


def test_damaged_checkpoints_do_not_take_the_place_of_those_that_follow(undisturbed: Path, tmp_path: Path) -> None:
    folder = copy_as_unfinished(undisturbed, tmp_path)
    for file in (folder / "checkpoints").iterdir():
        file.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        fs.run(CONFIG, out=folder, resume=True, callbacks=[StopsAfter(2)])
    assert checkpoints(folder) == [1, 2]


def test_a_half_written_row_is_written_again(undisturbed: Path, tmp_path: Path) -> None:
    folder = copy_as_unfinished(undisturbed, tmp_path)
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(rows[:-30])
    history = fs.run(CONFIG, out=folder, resume=True)
    assert results(history.rows) == results(RunDirectory(undisturbed).rows())


def test_only_the_last_two_checkpoints_are_kept(undisturbed: Path) -> None:
    names = sorted(file.name for file in (undisturbed / "checkpoints").iterdir())
    assert names == [f"round-{n:06d}.{kind}" for n in (3, 4) for kind in ("json", "safetensors")]


def test_a_finished_run_is_not_repeated(undisturbed: Path) -> None:
    before = (undisturbed / "summary.json").stat().st_mtime_ns
    history = fs.run(CONFIG, out=undisturbed, resume=True)
    assert len(history.rows) == CONFIG.rounds
    assert (undisturbed / "summary.json").stat().st_mtime_ns == before


def test_a_run_is_neither_overwritten_nor_mixed_with_another(undisturbed: Path) -> None:
    with pytest.raises(InvalidSetting, match="holds no run yet"):
        fs.run(CONFIG, out=undisturbed)
    with pytest.raises(InvalidSetting, match="lr"):
        fs.run(fs.Config(**SETTINGS | {"lr": 0.5}), out=undisturbed, resume=True)


@pytest.fixture
def with_a_trace(tmp_path: Path) -> tuple[fs.Config, Path]:
    """A run that reads a file of devices, stopped after two rounds."""
    trace, folder = tmp_path / "devices.csv", tmp_path / "run"
    header = "client,examples_per_second,download_mbit,upload_mbit,availability,dropout\n"
    trace.write_text(header + "".join(f"{client},100,8,8,0.9,0\n" for client in range(10)))
    config = fs.Config(**SETTINGS, system=str(trace))
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, out=folder, callbacks=[StopsAfter(2)])
    return config, folder


def test_a_run_is_not_gone_on_with_once_its_trace_has_changed(with_a_trace: tuple[fs.Config, Path]) -> None:
    config, folder = with_a_trace
    trace, rows = Path(config.system), (folder / "metrics.jsonl").read_bytes()
    before = trace.read_text()
    trace.write_text(before.replace("3,100,", "3,200,"))
    with pytest.raises(
        InvalidSetting, match=r"^system: '.*devices.csv' is not allowed; use the file as it was when .*"
    ):
        fs.run(config, out=folder, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == rows and checkpoints(folder) == [1, 2]
    trace.write_text(before)
    assert results(fs.run(config, out=folder, resume=True).rows) == results(fs.run(config).rows)


def test_a_run_of_before_files_had_digests_is_gone_on_with(with_a_trace: tuple[fs.Config, Path]) -> None:
    config, folder = with_a_trace
    (folder / "files.json").unlink()
    assert len(fs.run(config, out=folder, resume=True).rows) == CONFIG.rounds


def test_favors_agent_has_a_digest_too_and_a_run_without_files_none(undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "agent").write_bytes(b"one")
    directory = RunDirectory(tmp_path / "run")
    directory.create(fs.Config(sampler="favor", favor_agent=tmp_path / "agent"))
    directory.latest()
    (tmp_path / "agent").write_bytes(b"another")
    with pytest.raises(InvalidSetting, match=r"^favor_agent: '.*agent' is not allowed; use the file as it was"):
        directory.latest()
    assert not RunDirectory(undisturbed).files_file.exists()


def test_a_round_that_fails_leaves_the_rounds_before_it_intact(tmp_path: Path) -> None:
    class GoesBad(torch.nn.Module):
        """Fails from its ninth training batch on: in the third round, with four clients of one batch each."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 10)
            self.batches = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.batches += self.training
            if self.training and self.batches > 8:
                raise RuntimeError("out of order")
            logits: torch.Tensor = self.linear(images.flatten(1))
            return logits

    config = fs.Config(rounds=40, clients=10, local_steps=1, batch_size=512, device="cpu", engine="sequential")
    with pytest.raises(TooFewUpdates, match=r"round 12: 0 usable models of 4.*out of order"):
        fs.run(config, model=GoesBad, out=tmp_path / "run")  # ten rounds in a row are enough
    directory = RunDirectory(tmp_path / "run")
    rows = directory.rows()
    assert [row["round"] for row in rows if "lost" not in row] == [1, 2]
    assert all("out of order" in row["lost"] and row["kept"] == [] for row in rows[2:]) and len(rows) == 11
    assert {row["test_loss"] for row in rows[2:]} == {rows[1]["test_loss"]}  # the model stays as it was
    checkpoint, _ = directory.latest()
    assert checkpoint is not None and checkpoint.round == 11
    assert not directory.finished


def test_a_run_goes_on_after_a_round_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class LacksModels(KeepAll):
        """Asks for more models than there are in the second round."""

        rounds = 0

        def select(self, candidates: Candidates) -> Selection:
            self.rounds += 1
            if self.rounds == 2:
                raise TooFewUpdates("4 usable models, 5 needed")
            return super().select(candidates)

    history = fs.run(fs.Config(rounds=3, clients=10, local_steps=1, system="drawn"), filter=LacksModels())
    first, second, third = history.rows
    assert second["lost"] == "round 2: LacksModels has 4 usable models, 5 needed" and "lost" not in first | third
    assert "4 usable models, 5 needed; the model stays as it was" in caplog.text
    assert second["test_loss"] == first["test_loss"] != third["test_loss"]
    assert (second["kept"], second["train_loss"], second["coefficients"]["clients"]) == ([], None, [])
    assert second["sampled"] and second["simulated"]["seconds"] > 0 and second["simulated"]["bytes"] > 0
    assert json.loads(json.dumps(history.rows, allow_nan=False)) and history.frame().shape[0] == 3


def test_a_run_of_which_every_round_is_lost_is_none() -> None:
    with pytest.raises(TooFewUpdates, match=r"round 2: [01] usable models of 4, at least 4 needed"):
        fs.run(fs.Config(rounds=2, clients=10, local_steps=1, min_updates=4, attack="nan", hostile=0.9))


def test_more_models_than_are_asked_for_are_never_enough(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"^min_updates: 9 is not allowed; use at most 4, as many as are asked$"):
        fs.run(fs.Config(rounds=2, clients=10, min_updates=9), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Counting(UniformSampler):
    """Its state has a number for each client."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, int] = {}

    def observe(self, feedback: Feedback) -> None:
        for client in feedback.sampled:
            self.times[int(client)] = self.times.get(int(client), 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times = {int(client): times for client, times in state["times"].items()}


def test_a_state_may_go_by_whole_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, whole, twin = fs.Config(rounds=4, clients=14, ratio=1.0, local_steps=1), Counting(), Counting()
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, sampler=whole, out=tmp_path / "run", callbacks=[StopsAfter(3)])
    fs.run(config, sampler=twin, out=tmp_path / "run", resume=True)
    assert "can't be used" not in caplog.text and set(twin.times.values()) == {4}


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({}, r"^sampler: None is not allowed; use your Counting, as in the run in "),
    ({"sampler": UniformSampler()}, r"^sampler: 'UniformSampler' is not allowed; use your Counting, as in the run in "),
    ({"sampler": Counting(), "filter": KeepAll()}, r"^filter: 'KeepAll' is not allowed; use none of your own, as in "),
]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(("parts", "said"), OTHERS)
def test_a_run_goes_on_with_the_parts_it_began_with(
    parts: dict[str, Any], said: str, finished: bool, tmp_path: Path
) -> None:
    config = fs.Config(rounds=3, clients=10, local_steps=1)
    with suppress(KeyboardInterrupt):
        fs.run(config, sampler=Counting(), out=tmp_path / "run", callbacks=[] if finished else [StopsAfter(2)])
    with pytest.raises(InvalidSetting, match=said):
        fs.run(config, **parts, out=tmp_path / "run", resume=True)
    assert len(fs.run(config, sampler=Counting(), out=tmp_path / "run", resume=True).rows) == 3


def test_a_configuration_that_was_lost_is_not_taken_for_the_usual_one(tmp_path: Path) -> None:
    fs.run(fs.Config(rounds=2, clients=10, local_steps=1), out=tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("")
    with pytest.raises(InvalidSetting, match=r"^config: .*config.yaml' is not allowed; use a whole file, as a run"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "[]", "null"])
@pytest.mark.parametrize(
    "file", ["summary.json", "checkpoints/round-000003.json", "checkpoints/round-000002 (copy).json"]
)
def test_damaged_files_are_named_or_done_without(file: str, text: str, tmp_path: Path) -> None:
    config = fs.Config(rounds=4, clients=10, local_steps=1)
    with pytest.raises(KeyboardInterrupt):
        fs.run(config, out=tmp_path / "run", callbacks=[StopsAfter(4)])
    (tmp_path / "run" / "checkpoints" / "round-000004.json").write_text("[]")
    (tmp_path / "run" / file).write_text(text)
    if file == "summary.json":
        with pytest.raises(InvalidSetting, match=r"^out: .*summary.json' is not allowed; use a whole file"):
            fs.run(config, out=tmp_path / "run", resume=True)
    else:
        assert fs.run(config, out=tmp_path / "run", resume=True).accuracy == fs.run(config).accuracy


@pytest.mark.parametrize("saved", [[], [1]])
def test_rounds_after_a_rare_checkpoint_are_played_again_with_the_same_result(
    saved: list[int], undisturbed: Path, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path)
    if saved:
        with pytest.raises(KeyboardInterrupt):
            fs.run(CONFIG, out=tmp_path, callbacks=[StopsAfter(1)])
    with pytest.raises(KeyboardInterrupt):
        fs.run(CONFIG, out=tmp_path, resume=True, callbacks=[StopsAfter(3)], save_every=3600.0)
    assert len(directory.rows()) == 3 and checkpoints(tmp_path) == saved
    history = fs.run(CONFIG, out=tmp_path, resume=True, save_every=3600.0)
    assert checkpoints(tmp_path) == [*saved, CONFIG.rounds]
    assert results(history.rows) == results(directory.rows()) == results(RunDirectory(undisturbed).rows())
    assert final_model(tmp_path) == final_model(undisturbed)


def test_the_same_run_in_another_process_is_bit_identical(undisturbed: Path, tmp_path: Path) -> None:
    script = "import json, sys, fedsieve as fs; fs.run(fs.Config(**json.loads(sys.argv[1])), out=sys.argv[2])"
    subprocess.run([sys.executable, "-c", script, json.dumps(SETTINGS), str(tmp_path / "run")], check=True, timeout=120)
    assert final_model(tmp_path / "run") == final_model(undisturbed)
    assert results(RunDirectory(tmp_path / "run").rows()) == results(RunDirectory(undisturbed).rows())


def test_a_run_leaves_the_global_generators_alone() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
    fs.run(fs.Config(**SETTINGS | {"rounds": 1}))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index] # noqa: NPY002


def copy_as_unfinished(source: Path, folder: Path) -> Path:
    copy = folder / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    for file in source.rglob("*"):
        if file.is_file() and file.name != "summary.json":
            (copy / file.relative_to(source)).write_bytes(file.read_bytes())
    return copy


class Intruder(fs.Callback):
    """Starts the same run in the same folder while it goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, ""

    def on_round(self, row: Mapping[str, Any]) -> None:
        with pytest.raises(RunInUse) as refused:
            fs.run(CONFIG, out=self.folder, resume=True)
        self.said = str(refused.value)


def test_two_never_write_to_one_folder(tmp_path: Path) -> None:
    intruder = Intruder(tmp_path / "run")
    disturbed = fs.run(CONFIG, out=tmp_path / "run", callbacks=[intruder])
    assert intruder.said == f"out: '{tmp_path}/run' is not allowed; use a folder that no other run is writing to"
    assert disturbed.accuracy == fs.run(CONFIG).accuracy
    assert fs.run(CONFIG, out=tmp_path / "run", resume=True).accuracy == disturbed.accuracy


def test_what_never_began_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(MissingData):
            fs.run(fs.Config(dataset="cifar10", data_dir=tmp_path / "nothing"), out=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
