"""FedCM beside the field: all samplers, all defences, all attacks, and honest sums."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Typed

from fedsieve.attacks import ATTACKS as EVERY_ATTACK
from fedsieve.errors import InvalidSetting
from fedsieve.parts import FILTERS, SAMPLERS
from fedsieve.reproduction import ATTACKS, FIELD, PAPER, Plan, Reproduction, field, find_plan, write_up
from fedsieve.reproduction.field import BATTLES, CHOICES, DEFENCES, SHARES, Battle, Choice, can_stand
from fedsieve.reproduction.field_tables import attacks_table, samplers_table, summary_table
from fedsieve.reproduction.results import Results
from fedsieve.reproduction.study import AnyCell
from fedsieve.runs import History, write_record


def study(plan: Plan, rounds: int = 3) -> Any:
    return plan.study(quick=True, rounds=rounds, dataset=None, device="cpu")


def made_up(plan: Plan, cell: AnyCell, seed: int, accuracies: Sequence[float], **more: Any) -> History:
    """A run with these accuracies in %, 10 simulated seconds in the first round, 20 in the second, and so on."""
    config = cell.config(study(plan, len(accuracies)), seed)
    rows = [
        {
            "round": number,
            "sampled": [0, 1],
            "kept": [0],
            "score": 0.5,
            "search": None,
            "test_accuracy": accuracy / 100,
            "test_loss": 1.0,
            "train_loss": 1.0,
            "excluded": {},
            "seconds": 0.1,
            "simulated": {"seconds": 10.0 * number, "bytes": 100},
        }
        | more
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    summary = {
        "rounds": len(rows),
        "final_accuracy": accuracies[-1] / 100,
        "mean_last_10": float(np.mean(accuracies)) / 100,
        "duration": 1.0,
        "requests_gini": 0.25,
        "hardware": {"device": "a made-up machine", "cpu": "a made-up CPU", "cores": 2},
        "command": "fedsieve reproduce",
    }
    return History(config, rows, summary)


def test_every_sampler_is_compared_with_and_without_the_filter() -> None:
    assert {choice.sampler for choice in CHOICES} == set(SAMPLERS)
    assert len(CHOICES) == len(set(CHOICES)) == len(SAMPLERS) * 2 * 2
    full = FIELD.study(quick=False, rounds=None, dataset=None, device="cpu")
    config = Choice("ucb", "combinatorial", "class").config(full, 5)
    assert (config.dataset, config.model, config.alpha, config.seed) == ("cifar10", "cnn", 0.1, 5)
    assert (config.sampler, config.filter, config.heterogeneity) == ("ucb", "combinatorial", "class")
    assert config.system == "drawn" and config.deadline is None
    assert Choice("fedcs", "all", "class").config(full, 5).deadline == 120


def test_every_defence_meets_every_attack_it_can_stand() -> None:
    algorithms = {"fedca", "fedca-accuracy", "fedcm-ucb", "fedcm-ts", "fedpdp-finetune", "fedsieve-finetune"}
    assert set(DEFENCES) == {"none", *algorithms} | set(FILTERS) - {"all", "combinatorial"}
    met = {(cell.defence, cell.attack, cell.hostile) for cell in BATTLES}
    assert len(met) == len(BATTLES)
    for share in SHARES:
        for defence in DEFENCES:
            there = {attack for attack in EVERY_ATTACK if (defence, attack, share) in met}
            assert there == (set(EVERY_ATTACK) if can_stand(defence, share) else set())
    assert not can_stand("bulyan", 0.4) and can_stand("bulyan", 0.2) and can_stand("krum", 0.4)
    full = ATTACKS.study(quick=False, rounds=None, dataset=None, device="cpu")
    for quick in (full, study(ATTACKS)):
        for cell in BATTLES:  # what a filter needs is there, if all answer
            config = cell.config(quick, 0)
            options = config.options()
            per_liar, more = FILTERS[config.filter].models if config.filter != "own" else (0, 1)
            assert options.per_round >= per_liar * options.byzantine + more


def test_a_defence_assumes_liars_where_there_are_none() -> None:
    full = ATTACKS.study(quick=False, rounds=None, dataset=None, device="cpu")
    assert Battle("krum").config(full, 0).options().byzantine == 3
    assert Battle("krum", "noise", 0.4).config(full, 0).options().byzantine == 6
    assert Battle("fedcm-ts", "noise", 0.4).config(full, 0).algorithm == "fedcm-ts"


def test_the_paper_s_filter_is_tried_with_both_scores() -> None:
    full = ATTACKS.study(quick=False, rounds=None, dataset=None, device="cpu")
    asked = {name: Battle(name).config(full, 0) for name in ("fedca", "fedca-accuracy")}
    assert {name: (config.algorithm, config.score) for name, config in asked.items()} == {
        "fedca": ("fedca", "cross-entropy"),
        "fedca-accuracy": ("fedca", "accuracy"),
    }
    assert [Battle(name).title for name in asked] == ["FedCA", "FedCA, by accuracy"]


def test_rounds_and_simulated_time_are_counted_to_what_uniform_sampling_reaches() -> None:
    uniform, ucb = Choice("uniform", "all", "class"), Choice("ucb", "combinatorial", "class")
    runs = [made_up(FIELD, uniform, 0, [20, 30, 40]), made_up(FIELD, uniform, 1, [20, 50, 60])]
    runs += [made_up(FIELD, ucb, 0, [40, 50, 70]), made_up(FIELD, ucb, 1, [20, 30, 40])]
    table = samplers_table("class", Results(study(FIELD), CHOICES, runs))
    rows = {row[:2]: row[2:] for row in table.rows}
    # the target is (40 + 60) / 2; ucb reaches it in round 2 of seed 0, after 10 + 20 seconds
    assert rows["ucb", "best subset"][0] == "55.0 ± 21.2" and rows["ucb", "best subset"][2:5] == (
        "2.0",
        "0.5",
        "1 of 2",
    )
    assert rows["uniform", "all"][2:5] == ("2.0", "0.5", "1 of 2")
    assert rows["oort", "all"] == ("–",) * 6
    assert "50.0 %" in table.note


def test_what_attacks_cost_is_by_seed_and_the_worst_is_named() -> None:
    runs = [made_up(ATTACKS, Battle("krum"), seed, [0, 0, accuracy]) for seed, accuracy in enumerate((60, 70))]
    runs += [made_up(ATTACKS, Battle("krum", "noise", 0.4), 0, [0, 0, 20])]
    runs += [made_up(ATTACKS, Battle("krum", "backdoor", 0.4), 1, [0, 0, 60], backdoor_success=0.9)]
    results = Results(study(ATTACKS), BATTLES, runs)
    rows = {row[0]: row[1:] for row in summary_table(results).rows}
    assert rows["krum"] == ("65.0 ± 7.1", "–", "–", "25.0", "40.0 (noise)")
    assert rows["FedCM-TS"] == ("–",) * 5
    at_40 = attacks_table(0.4, results)
    row = dict(zip(at_40.headings, next(row for row in at_40.rows if row[0] == "krum"), strict=True))
    assert (row["nobody"], row["noise"]) == ("65.0 ± 7.1", "20.0 (1 of 2)")
    assert (row["backdoor"], row["its success"]) == ("60.0 (1 of 2)", "90.0 (1 of 2)")
    assert "of so many seeds" in at_40.note and "of so many seeds" not in attacks_table(0.2, results).note
    bulyan = next(row for row in at_40.rows if row[0] == "bulyan")
    assert bulyan[2:] == ("can't", "can't", "–", *["can't"] * 7)


def test_records_keep_simulated_time_and_the_backdoors_success(tmp_path: Path) -> None:
    from fedsieve.runs import read_record

    history = made_up(FIELD, CHOICES[0], 0, [10, 20], backdoor_success=0.25)
    found = read_record(write_record(history, tmp_path))
    assert [row["simulated"] for row in found.rows] == [row["simulated"] for row in history.rows]
    assert [row["backdoor_success"] for row in found.rows] == [0.25, 0.25]


def test_a_small_study_from_runs_to_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(field, "EPISODES", 1)
    few: list[tuple[Plan, Sequence[AnyCell]]] = [
        (FIELD, [Choice(name, keep, "class") for name in ("favor", "fedcs") for keep in ("all", "combinatorial")]),
        (
            ATTACKS,
            [
                Battle("krum"),
                Battle("none", "backdoor", 0.2),
                Battle("bulyan", "nan", 0.2),
                Battle("krum", "nan", 0.4),
            ],
        ),
    ]
    for plan, cells in few:
        name, target = next(iter(plan.targets.items()))
        smaller = replace(plan, targets={name: replace(target, cells=cells)})
        reproduction = Reproduction(smaller, study(plan, 2), [name], 2, tmp_path / name)
        reproduction.run()
        assert reproduction.missing() == {}
        results = reproduction.results()
        assert sorted(len(results.of(cell)) for cell in cells) == [2] * 4
    assert len(list((tmp_path / "runs" / "favor").iterdir())) == 2  # one for each seed, with or without the filter
    everything = write_up(Reproduction(FIELD, study(FIELD, 2), ["field"], 2, tmp_path / "field"))
    assert [path.name for path in everything.files] == ["field.png", "results.md", "results.json"]
    assert everything.files[0].stat().st_size > 20_000
    text = (tmp_path / "field" / "results.md").read_text()
    assert text.startswith("# Ways to choose clients on digits") and "| fedcs | best subset |" in text
    numbers = json.loads((tmp_path / "field" / "results.json").read_text())
    assert numbers["setting"]["heterogeneity"] == "class" and "device" not in numbers["setting"]
    assert len(numbers["machines"]) == 1 and numbers["machines"][0]["hardware"]["cores"] >= 1
    assert {(run["sampler"], run["filter"], run["seed"]) for run in numbers["runs"]} == {
        (name, keep, seed) for name in ("favor", "fedcs") for keep in ("all", "combinatorial") for seed in (0, 1)
    }
    for run in numbers["runs"]:
        assert run["machine"] == 0 and run["final_accuracy"] == pytest.approx(run["test_accuracy"][-1], rel=1e-4)
        assert run["simulated_seconds"][1] > run["simulated_seconds"][0] > 0 and len(run["simulated_bytes"]) == 2
    attacked = write_up(Reproduction(ATTACKS, study(ATTACKS, 2), ["attacks"], 2, tmp_path / "attacks"))
    runs = json.loads(attacked.files[-1].read_text())["runs"]
    assert [len(run["backdoor_success"]) for run in runs if run.get("attack") == "backdoor"] == [2, 2]
    assert [run["hostile_kept"] for run in runs if run["filter"] == "bulyan"] == [0.0, 0.0]


def test_who_is_chosen_by_size_is_averaged_without_regard_to_it() -> None:
    study = FIELD.study(quick=True, rounds=None, dataset=None, device="cpu")
    averaged = {name: Choice(name, "all", "class").config(study, 0).coefficients for name in SAMPLERS}
    assert {name for name, coefficients in averaged.items() if coefficients == "mean"} == {
        "proportional", "agnostic", "power-of-choice", "power-of-choice-exact", "power-of-choice-batch",
    }  # fmt: skip
    assert set(averaged.values()) == {"mean", "normalised"}


def test_these_studies_stand_alone(typed: Typed) -> None:
    assert find_plan(["field"]) is FIELD and find_plan(["attacks"]) is ATTACKS and find_plan(["table4", "all"]) is PAPER
    with pytest.raises(InvalidSetting, match="field alone"):
        find_plan(["table2", "field"])
    status, printed, said = typed("reproduce", "attacks", "--quick", "--report-only", "--out", "nothing")
    assert status == 2 and not printed and said.startswith("error: out: 'nothing'") and not Path("nothing").exists()
    status, _, said = typed("reproduce", "defences")
    assert status == 2 and "attacks" in said and said.count("\n") == 1
