"""What the pictures show is what was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsieve.report import figures, style


def test_the_participation_map_marks_asked_and_kept() -> None:
    rows = [{"sampled": [0, 2], "kept": [2]}, {"sampled": [1, 1], "kept": [1]}]
    assert figures.participation_map(rows, 3).tolist() == [[1, 0], [0, 2], [2, 0]]


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

    colours = [style.colour(name, 0) for name in ALGORITHMS]
    assert len(set(colours)) == len(ALGORITHMS)


def test_pictures_are_written_in_the_format_of_their_name(tmp_path: Path) -> None:
    figure = figures.data_per_client({"a": np.array([[1, 2]])})
    assert style.save(figure, tmp_path / "new" / "a.pdf").read_bytes().startswith(b"%PDF")
