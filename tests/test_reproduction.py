"""The paper's tables and figures: the right runs, its numbers, honest verdicts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Typed
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedsieve as fs
from fedsieve.errors import InvalidSetting
from fedsieve.reproduction import (
    OURS,
    PAPER,
    Reproduction,
    Study,
    find_plan,
    paper,
    published,
    reproduce,
    tables,
    write_up,
)
from fedsieve.reproduction.claims import CLAIMS, Claim, Interval, judge
from fedsieve.reproduction.ours import (
    BASELINES,
    MOMENTUM,
    RIVALS,
    SMOOTHING,
    ours_figure,
    ours_table,
    overfitting_figure,
)
from fedsieve.reproduction.paper import READINGS, SERVER_ONLY, TABLE_2, TABLE_3, TABLE_4, Cell
from fedsieve.reproduction.pictures import per_class
from fedsieve.reproduction.results import Results
from fedsieve.runs import History, write_record

STUDY = PAPER.study(quick=True, rounds=4, dataset=None, device="cpu")
CELLS = [*TABLE_4, SERVER_ONLY, *READINGS]


def made_up(cell: Cell, seed: int, final: float, *before: float, study: Study = STUDY) -> History:
    """A run whose accuracies in % are given."""
    missing = study.settings["rounds"] - len(before) - 1
    accuracies = [value / 100 for value in (*[0.0] * missing, *before, final)]
    rows: list[dict[str, Any]] = [
        {
            "round": number,
            "sampled": [0, 1],
            "kept": [0],
            "score": 0.5,
            "search": {"all": 0.4, "single": 0.45} if cell.score else None,
            "test_accuracy": value,
            "test_loss": 1.0,
            "train_loss": 1.0,
            "excluded": {},
            "seconds": 0.1,
        }
        for number, value in enumerate(accuracies, start=1)
    ]
    summary = {
        "rounds": len(rows),
        "final_accuracy": accuracies[-1],
        "best_accuracy": max(accuracies),
        "mean_last_10": float(np.mean(accuracies[-10:])),
        "duration": 60.0,
        "hardware": {"device": "a made-up machine", "cpu": "a made-up CPU", "cores": 2},
        "command": "fedsieve reproduce",
        "versions": {},
    }
    return History(cell.config(study, seed), rows, summary)


def results(*histories: History) -> Results:
    return Results(STUDY, CELLS, histories)


def test_the_published_numbers_give_the_papers_headlines() -> None:
    best, fedavg = published.TABLE_4[Cell("fedcm-ts", "class", score="cross-entropy")][0], published.CLASS["fedavg"][0]
    assert f"{100 * (best - fedavg) / best:.2f}" == "37.25"
    fedca = published.TABLE_2[Cell("fedca", "class", ratio=0.6, score="accuracy")][0]
    fedpdp = published.TABLE_2[Cell("fedpdp", "class", ratio=0.6)][0]
    assert f"{100 * (fedca - fedpdp) / fedca:.2f}" == "16.75"
    fastest = min(rounds for cell, rounds in published.TABLE_5.items())
    assert f"{100 / fastest:.2f}" == "4.17"


def test_every_cell_of_a_table_has_the_papers_number() -> None:
    assert list(published.TABLE_4) == TABLE_4 and len(TABLE_4) == 22
    assert set(published.TABLE_2) == set(TABLE_2) and len(TABLE_2) == 18
    assert set(published.TABLE_5) < set(TABLE_4) and set(TABLE_3) < set(TABLE_4) and len(TABLE_3) == 12


def test_tables_and_figures_share_their_runs() -> None:
    everything = PAPER.jobs(PAPER.find(["all"]), None)
    assert len(everything) == len(set(everything))
    once = {cell for cell, _ in everything}
    # 22 of Table 4, 15 that Table 2 adds, the baseline, three that Figure 6 and four that Figure 5 add,
    # and five as printed
    assert len(once) == 22 + 15 + 1 + 3 + 4 + 5
    assert len(everything) == 22 * 3 + 15 * 2 + 3 + 3 + 4 + 5
    assert set(PAPER.jobs(["table3"], 2)) | set(PAPER.jobs(["table5"], 2)) == set(PAPER.jobs(["table4"], 2))
    seeds = [seed for _, seed in everything]
    assert seeds == sorted(seeds)  # a whole table with one seed before the next seed


def test_a_cell_is_run_as_the_paper_says() -> None:
    study = PAPER.study(quick=False, rounds=None, dataset=None, device="cpu")
    config = Cell("fedca", "client", 5.0, 0.6, "cross-entropy").config(study, 7)
    assert (config.dataset, config.rounds, config.clients, config.local_epochs) == ("cifar10", 100, 20, 5)
    assert (config.heterogeneity, config.alpha, config.ratio, config.score) == ("client", 5.0, 0.6, "cross-entropy")
    assert (config.validation_per_class, config.momentum, config.augment, config.seed) == (500, 0.9, True, 7)
    assert config.model == paper.SETTLED["model"] and config.lr == paper.SETTLED["lr"]


@pytest.mark.parametrize(
    ("names", "seeds", "said"),
    [(["table6"], None, "table5"), (["table4"], 0, "seeds: 0")],
)
def test_a_wrong_target_is_named(names: list[str], seeds: int | None, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        find_plan(names).jobs(names, seeds)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=9).filter(lambda values: np.std(values) > 1e-3))
def test_the_interval_is_that_of_students_t(differences: list[float]) -> None:
    ours = Interval.of(differences)
    theirs = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert ours.low == pytest.approx(theirs.low, abs=1e-9) and ours.high == pytest.approx(theirs.high, abs=1e-9)


def test_an_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, standard error 1/√3, t(0.975; 2) = 4.3027
    interval = Interval.of([1, 2, 3])
    assert interval.mean == 2 and interval.high == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)


FEDCA, FEDPDP = Cell("fedca", "class", score="accuracy"), Cell("fedpdp", "class")
CLAIM = Claim("FedCA > FedPdp", [(FEDCA, FEDPDP)])


@pytest.mark.parametrize(
    ("fedca", "fedpdp", "word"),
    [
        ([61, 62, 63], [50, 51, 52.5], "holds"),
        ([50, 51, 52.5], [61, 62, 63], "doesn't hold"),
        ([61, 40, 63], [50, 51, 52], "can't tell with n = 3"),
        ([61], [50], "can't tell with n = 1"),
        ([61, 62], [], "not all runs yet"),
    ],
)
def test_verdicts(fedca: list[float], fedpdp: list[float], word: str) -> None:
    runs = [made_up(FEDCA, seed, value) for seed, value in enumerate(fedca)]
    runs += [made_up(FEDPDP, seed, value) for seed, value in enumerate(fedpdp)]
    assert judge(CLAIM, results(*runs)).word == word


def test_only_runs_with_the_same_seed_are_compared() -> None:
    runs = [made_up(FEDCA, seed, 60 + seed) for seed in (0, 1, 2)] + [made_up(FEDPDP, seed, 50) for seed in (1, 2, 5)]
    overall = judge(CLAIM, results(*runs)).overall
    assert overall is not None and overall.seeds == 2 and overall.mean == pytest.approx(11.5)


def test_a_claims_difference_is_the_mean_over_its_cells_by_seed() -> None:
    other = Cell("fedca", "class", score="cross-entropy")
    claim = Claim("both", [(FEDCA, FEDPDP), (other, FEDPDP)])
    runs = [made_up(FEDPDP, seed, 50) for seed in (0, 1)] + [made_up(FEDCA, seed, 60 + seed) for seed in (0, 1)]
    runs += [made_up(other, 0, 70)]
    verdict = judge(claim, results(*runs))
    assert verdict.overall is not None and verdict.overall.seeds == 1  # seed 1 lacks one of the cells
    assert verdict.overall.mean == pytest.approx(15)
    parts = [part.mean for part in verdict.parts.values() if part is not None]
    assert parts == pytest.approx([10.5, 20])


def test_rounds_are_counted_to_fedavgs_mean_final_accuracy() -> None:
    fedavg, fedcm = Cell("fedavg", "class"), Cell("fedcm-ts", "class", score="accuracy")
    found = results(
        made_up(fedavg, 0, 50, 10, 20, 30),
        made_up(fedavg, 1, 60, 10, 20, 30),
        made_up(fedcm, 0, 80, 54, 55, 70),
        made_up(fedcm, 1, 54, 10, 20, 30),
    )
    assert found.target("class") == pytest.approx(55)
    assert found.rounds(fedcm) == {0: 2, 1: None}
    assert found.rounds(fedavg) == {0: None, 1: 4}
    verdict = judge(Claim("faster", [(fedcm, fedavg)], by="rounds"), found)
    assert verdict.overall is not None and verdict.overall.mean == pytest.approx(((5 - 2) + (4 - 5)) / 2)
    row = next(row for row in tables.table5(found).rows if row[:3] == ("class", "FedCM-TS", "accuracy"))
    assert row[3:] == ("24 (4.17×)", "2.0 (2.00×)", "1 of 2")


def test_every_claim_is_about_runs_that_are_made() -> None:
    made = {cell for cell, _ in PAPER.jobs(["claims"], 1)}
    for claim in CLAIMS:
        assert {cell for pair in claim.pairs for cell in pair} <= made
        assert len(set(claim.pairs)) == len(claim.pairs)


def test_a_table_has_the_papers_number_beside_ours() -> None:
    cell = Cell("fedcm-ts", "class", score="cross-entropy")
    found = results(made_up(cell, 0, 66, 60, 60, 60), made_up(cell, 1, 68, 61, 61, 61))
    rows = {row[:3]: row[3:] for row in tables.table4(found).rows}
    assert rows["class", "FedCM-TS", "cross-entropy"] == ("64.1 ± 0.6", "67.0 ± 1.4", "+2.9", "62.1 ± 0.9")
    assert rows["client", "FedAvg", "–"] == ("64.0 ± 0.9", "–", "–", "–")
    text = tables.table4(found).markdown()
    assert "| class | FedCM-TS | cross-entropy | 64.1 ± 0.6 | 67.0 ± 1.4 | +2.9 | 62.1 ± 0.9 |" in text
    assert text.count("\n|") == 24


def test_what_is_printed_is_compared_with_our_reading_of_it_on_the_same_seeds() -> None:
    printed = Cell("fedcm-ucb", "class", score="accuracy", refresh="stale")
    assert printed.config(STUDY, 0).refresh == "stale" and READINGS[printed] in TABLE_4
    found = results(
        made_up(printed, 0, 60),
        made_up(printed, 2, 90),
        made_up(READINGS[printed], 0, 64),
        made_up(READINGS[printed], 1, 10),
    )
    rows = {row[:3]: row[3:] for row in tables.readings(found).rows}
    assert rows["class", "FedCM-UCB", "refresh: stale"] == ("60.0", "64.0", "-4.0")
    assert rows["client", "FedPdp", "coefficients: literal"] == ("–", "–", "–")


def smooth(history: History, *accuracies: float) -> History:
    """The same run, handing out an average over rounds that has these accuracies in %."""
    for row, accuracy in zip(history.rows, accuracies, strict=True):
        row["unsmoothed_accuracy"], row["test_accuracy"] = row["test_accuracy"], accuracy / 100
    return history


def test_our_method_is_compared_with_the_best_fedcm_seed_by_seed() -> None:
    ours, fedcm, fedavg = (
        Cell("fedsieve", "class", smoothing=SMOOTHING),
        Cell("fedcm-ts", "class", score="accuracy", smoothing=SMOOTHING),
        Cell("fedavg", "class"),
    )
    study = OURS.study(quick=True, rounds=4, dataset=None, device="cpu")
    assert study.settings == STUDY.settings  # so that runs of the paper's tables count
    found = Results(
        study,
        [*RIVALS, *BASELINES],
        [
            *(smooth(made_up(ours, seed, final, 71), 10, 69, 70 + seed, 85) for seed, final in enumerate((80, 82, 84))),
            smooth(made_up(fedcm, 0, 75), 0, 69, 70, 77),
            smooth(made_up(fedcm, 1, 78), 0, 69, 69, 69),
            made_up(fedavg, 0, 70),
            made_up(SERVER_ONLY, 0, 60),
        ],
    )
    table = ours_table("class", found)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["FedSieve"] == ("3", "82.0 ± 2.0", "38.2 ± 0.5", "3.0 ± 0.0", "85.0 ± 0.0", "–", "–")
    assert rows["FedCM-TS, accuracy"] == (
        *("2", "76.5 ± 2.1", "19.1 ± 0.5", "4.0 ± 0.0"),
        *("73.0 ± 5.7", "+4.5 [-1.9, +10.9]", "–"),
    )
    assert rows["FedAvg"][3:] == ("4.0", "–", "+10.0", "–")
    assert rows["Server only"][3:] == ("never", "–", "+20.0", "–")
    assert list(rows) == ["FedSieve", "FedCM-TS, accuracy", "FedAvg", "Server only"] and "70.0 %" in table.note
    elsewhere = {row[0]: row[1:] for row in ours_table("client", found).rows}
    assert (
        elsewhere["Server only"] == ("1", "60.0", "15.0", *"––––") and "–, FedAvg's" in ours_table("client", found).note
    )
    figure = ours_figure(found)
    assert figure is not None
    assert [len(axes.lines) for axes in figure.axes] == [1, 4]
    tuned = made_up(Cell("fedsieve-finetune", "class", smoothing=SMOOTHING), 1, 90)
    carried = made_up(Cell("fedsieve", "class", server_momentum=MOMENTUM, smoothing=SMOOTHING), 1, 85)
    more = Results(study, [*RIVALS, *BASELINES], [*found.all(), tuned, carried])
    rows = {row[0]: row[-2:] for row in ours_table("class", more).rows}
    assert rows["FedCM-TS, accuracy"] == ("+7.0", "+12.0") and rows["FedSieve, momentum 0.5"] == ("–", "+5.0")
    assert rows["FedSieve, fine-tuned"] == ("-5.0", "–") and rows["FedSieve"] == ("+3.0", "+8.0")
    figure = ours_figure(more)
    assert figure is not None  # FedSieve once
    assert [line.get_label() for line in figure.axes[1].lines] == [
        *("FedSieve, momentum 0.5", "FedSieve, fine-tuned", "FedCM-TS", "FedAvg", "Server only"),
    ]
    assert ours_figure(Results(study, RIVALS + BASELINES, [])) is None
    assert overfitting_figure(found) is None  # these runs don't know their validation accuracy
    for row in tuned.rows:
        row["validation_accuracy"] = 1.0
    beside = overfitting_figure(more)
    assert beside is not None
    panels = {
        axes.get_title("left"): [np.asarray(line.get_ydata()).tolist() for line in axes.lines] for axes in beside.axes
    }
    assert panels == {"FedSieve, momentum 0.5": [], "FedSieve, fine-tuned": [[100] * 4, [0, 0, 0, 90]]}


def test_our_plan_has_five_seeds_of_what_is_decisive_and_needs_what_the_paper_has() -> None:
    jobs = OURS.jobs(OURS.find(["ours"]), None)
    assert len(jobs) == len(set(jobs)) == 5 * 2 * 8 + 3 * (2 * 6 + 1)
    assert find_plan(["ours"]) is OURS
    best = max(published.TABLE_4, key=lambda cell: published.TABLE_4[cell][0])
    assert best.algorithm == "fedcm-ts" and {(cell.algorithm, cell.score) for cell in RIVALS} == {
        *((name, "") for name in ("fedsieve", "fedsieve-finetune", "fedpdp-finetune")),
        *((name, score) for name in ("fedcm-ts", "fedcm-ucb") for score in ("accuracy", "cross-entropy")),
    }


def test_runs_of_another_setting_are_never_put_together(caplog: pytest.LogCaptureFixture) -> None:
    cell = TABLE_4[0]
    longer = PAPER.study(quick=True, rounds=5, dataset=None, device="cpu")
    with caplog.at_level(logging.INFO, "fedsieve"):
        found = results(made_up(cell, 0, 50), made_up(cell, 1, 90, study=longer), made_up(cell, 0, 70))
    assert found.final(cell) == {0: 50.0}
    assert "1 records are of other settings" in caplog.text and "there are two records" in caplog.text


def test_the_map_of_figure_5_has_every_client_it_knows() -> None:
    history = made_up(Cell("fedpdp", "class"), 0, 50, 10, 20, 30)
    history.rows[0]["per_class"] = {"3": [0.1] * 10, "4": [0.2] * 10}
    history.rows[1]["per_class"] = {"3": [0.3] * 10}
    history.rows[3]["per_class"] = {"5": [0.9] * 10}  # not in the first half
    shares = per_class(history)
    assert shares.shape == (20, 10) and shares[3, 0] == 0.3 and shares[4, 9] == 0.2
    assert np.isnan(shares[5]).all() and np.isnan(shares).all(1).sum() == 18


def test_the_page_keeps_what_was_asked_for_before(tmp_path: Path) -> None:
    for history in (made_up(TABLE_4[0], 0, 50), made_up(SERVER_ONLY, 0, 60)):
        write_record(history, tmp_path / "records")
    write_up(Reproduction(PAPER, STUDY, ["figure3"], None, tmp_path))
    outcome = write_up(Reproduction(PAPER, STUDY, ["table5"], None, tmp_path))
    assert [table.title for table in outcome.tables] == ["Table 5: rounds to FedAvg's final accuracy"]
    page = (tmp_path / "results.md").read_text()
    assert "### Table 4" in page and "### Table 5" in page and "### Claims" in page and "figures/figure3.png" in page
    assert "### Table 2" not in page and "figure6" not in page  # no runs


def test_without_the_data_set_figure_1_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = PAPER.study(quick=False, rounds=4, dataset=None, device="cpu", data_dir=tmp_path)
    outcome = write_up(Reproduction(PAPER, study, ["figure1"], None, tmp_path))
    assert outcome.files == [tmp_path / "results.md"]
    assert "Figure 1: data per client is left out: " in caplog.text


def test_what_is_finished_is_not_run_again_and_others_seeds_count(tmp_path: Path) -> None:
    reproduction = Reproduction(PAPER, STUDY, ["table3"], 2, tmp_path)
    assert len(reproduction.missing()) == 24
    theirs = [made_up(TABLE_3[0], 0, 50), made_up(TABLE_3[0], 9, 60)]
    for history in theirs:
        write_record(history, tmp_path / "records")
    assert len(reproduction.missing()) == 23
    assert reproduction.results().final(TABLE_3[0]) == pytest.approx({0: 50.0, 9: 60.0})


class Interrupted(fs.Callback):
    """Somebody presses Ctrl-C in the third round."""

    def __init__(self) -> None:
        self.rounds = 0

    def on_round(self, row: Any) -> None:
        self.rounds += 1
        if self.rounds == 3:
            raise KeyboardInterrupt


def test_an_interrupted_reproduction_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "SAVE_EVERY", 3600.0)
    study = PAPER.study(quick=True, rounds=2, dataset=None, device="cpu")
    twice = [Reproduction(PAPER, study, ["figure5"], None, tmp_path / name) for name in ("whole", "broken")]
    twice[0].run()
    with pytest.raises(KeyboardInterrupt):
        twice[1].run([Interrupted()])
    assert len(twice[1].missing()) == 7 and len(list((tmp_path / "broken" / "runs").iterdir())) == 1
    counted = Interrupted()
    counted.rounds = 10
    twice[1].run([counted])
    assert counted.rounds == 10 + 7 * 2  # the second run had no checkpoint yet, and began again
    whole, broken = (
        {history.config.local_epochs: history.accuracy for history in one.results().all()} for one in twice
    )
    assert whole == broken and not list((tmp_path / "broken" / "runs").iterdir())


class Helper(fs.Callback):
    """Makes the missing runs too, from the first round of the first run on."""

    def __init__(self, folder: Path) -> None:
        self.begun: list[tuple[str, str]] = []
        self.helps = Reproduction(PAPER, STUDY, ["figure6"], 1, folder)

    def on_start(self, config: fs.Config, done: int) -> None:
        self.begun.append((config.heterogeneity, f"{config.alpha:g}"))

    def on_round(self, row: Mapping[str, Any]) -> None:
        if len(self.begun) == 1:
            self.helps.run([self])


def test_several_processes_share_the_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Reproduction(PAPER, STUDY, ["figure6"], 1, tmp_path)
    damaged = [tmp_path / "records" / f"{folder.name}.json" for folder in first.missing()][3]
    damaged.parent.mkdir()
    damaged.write_text("{")
    helper = Helper(tmp_path)
    with caplog.at_level(logging.INFO, "fedsieve"):
        first.run([helper])
    assert len(set(helper.begun)) == len(helper.begun) == 6  # each once, five of them by the other
    assert [message for message in caplog.messages if message.endswith("another process is at it")]
    assert "1 of 6 runs are missing: they failed, or another process is at them" in caplog.messages
    assert len(first.results().all()) == 6 and not first.missing()
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_is_answered_in_one_line(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reproduction, "run", press)
    status, _, said = typed("reproduce", "figure5", "--quick", "--device", "cpu", "--out", "paper")
    assert status == 130 and said.count("\n") == 1 and "the same command goes on" in said


def test_all_of_it_quickly(typed: Typed, tmp_path: Path) -> None:
    words = ["reproduce", "all", "--quick", "--rounds", "2", "--seeds", "1", "--device", "cpu", "--out", "paper"]
    status, printed, _ = typed(*words)
    assert status == 0
    for title in ("Table 2:", "Table 3:", "Table 4:", "Table 5:", "can't tell with n = 1"):
        assert title in printed
    paper = tmp_path / "paper"
    records = {path.name: path.read_text() for path in (paper / "records").iterdir()}
    assert len(records) == 50
    for number, ending in ((number, ending) for number in (1, 2, 3, 5, 6) for ending in ("png", "svg", "pdf")):
        assert (paper / "figures" / f"figure{number}.{ending}").stat().st_size > 5000
    summary = (paper / "results.md").read_text()
    heading = summary.splitlines()[2]
    assert heading.startswith("50 runs on ") and "Seeds: 0. Made by `fedsieve reproduce all" in heading
    assert "![Figure 3" in summary and "| class | FedCM-TS |" in summary
    assert "FedCM-UCB" in (paper / "report.html").read_text()
    status, again, _ = typed(*words)
    assert (status, again) == (0, printed)  # nothing was run: the records are the very same
    assert {path.name: path.read_text() for path in (paper / "records").iterdir()} == records


def test_a_report_of_nothing_says_so(typed: Typed, tmp_path: Path) -> None:
    status, printed, said = typed("reproduce", "table4", "figure3", "--quick", "--report-only", "--out", "empty")
    assert status == 2 and not printed
    assert said == "error: out: 'empty' is not allowed; use a folder with records of finished runs\n"
    assert not (tmp_path / "empty").exists()
    write_record(made_up(TABLE_2[0], 0, 50), tmp_path / "few" / "records")
    status, printed, said = typed(
        "reproduce",
        "table4",
        "figure3",
        "--quick",
        "--rounds",
        "4",
        "--report-only",
        "--precision",
        "fp32",
        "--out",
        "few",
    )
    assert status == 0 and "–" in printed and "Figure 3: bandits: no runs yet" in said
    status, _, said = typed("reproduce", "table4", "--device", "gpu")
    assert status == 2 and said.startswith("error: device: 'gpu'") and said.count("\n") == 1
    (tmp_path / "file").touch()
    status, _, said = typed("reproduce", "figure5", "--quick", "--device", "cpu", "--out", "file")
    assert status == 2 and said.startswith("error: out: 'file'") and said.count("\n") == 1
    status, _, said = typed("reproduce", "figure5", "--quick", "--device", "cpu", "--at-once", "9", "--out", "none")
    assert status == 2 and said.startswith("error: at_once: 9") and not (tmp_path / "none").exists()
    status, _, said = typed("reproduce", "table9")
    assert status == 2 and said.startswith("error: target: 'table9'") and said.count("\n") == 1


def test_what_came_out_is_written_up(tmp_path: Path) -> None:
    for cell in CELLS:
        write_record(made_up(cell, 0, 50), tmp_path / "records")
    outcome = write_up(Reproduction(PAPER, STUDY, ["table4", "claims"], 1, tmp_path))
    assert [path.name for path in outcome.files] == ["results.md", "results.json", "report.html"]
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert len(numbers["runs"]) == len(CELLS) and numbers["commands"] == ["fedsieve reproduce"]
    assert all(run["test_accuracy"] == [0.0, 0.0, 0.0, 0.5] for run in numbers["runs"])


def test_records_of_a_gpu_are_reported_on_any_machine(typed: Typed, tmp_path: Path) -> None:
    study = PAPER.study(quick=False, rounds=4, dataset="digits", device="cpu", precision="bf16")
    write_record(made_up(TABLE_4[0], 0, 61.5, study=study), tmp_path / "paper" / "records")
    words = ["reproduce", "table4", "--dataset", "digits", "--rounds", "4", "--report-only", "--out", "paper"]
    assert " 61.5 " in typed(*words)[1]
    assert "61.5 ± 0.0" not in typed(*words, "--precision", "fp32")[1]
    assert " 61.5 " in typed(*[word if word != "paper" else "mine" for word in words], "--also", "paper")[1]


def test_records_of_a_cpu_are_reported_whatever_is_usual(typed: Typed, tmp_path: Path) -> None:
    study = PAPER.study(quick=False, rounds=4, dataset="digits", device="cpu", precision="fp32")
    write_record(made_up(TABLE_4[0], 0, 61.5, study=study), tmp_path / "paper" / "records")
    (tmp_path / "paper" / "records" / "another.json").write_text("{}")
    words = ["reproduce", "table4", "--dataset", "digits", "--rounds", "4", "--report-only", "--out", "paper"]
    assert " 61.5 " in typed(*words)[1]


def test_another_studys_runs_count_too(typed: Typed, tmp_path: Path) -> None:
    study = PAPER.study(quick=True, rounds=4, dataset=None, device="cpu", precision="fp32")
    for name, seed, final in (("mine", 0, 50.0), ("theirs", 1, 70.0)):
        write_record(made_up(TABLE_4[0], seed, final, study=study), tmp_path / name / "records")
    words = ["reproduce", "table4", "--quick", "--rounds", "4", "--report-only", "--precision", "fp32", "--out", "mine"]
    assert "60.0 ± 14.1" in typed(*words, "--also", "theirs")[1]
    assert "60.0" not in typed(*words)[1]
    status, _, said = typed(*words, "--also", "nobodys")
    assert status == 2 and said.startswith("error: also: 'nobodys'") and said.count("\n") == 1


def test_there_is_a_target_for_each_table_and_figure_with_data() -> None:
    assert set(PAPER.targets) == {
        "claims",
        "readings",
        *(f"table{n}" for n in (2, 3, 4, 5)),
        *(f"figure{n}" for n in (1, 2, 3, 5, 6)),
    }
    assert PAPER.find(["figure2", "figure2"]) == ["figure2"]


def test_runs_with_parts_of_ones_own_are_none_of_the_papers(caplog: pytest.LogCaptureFixture) -> None:
    own = made_up(TABLE_4[0], 0, 99)
    own.summary["own_parts"] = {"dataset": "Dataset"}
    with caplog.at_level(logging.INFO, "fedsieve"):
        found = results(own, made_up(TABLE_4[0], 1, 60))
    assert found.final(TABLE_4[0]) == {1: 60.0} and "1 records are of other settings" in caplog.text
