"""Every example runs, as a user would run it, and says something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("own_*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert len(output_of(tmp_path, str(example)).splitlines()) == 1


def test_there_is_an_example_of_each_kind_of_part() -> None:
    assert {path.stem for path in EXAMPLES} >= {"own_sampler", "own_filter", "own_averaging", "own_model", "own_data"}


def test_the_search_prunes_bad_trials_and_tells_the_best(tmp_path: Path) -> None:
    *trials, pruned, best = output_of(tmp_path, str(FOLDER / "tune.py"), "--trials", "6", "--rounds", "4").splitlines()
    told = [re.fullmatch(r"trial (\d): validation score (0\.\d+), (.+?), (lr .+)", trial) for trial in trials]
    assert [trial and trial[1] for trial in told] == list("012345")
    stopped = {trial[1] for trial in told if trial and trial[3] == "pruned after round 3"}
    assert stopped  # before its last round
    assert pruned == f"{sum('pruned' in trial for trial in trials)} of 6 trials pruned"
    highest = max((trial for trial in told if trial and trial[3] == "finished"), key=lambda trial: float(trial[2]))
    assert re.fullmatch(rf"best: {re.escape(highest[4])}: test accuracy 0\.\d+", best)


def output_of(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []  # without `out`, a run writes nothing
    return done.stdout
