"""What the pictures show is what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedsieve.report import figures, style
from fedsieve.report.tables import attack_table, comparison_table
from fedsieve.report.units import SIZE, TIME, Units, written
from fedsieve.runs import Line, Spread


def test_the_participation_map_marks_asked_and_kept() -> None:
    rows = [{"sampled": [0, 2], "kept": [2]}, {"sampled": [1, 1], "kept": [1]}]
    assert figures.participation_map(rows, 3).tolist() == [[1, 0], [0, 2], [2, 0]]


def test_the_participation_map_tells_hostile_clients_apart() -> None:
    rows = [{"sampled": [0, 1], "kept": [1]}, {"sampled": [1, 2], "kept": [2]}]
    assert figures.participation_map(rows, 4, [1, 3]).tolist() == [[1, 0], [4, 3], [0, 2], [0, 0]]


def test_hostile_clients_are_marked_in_their_own_run_alone() -> None:
    rows = {name: [{"sampled": [0, 1], "kept": [1]}] for name in ("fedavg", "server-only")}
    figure = figures.participation(rows, 2, hostile={"fedavg": [1], "server-only": []})
    shown = [np.asarray(axes.images[0].get_array()).tolist() for axes in figure.axes]
    assert shown == [[[1], [4]], [[1], [2]]]
    assert len(figure.legends[0].get_texts()) == 5
    plain = figures.participation(rows, 2, hostile={"fedavg": []})
    assert len(plain.legends[0].get_texts()) == 3


def test_steps_are_known_where_every_run_is() -> None:
    places, values = figures.common_steps([([1, 3, 8], [0.1, 0.2, 0.3]), ([2, 4, 6], [0.5, 0.6, 0.7])])
    assert places.tolist() == [2, 3, 4, 6]  # the first has something from 1 to 8, the second from 2 to 6
    assert values.tolist() == [[0.1, 0.2, 0.2, 0.2], [0.5, 0.5, 0.6, 0.7]]


def test_curves_over_time_are_means_of_what_was_known() -> None:
    runs = [([60.0, 180.0, 480.0], [0.1, 0.2, 0.3]), ([120.0, 240.0, 360.0], [0.5, 0.6, 0.7])]
    axes = figures.accuracy_over("seconds", {"fedca": runs, "never": [([1], [0.1]), ([2], [0.1])]}).axes[0]
    (line,) = axes.get_lines()
    np.testing.assert_allclose(np.asarray(line.get_xdata()), [2, 3, 4, 6])
    np.testing.assert_allclose(np.asarray(line.get_ydata()), [30, 35, 40, 45])
    assert axes.get_xlabel() == "simulated time (min)"
    assert figures.accuracy_over("bytes", {"fedca": runs}).axes[0].get_xlabel() == "bytes sent (kB)"


@pytest.mark.parametrize(
    ("value", "units", "text"),
    [
        (0, TIME, "0.00 s"),
        (119, TIME, "119 s"),
        (120, TIME, "2.00 min"),
        (3600, TIME, "60.0 min"),
        (36 * 3600, TIME, "36.0 h"),
        (1e6, TIME, "11.6 days"),
        (1.2345e7, SIZE, "12.3 MB"),
        (3e15, SIZE, "3000 TB"),
    ],
)
def test_amounts_have_the_unit_that_suits_them(value: float, units: Units, text: str) -> None:
    assert written(value, units) == text


def line(**known: Any) -> Line:
    """Of a comparison that knows no more than it has to."""
    accuracy = Spread(0.5, 0.01)
    nothing: dict[str, Any] = dict.fromkeys(Line.__dataclass_fields__)
    always = {"algorithm": "fedca", "seeds": 3, "final": accuracy, "best": accuracy, "mean_last_10": accuracy}
    return Line(**nothing | always | {"rounds_to_target": Spread(4, 1), "reached": 2} | known)


def printed(table: Any) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_has_time_and_bytes_only_where_known() -> None:
    plain = printed(comparison_table([line()]))
    assert "Rounds to target*" in plain and "4.0 (2/3)" in plain and "Time" not in plain
    timed = printed(
        comparison_table([line(seconds_to_target=Spread(300, 5), bytes_to_target=Spread(2e7, 1e6)), line()])
    )
    assert all(text in timed for text in ("Time*", "5.00 min", "20.0 MB", "simulated time and bytes sent to reach"))


def test_the_table_of_attacks_says_who_was_kept() -> None:
    shares = {"hostile_sampled": Spread(0.25, 0.01), "hostile_kept": Spread(0.031, 0.002)}
    text = printed(attack_table([line(**shares, requests_gini=Spread(0.42, 0))]))
    assert all(part in text for part in ("25.0 ± 1.0", "3.1 ± 0.2", "0.42")) and "Backdoor" not in text
    assert "90.0 ± 0.0" in printed(attack_table([line(**shares, backdoor_success=Spread(0.9, 0)), line(**shares)]))


def test_curves_are_the_mean_over_runs_in_percent() -> None:
    figure = figures.accuracy_curves({"fedavg": [[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]], "mine": [[0.5, 0.5, 0.6]]})
    first, second = figure.axes[0].get_lines()
    np.testing.assert_allclose(np.asarray(first.get_ydata()), [20, 30, 40])
    np.testing.assert_allclose(np.asarray(second.get_ydata()), [50, 50, 60])
    assert [text.get_text() for text in figure.axes[0].texts] == ["mine", "FedAvg"]


def test_bars_stack_to_the_clients_sizes() -> None:
    counts = np.array([[3, 1], [0, 5]])
    figure = figures.data_per_client({"a": counts})
    tops = [patch.get_y() + patch.get_height() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert tops == [3, 0, 4, 5]


def test_every_known_algorithm_has_a_colour_of_its_own() -> None:
    from fedsieve.algorithms import ALGORITHMS

    assert len(set(style.colours_of(ALGORITHMS).values())) == len(ALGORITHMS)


def test_others_get_colours_that_nobody_beside_them_has() -> None:
    mine = [f"variant {number}" for number in range(8)]
    colours = style.colours_of(["fedsieve", *mine, "fedsieve-ucb"])
    assert len(set(colours.values())) == 10 and colours["fedsieve"] == style.colours_of(["fedsieve"])["fedsieve"]


def test_pictures_are_written_in_the_format_of_their_name(tmp_path: Path) -> None:
    figure = figures.data_per_client({"a": np.array([[1, 2]])})
    assert style.save(figure, tmp_path / "new" / "a.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_picture_is_the_same_file(ending: str, tmp_path: Path) -> None:
    first, second = (
        style.save(figures.data_per_client({"a": np.array([[1, 2]])}), tmp_path / f"{name}.{ending}").read_bytes()
        for name in ("first", "second")
    )
    assert first == second
