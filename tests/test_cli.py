"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Typed

from fedsieve.stopwatch import PHASES

QUICK = ["--rounds", "2", "--clients", "8", "--local-epochs", "1", "--device", "cpu"]


def test_run_writes_a_directory_and_says_where(typed: Typed, tmp_path: Path) -> None:
    status, printed, _ = typed("run", "--algorithm", "fedca", *QUICK)
    assert status == 0 and "fedca on digits, seed 0, 2 rounds: final" in printed
    place = tmp_path / printed.splitlines()[-1]
    assert {file.name for file in place.iterdir()} == {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints"}


def test_flags_reach_the_configuration(typed: Typed, tmp_path: Path) -> None:
    words = (
        "run --algorithm fedcm-ucb --dataset digits --heterogeneity client --alpha 0.5 --clients 9 --ratio 0.5 "
        "--rounds 2 --local-epochs 2 --batch-size 8 --lr 0.02 --model cnn --score cross-entropy --seed 3 "
        "--engine sequential --device cpu --out here"
    )
    assert typed(*words.split())[0] == 0
    saved = (tmp_path / "here" / "config.yaml").read_text()
    for line in (
        "algorithm: fedcm-ucb",
        "heterogeneity: client",
        "alpha: 0.5",
        "clients: 9",
        "ratio: 0.5",
        "rounds: 2",
    ):
        assert line in saved.splitlines()
    for line in ("local_epochs: 2", "batch_size: 8", "lr: 0.02", "model: cnn", "score: cross-entropy", "seed: 3"):
        assert line in saved.splitlines()


def test_flags_win_over_the_file(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("rounds: 1\nlr: 0.5\nclients: 8\nlocal_epochs: 1\n")
    assert typed("run", "--config", "my.yaml", "--lr", "0.25", "--out", "here")[0] == 0
    saved = (tmp_path / "here" / "config.yaml").read_text().splitlines()
    assert "lr: 0.25" in saved and "rounds: 1" in saved


def test_resume_needs_only_the_folder(typed: Typed) -> None:
    typed("run", *QUICK, "--out", "here")
    status, printed, _ = typed("run", "--out", "here", "--resume")
    assert status == 0 and "2 rounds" in printed
    status, _, said = typed("run", "--out", "here", "--resume", "--lr", "3")
    assert status == 2 and said == "error: lr: 3.0 is not allowed; use 0.05, as in the run in here\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --algorithm fedcm-tz", "'fedcm-ts' (nearest)"),
        ("run --dataset cifar11", "'cifar10' (nearest)"),
        ("run --ratio 0", "ratio: 0.0 is not allowed; use a number above 0 and at most 1"),
        ("run --ratio 1.5", "ratio: 1.5"),
        ("run --alpha 0", "alpha: 0.0 is not allowed; use a number above 0"),
        ("run --clients 100000", "clients: 100000"),
        ("run --clients some", "'some' is not a valid integer"),
        ("run --no-such-flag 3", "--no-such-flag"),
        ("run --config nothing.yaml", "nothing.yaml"),
        ("run --dataset cifar10 --data-dir nowhere", "fedsieve data fetch cifar10"),
        ("run --device cuda:99", "cuda:99"),
        (
            "run --device cpu --precision tf32",
            "precision: 'tf32' is not allowed; use fp32 or bf16 where the device is cpu",
        ),
        ("run --device cpu --engine lanes", "engine: 'lanes' is not allowed; use auto, workers, sequential or ray"),
        ("compare --engine ray --at-once -1 --rounds 1", "at_once: -1 is not allowed; use 1 to 3"),
        ("run --workers 0", "workers: 0 is not allowed; use a whole number of at least 1"),
        ("run --track paper", "track: 'paper'"),
        ("run --track tensorboard,paper --out here", "track: 'paper'"),
        ("run --track tensorboard --min-updates 20 --out here", "min_updates: 20 is not allowed"),
        ("pretrain-favor --episodes 0 --out here/agent.safetensors", "episodes: 0"),
        ("pretrain-favor --out .", "out: '.' is not allowed; use the name of a file"),
        (
            "compare --algorithms fedavg,fedca --validation-per-class 0 --heterogeneity client --alpha 100",
            "validation_per_class: 0 is not allowed",
        ),
        ("compare --at-once 0", "at_once: 0 is not allowed; use 1 to 3"),
        ("compare --algorithms fedavg,nothing", "algorithm: 'nothing'"),
        ("compare --algorithms fedavg,fedavg", "algorithms: 'fedavg,fedavg'"),
        ("compare --seeds 0", "seeds: 0"),
        ("data fetch imagenet", "imagenet"),
        ("data show --alpha low", "alpha: 'low'"),
        ("data show --heterogeneity odd", "heterogeneity: 'odd'"),
        ("data show --out picture.doc", "out: 'picture.doc'"),
        ("fly", "No such command 'fly'"),
    ],
)
def test_bad_input_is_one_line_exit_status_2_and_nothing_written(
    words: str, said: str, typed: Typed, tmp_path: Path
) -> None:
    status, printed, error = typed(*words.split())
    assert status == 2 and printed == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert list(tmp_path.iterdir()) == []


def test_unreadable_yaml_is_one_line(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1,")
    status, _, error = typed("run", "--config", "bad.yaml")
    assert status == 2 and error.count("\n") == 1 and "bad.yaml" in error


def test_a_place_that_can_not_be_written_to_is_one_line(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    status, _, error = typed("run", *QUICK, "--heterogeneity", "iid", "--out", "file")
    assert status == 2 and error.startswith("error: out: 'file' is not allowed") and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_algorithms_prints_table_1_for_people_and_programs(typed: Typed) -> None:
    status, printed, _ = typed("algorithms")
    assert status == 0 and "fedcm-ucb" in printed and "Σ" in printed
    rows = {row["name"]: row for row in json.loads(typed("algorithms", "--json")[1])["algorithms"]}
    filtered = [(row["model_filter"], row["prior_knowledge"]) for row in rows.values()]
    paper = ["fedavg", "fedprox", "fedpdp", "fedca", "fedprox-ca", "fedcm-ucb", "fedcm-ts"]
    sceptic = ["server-only", "fedpdp-finetune", "fedpdp-server-client"]
    assert list(rows) == [*paper, "fedsieve", "fedsieve-ucb", "fedsieve-ts", "fedsieve-finetune", *sceptic]
    assert filtered[:7] == [(False, False)] * 3 + [(True, False)] * 2 + [(True, True)] * 2
    assert filtered[7:11] == [(True, False), (True, True), (True, True), (True, False)]
    assert filtered[11:] == [(False, False)] * 3
    assert rows["fedsieve"]["averaging"] == "Σ_{k∈S_opt} c_k w_k, c learned"
    assert rows["fedsieve-finetune"]["averaging"] == "Σ_{k∈S_opt} c_k w_k, c learned, then SGD on validation data"
    assert rows["fedprox"]["sampling"] == "p_k, with replacement" and rows["fedprox"]["objective"] == "proximal"
    assert rows["fedca"]["averaging"] == "Σ_{k∈S_opt} p_k |S|/|S_opt| w_k, normalised"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", "", "0 whole rows of 2"),
        ("summary.json", "{}", "no rounds in its summary"),
        ("summary.json", '{"rounds": 2, "best_accuracy": 1, "mean_last_10": 1}', "no final_accuracy in its summary"),
    ],
)
def test_a_damaged_finished_run_is_named(file: str, content: str, said: str, typed: Typed, tmp_path: Path) -> None:
    words = ["compare", *QUICK, "--algorithms", "fedpdp", "--seeds", "2", "--out", "here"]
    assert typed(*words)[0] == 0
    (tmp_path / "here" / "fedpdp" / "seed-0" / file).write_text(content)
    for again in (words, ["run", "--out", "here/fedpdp/seed-0", "--resume"]):
        status, _, error = typed(*again)
        assert status == 2 and error.count("\n") == 1
        assert error.startswith("error: out: 'here/fedpdp/seed-0'") and f"not damaged ({said})" in error


def test_compare_checks_every_seed_before_the_first_run(typed: Typed, tmp_path: Path) -> None:
    """The quickest client of seed 1 makes this deadline, that of seed 2 does not."""
    words = "compare --algorithms fedavg --system drawn --deadline 1.5 --seed 1 --seeds 2 --rounds 1"
    status, _, error = typed(*words.split())
    assert status == 2 and "error: deadline: 1.5 is not allowed" in error and list(tmp_path.iterdir()) == []
    assert typed(*words.replace("--seeds 2", "--seeds 1").split())[0] == 0


def test_compare_prints_the_table_and_draws_the_pictures(typed: Typed, tmp_path: Path) -> None:
    words = ["compare", "--algorithms", "fedavg,fedcm-ts", "--seeds", "2", *QUICK, "--out", "both"]
    status, printed, _ = typed(*words)
    assert status == 0 and "FedCM-TS" in printed and "±" in printed
    assert "<html" in (tmp_path / "both" / "report.html").read_text()
    for name in ("curves.png", "participation.png"):
        assert (tmp_path / "both" / name).read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [line["algorithm"] for line in record["algorithms"]] == ["fedavg", "fedcm-ts"]
    assert record["config"]["rounds"] == 2 and {"versions", "hardware", "command"} <= set(record)
    again = json.loads(typed(*words, "--json")[1])
    assert again["algorithms"] == record["algorithms"]  # read, not run again
    status, _, said = typed(*words, "--lr", "7")
    assert status == 2 and said.startswith("error: lr: 7.0")


def test_report_writes_a_page_of_what_is_whole(typed: Typed, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("good", "cut", "unfinished"):
        typed("run", *QUICK, "--algorithm", "fedca", "--out", f"all/{name}")
    (tmp_path / "all" / "unfinished" / "summary.json").unlink()
    rows = tmp_path / "all" / "cut" / "metrics.jsonl"
    rows.write_text(rows.read_text()[:-40])
    status, printed, _ = typed("report", "all", "--out", "page.html")
    assert status == 0 and printed == "page.html\n"
    assert "FedCA" in (tmp_path / "page.html").read_text()
    assert "cut is left out: it is damaged (1 whole rows of 2)" in caplog.text
    assert "unfinished is left out: it is not finished" in caplog.text
    (tmp_path / "none").mkdir()
    for words, said in ((["none"], "runs: 'none'"), (["nowhere"], "runs: 'nowhere'")):
        status, _, error = typed("report", *words)
        assert status == 2 and error.startswith("error: ") and said in error and error.count("\n") == 1


def test_profile_shows_where_the_time_goes(typed: Typed, tmp_path: Path) -> None:
    status, printed, _ = typed("run", *QUICK, "--out", "here", "--profile")
    assert status == 0
    for phase in PHASES:
        assert f"│ {phase} " in printed
    assert len(json.loads((tmp_path / "here" / "profile.json").read_text())) == 2
    _, printed, _ = typed("run", "--out", "here", "--resume", "--profile")
    assert "nothing to profile" in printed


def test_data_list_and_show(typed: Typed, tmp_path: Path) -> None:
    listed = {row["name"]: row for row in json.loads(typed("data", "list", "--json", "--data-dir", "none")[1])}
    assert listed["digits"]["here"] and not listed["cifar10"]["here"]
    status, printed, _ = typed(
        "data", "show", "--heterogeneity", "class, shards", "--alpha", "0.1, 5", "--out", "p.svg"
    )
    assert status == 0 and "shards: " in printed and "62 to 62 examples per client" in printed
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_help_names_every_setting(typed: Typed) -> None:
    from fedsieve.runs import Config

    _, printed, _ = typed("run", "--help")
    for field in Config.model_fields:
        assert f"--{field.replace('_', '-')}" in printed


def test_importing_fedsieve_brings_no_heavy_extras() -> None:
    script = (
        "import sys, fedsieve; print([m for m in ('flwr','ray','plotly','matplotlib','pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_installed_command_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedsieve", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("fedsieve 0.")


def test_a_run_without_a_folder_takes_a_name_that_is_free(typed: Typed) -> None:
    words = ("run", "--rounds", "1", "--clients", "4", "--algorithm", "fedavg")
    places = [typed(*words, *more)[1].splitlines()[-1] for more in ((), ("--lr", "0.1"), ())]
    name = "runs/digits-class-0.1-fedavg-seed0"
    assert places == [name, f"{name}-2", f"{name}-3"]
    status, printed, said = typed(*words, "--resume")  # the first, which is finished
    assert status == 0 and printed.splitlines()[-1] == name and "begins now" not in said
    status, _, said = typed(*words, "--resume", "--out", "elsewhere")
    assert status == 0 and "note: there is no run in elsewhere to go on with: it begins now" in said
