"""How tests run here: hypothesis never against the clock, and what needs a GPU only where one is."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    # Repeatable on a build machine.
    "fedsieve",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fedsieve")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Report tests marked `cuda` as skipped where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
