"""How tests run here: hypothesis never against the clock, what needs a GPU only where one is, commands as typed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedsieve import cli

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Python then

os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - else workers of Ray wait for the other tests

settings.register_profile(
    # Repeatable on a build machine.
    "fedsieve",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fedsieve")


WAITING = ("test_flower_deployment.py", "test_ray.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that mostly wait; report those marked `cuda` as skipped where there is no GPU."""
    items.sort(key=lambda item: item.path.name not in WAITING)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


class Typed:
    """What a command printed and how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *words: str | Path) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["fedsieve", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = self.capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    monkeypatch.chdir(tmp_path)
    return Typed(capsys, monkeypatch)
