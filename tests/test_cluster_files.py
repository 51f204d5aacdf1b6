"""The example files for a cluster are what Ray and bash can read, and open nothing that need not be open."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = ROOT / "examples" / "cluster"


@pytest.fixture
def cloud() -> dict[str, Any]:
    """The cloud file as Ray would use it: completed with its defaults."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    prepared: dict[str, Any] = util.prepare_config(yaml.safe_load((FILES / "cloud.yaml").read_text(encoding="utf-8")))
    util.validate_config(prepared)
    return prepared


def test_ray_accepts_the_cloud_file(cloud: dict[str, Any]) -> None:
    types = cloud["available_node_types"]
    assert types[cloud["head_node_type"]]["resources"] == {"CPU": 0}  # drives only
    assert (types["gpu"]["min_workers"], types["gpu"]["max_workers"], cloud["max_workers"]) == (1, 4, 4)


def test_the_cloud_file_sends_files_that_exist(cloud: dict[str, Any]) -> None:
    local = {path for path in cloud["file_mounts"].values() if not path.startswith("~")}
    assert {path for path in local if not (ROOT / path).exists()} == set()


def test_no_dashboard_and_no_cluster_without_a_token(cloud: dict[str, Any]) -> None:
    starts = [command for command in cloud["head_start_ray_commands"] if "ray start" in command]
    assert len(starts) == 1
    assert "--include-dashboard=false" in starts[0]
    assert any("RAY_AUTH_MODE=token" in command for command in cloud["setup_commands"])
    script = (FILES / "slurm.sh").read_text(encoding="utf-8")
    assert "--include-dashboard=false" in script
    assert "RAY_AUTH_MODE=token" in script


def test_bash_can_read_the_slurm_script() -> None:
    done = subprocess.run(["bash", "-n", str(FILES / "slurm.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
