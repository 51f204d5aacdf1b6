"""What filters cost in data: the runs of the study, its table and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Typed

from fedsieve import algorithms
from fedsieve.errors import InvalidSetting
from fedsieve.reproduction import VALIDATION, Reproduction, Study, find_plan, write_up
from fedsieve.reproduction.results import Results
from fedsieve.reproduction.validation import (
    BALANCED,
    CASES,
    EVENED,
    IMBALANCED,
    READERS,
    REFERENCE,
    SIZES,
    SUPPLIES,
    WRONG,
    Case,
)
from fedsieve.reproduction.validation_pictures import overfitting_figure, validation_figure
from fedsieve.reproduction.validation_tables import validation_table
from fedsieve.runs import History, assemble


def study(rounds: int | None = 2, quick: bool = True) -> Study:
    return VALIDATION.study(quick=quick, rounds=rounds, dataset=None, device="cpu")


def made_up(case: Case, seed: int, accuracies: Sequence[float]) -> History:
    """A run with these accuracies in %, and a validation accuracy of all."""
    of_validation = {} if case.algorithm == REFERENCE else {"validation_accuracy": 1.0}
    rows: list[dict[str, Any]] = [{"test_accuracy": accuracy / 100} | of_validation for accuracy in accuracies]
    return History(case.config(study(len(rows)), seed), rows, {"final_accuracy": accuracies[-1] / 100})


def test_every_algorithm_meets_every_supply() -> None:
    assert len(CASES) == len(set(CASES)) == 11 * 8
    assert {BALANCED, *SIZES, IMBALANCED, EVENED, WRONG} == set(SUPPLIES)
    full = study(rounds=None, quick=False)
    configs = [Case("fedca", supply).config(full, 5) for supply in SUPPLIES]
    assert [config.validation_per_class for config in configs] == [5, 20, 50, 100, 500, 100, 100, 100]
    assert [config.validation_imbalance for config in configs] == [1, 1, 1, 1, 1, 10, 10, 1]
    assert [config.even_classes for config in configs] == [False] * 6 + [True, False]
    assert [config.validation_errors for config in configs] == [0, 0, 0, 0, 0, 0, 0, 0.1]
    one = configs[0]
    assert (one.dataset, one.model, one.rounds, one.score, one.seed) == ("cifar10", "cnn", 60, "cross-entropy", 5)
    assert (one.clients, one.ratio, one.heterogeneity, one.alpha) == (20, 0.4, "class", 0.1)


def test_the_readers_are_those_that_need_validation_data() -> None:
    for name in (REFERENCE, *READERS):
        config = Case(name, BALANCED).config(study(), 0).model_copy(update={"validation_per_class": 0})
        if name == REFERENCE:
            assemble(config)[1].close()
        else:
            with pytest.raises(InvalidSetting, match="validation_per_class: 0"):
                assemble(config)


def test_bundled_data_allows_every_supply() -> None:
    for supply in SUPPLIES:
        _, engine = assemble(Case("fedca", supply).config(study(), 0))
        of_class = engine.labels("validation").bincount()
        assert of_class.sum() == 10 * (of_class.max() if supply.evened else supply.per_class(study()))
        engine.close()


def test_the_best_of_each_column_is_marked() -> None:
    runs = [made_up(Case("fedca", SIZES[0]), seed, [0, accuracy]) for seed, accuracy in enumerate((60, 70))]
    runs += [made_up(Case("fedsieve", SIZES[0]), 0, [0, 64]), made_up(Case("fedsieve", WRONG), 0, [0, 50])]
    table = validation_table(Results(study(), CASES, runs))
    assert table.headings == ("Algorithm", "1", "2", "5", "10", "30", "10, uneven", "10, evened", "10, wrong")
    assert [row[0] for row in table.rows] == [algorithms.find(name).title for name in (REFERENCE, *READERS)]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["FedCA"] == ("65.0 ± 7.1", *["–"] * 7) and rows["FedSieve"] == ("64.0", *["–"] * 6, "50.0")
    lines = table.markdown().splitlines()
    assert "| FedCA | **65.0 ± 7.1** | – | – | – | – | – | – | – |" in lines
    assert "| FedSieve | 64.0 | – | – | – | – | – | – | **50.0** |" in lines


def test_validation_and_test_accuracy_are_drawn_where_they_are_known() -> None:
    known = [made_up(Case("fedca", SIZES[0]), seed, [20, 40]) for seed in (0, 1)]
    old = made_up(Case("fedca", SIZES[-1]), 0, [30, 60])
    for row in old.rows:
        del row["validation_accuracy"]
    figure = overfitting_figure(Results(study(), CASES, [*known, old]))
    assert figure is not None
    drawn = [list(line.get_ydata()) for line in figure.axes[0].lines]  # type: ignore[arg-type]
    assert drawn == [[100, 100], [20, 40]]  # test accuracy alone would compare with nothing
    assert overfitting_figure(Results(study(), CASES, [made_up(Case(REFERENCE, SIZES[0]), 0, [1, 2])])) is None


def test_lines_are_means_over_seeds_at_each_size() -> None:
    runs = [made_up(Case("fedca", SIZES[0]), seed, [last]) for seed, last in enumerate((60, 70))]
    runs += [made_up(Case("fedca", SIZES[4]), 0, [80])]
    figure = validation_figure(Results(study(1), CASES, runs))
    assert figure is not None
    line = figure.axes[0].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 30], [65, 80])  # type: ignore[arg-type]
    assert validation_figure(Results(study(1), CASES, [])) is None


def test_the_server_alone_does_not_set_the_scale() -> None:
    runs = [made_up(Case("fedca", SIZES[0]), seed, [last]) for seed, last in enumerate((80, 82))]
    runs += [made_up(Case("server-only", supply), 0, [last]) for supply, last in ((SIZES[0], 40), (SIZES[4], 85))]
    figure = validation_figure(Results(study(1), CASES, runs))
    assert figure is not None
    for axes in figure.axes[:3]:
        assert 78 < axes.get_ylim()[0] < 80 and axes.get_ylim()[1] > 85
    assert [(text.get_text(), text.get_position()[0]) for text in figure.axes[2].texts] == [("40 ↓", 1)]
    assert not figure.axes[0].texts


def test_a_small_study_from_runs_to_pictures(tmp_path: Path) -> None:
    few = [Case(name, supply) for name in ("fedpdp", "server-only") for supply in (SIZES[0], IMBALANCED, WRONG)]
    targets = {name: replace(target, cells=few) for name, target in VALIDATION.targets.items()}
    smaller = Reproduction(replace(VALIDATION, targets=targets), study(), ["validation"], 1, tmp_path)
    smaller.run()
    assert smaller.missing() == {}
    outcome = write_up(Reproduction(VALIDATION, study(), ["validation"], 1, tmp_path))
    assert [path.name for path in outcome.files] == ["validation.png", "overfitting.png", "results.md", "results.json"]
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("# What it costs in validation data on digits")
    assert "![Validation and test accuracy over rounds](figures/overfitting.png)" in text


def test_the_study_stands_alone(typed: Typed) -> None:
    assert find_plan(["validation"]) is VALIDATION
    with pytest.raises(InvalidSetting, match="validation alone"):
        find_plan(["validation", "table4"])
    status, printed, said = typed("reproduce", "validation", "--quick", "--report-only", "--out", "nothing")
    assert status == 2 and not printed and said.startswith("error: out: 'nothing'")
