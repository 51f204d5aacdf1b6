"""Freed memory is kept: blocks that are freed and asked for again are not cleared page by page each time."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from fedsieve.engines.heap import SETTINGS, keep_freed_memory

FAULTS = """
import json, resource, torch
from fedsieve.engines.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.zeros(2**21) for _ in range(8)]  # 8 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
print(json.dumps([before, keep_freed_memory(), faults()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries manage memory otherwise")
def test_pages_are_cleared_once() -> None:
    surroundings = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    told = subprocess.run([sys.executable, "-c", FAULTS], env=surroundings, capture_output=True, text=True, check=True)
    before, kept, after = json.loads(told.stdout)
    assert kept and after < before / 4


@pytest.mark.parametrize("name", SETTINGS)
def test_who_has_set_it_otherwise_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_another_c_library_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
