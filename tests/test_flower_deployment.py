"""A real deployment on this machine: TLS, SuperNode authentication, four SuperNodes, and everything that goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SITES = ("site-0", "site-1", "site-2", "site-3")


def load_deploy() -> Any:
    path = Path(__file__).parent.parent / "examples" / "flower" / "deploy.py"
    spec = importlib.util.spec_from_file_location("deploy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


deploy = load_deploy()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A SuperLink and four SuperNodes that it knows, and two that it must not let in."""
    with deploy.Federation(tmp_path_factory.mktemp("federation")) as running:
        running.start_superlink()
        running.data = deploy.make_data(running.folder, len(SITES))
        for name, data in zip(SITES, running.data, strict=True):
            running.register(name)
            running.start_supernode(name, data)
        running.start_supernode("stranger", running.data[0])  # a key that nobody registered
        running.start_supernode("plain", running.data[0], "site-0", tls=False)
        yield running


def rows(state: Path) -> list[dict[str, Any]]:
    file = state / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def submit(federation: Any, state: Path, rounds: int, **config: Any) -> int:
    chosen = {"num-server-rounds": rounds, "state-dir": str(state), "fraction-evaluate": 0.0, "local-epochs": 1}
    run: int = federation.submit(**chosen, **config)
    return run


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            found += [child, *descendants(child)]
    return found


def named(pids: list[int], name: str) -> list[int]:
    found = []
    for pid in pids:
        try:
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found


def names_in(row: dict[str, Any], field: str) -> set[str]:
    return {row["clients"][str(client)] for client in row[field]}


def test_a_serverapp_killed_between_rounds_goes_on_and_strangers_stay_out(federation: Any) -> None:
    state = federation.folder / "state-killed"
    run = submit(federation, state, 5)
    deploy.wait_until(lambda: len(rows(state)) >= 2, "two rounds")
    apps = named(descendants(federation.processes["superlink"].pid), "flwr-serverapp")
    assert apps
    for pid in apps:
        os.kill(pid, signal.SIGKILL)
    done = len(rows(state))
    assert 2 <= done < 5
    again = submit(federation, state, 5)
    deploy.wait_until(lambda: len(rows(state)) == 5, "the other rounds")
    assert federation.wait_for_run(again) == "finished:completed"
    assert federation.wait_for_run(run) == "finished:failed"
    found = rows(state)
    assert [row["round"] for row in found] == [1, 2, 3, 4, 5]
    results = json.loads((state / "results.json").read_text())
    assert list(results["train_metrics_clientapp"]) == ["1", "2", "3", "4", "5"]
    assert list(results["evaluate_metrics_serverapp"]) == ["0", "1", "2", "3", "4", "5"]
    for row in found:
        assert len(row["sampled"]) == 2 and not row["excluded"] and row["kept"]
        assert names_in(row, "sampled") <= set(SITES)
    bandit = json.loads((state / "checkpoints" / "round-000005.json").read_text())["sampler"]["sampler"]
    assert sum(bandit["alpha"]) + sum(bandit["beta"]) == 2 * len(bandit["clients"]) + 5 * 2  # every answer counted once
    # Who has no registered key, or no TLS, was never a node of this federation.
    listed = federation.flwr("supernode", "list", "deployment", "--format", "json")
    nodes = json.loads(listed[listed.index("{") :])["nodes"]
    assert len([node for node in nodes if node["status"] == "online"]) == len(SITES)
    assert "SuperNode ID" not in federation.log("stranger") and "SuperNode ID" not in federation.log("plain")


def test_a_node_that_dies_and_one_that_sends_nan_are_left_out(federation: Any) -> None:
    with np.load(federation.data[3]) as good:
        x, y = good["x"], good["y"]
    np.savez(federation.data[3], x=np.full_like(x, np.nan), y=y)
    state = federation.folder / "state-disturbed"
    settings = {"fraction-train": 1.0, "round-timeout": 50.0, "min-nodes": 3}
    run = submit(federation, state, 4, **settings)
    deploy.wait_until(lambda: len(rows(state)) >= 1, "the first round")
    federation.kill("site-2")  # it has been asked, or will be, in the second round
    deploy.wait_until(lambda: len(rows(state)) >= 2, "the second round")
    federation.start_supernode("site-2", federation.data[2])
    deploy.wait_until(lambda: len(rows(state)) == 4, "the other rounds")
    assert federation.wait_for_run(run) == "finished:completed"
    np.savez(federation.data[3], x=x, y=y)
    found = rows(state)
    assert [row["round"] for row in found] == [1, 2, 3, 4]
    for row in found:
        reasons = {row["clients"][client]: reason for client, reason in row["excluded"].items()}
        assert reasons.pop("site-3") == "model with NaN or infinity"
        assert set(reasons) <= {"site-2"}
        assert "site-3" not in names_in(row, "kept")
    assert "site-2" not in names_in(found[1], "kept") and "site-2" in names_in(found[0], "sampled")
    results = json.loads((state / "results.json").read_text())
    assert list(results["train_metrics_clientapp"]) == ["1", "2", "3", "4"]
    assert all(np.isfinite(metrics["accuracy"]) for metrics in results["evaluate_metrics_serverapp"].values())


class Simulated(deploy.Federation):  # type: ignore[name-defined, misc]
    """A SuperLink that simulates its nodes."""

    def start_superlink(self) -> None:
        self.environment["RAY_ADDRESS"] = "local"  # else it would join a cluster of other tests
        place = ("--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(self.port))
        self._start("superlink", ["flower-superlink", *place, "--disable-runtime-dependency-installation"])
        deploy.wait_until(lambda: deploy.port_is_open(self.port), "the SuperLink to listen")

    def _write_connection(self) -> None:
        lines = ("[superlink.deployment]", f'address = "127.0.0.1:{self.port}"', "insecure = true")
        (self.folder / "home").mkdir()
        (self.folder / "home" / "config.toml").write_text("\n".join([*lines, "options.num-supernodes = 6", ""]))


def test_the_same_app_runs_in_flowers_simulation(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Simulated(tmp_path / "simulated") as federation:
        federation.start_superlink()
        run = submit(federation, state, 2, **{"min-nodes": 6})
        deploy.wait_until(lambda: len(rows(state)) == 2, "two rounds")
        assert federation.wait_for_run(run) == "finished:completed"
    assert [len(row["sampled"]) for row in rows(state)] == [3, 3]
    assert names_in(rows(state)[0], "sampled") <= set("012345")
