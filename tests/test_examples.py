"""Every example runs, as a user would run it, and says something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # without `out`, a run writes nothing


def test_there_is_an_example_of_each_kind_of_part() -> None:
    assert {path.stem for path in EXAMPLES} >= {"own_sampler", "own_filter", "own_averaging", "own_model", "own_data"}
