"""Clients and runs on a real Ray cluster: two nodes on this machine, with faults."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Typed
from torch import Tensor, nn

import fedsieve as fs
from fedsieve.clients import draw_crops_and_flips
from fedsieve.engines import ray_cluster
from fedsieve.engines.base import Models
from fedsieve.engines.ray import RayEngine
from fedsieve.errors import ClusterLost, InvalidSetting
from fedsieve.runs import assemble, pretrain_favor, run_many
from fedsieve.sampling import FavorSampler

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)

KEPT = ("round", "sampled", "kept", "coefficients", "score", "test_accuracy", "test_loss", "train_loss", "excluded")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes can't import this file
    yield made
    ray.shutdown()
    made.shutdown()  # type: ignore[no-untyped-call]


def config(**changes: Any) -> fs.Config:
    settings: dict[str, Any] = {"dataset": "digits", "rounds": 3, "batch_size": 16, "lr": 0.05, "clients": 10}
    return fs.Config(**settings | changes)


def told(history: fs.History) -> list[dict[str, Any]]:
    return [{name: row[name] for name in KEPT} for row in history.rows]


def same(one: fs.History, other: fs.History) -> None:
    assert told(one) == told(other)
    assert one.model is not None and other.model is not None and torch.equal(one.model, other.model)


def workers(name: str = "ray::RayWorker") -> list[int]:
    """The processes of actors or tasks."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_text().startswith(name):
                found.append(int(folder.name))
        except OSError:
            pass
    return sorted(found)


def a_worker() -> int:
    """The process of an actor, which may just be taking its name."""
    until = time.monotonic() + 30
    while not (found := workers()) and time.monotonic() < until:
        time.sleep(0.05)
    return found[0]


def on_the_cluster() -> bool:
    return "ray::" in Path("/proc/self/cmdline").read_text()


class Slow(nn.Module):
    """Takes its time over every step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.005)
        outputs: Tensor = self.linear(inputs.flatten(1))
        return outputs


def wait_for(count: int) -> None:
    """Until so many actors are there and have had time to start."""
    until = time.monotonic() + 30
    while len(workers()) < count and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(2)


def soon(what: Callable[[], object], seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, what)
    timer.daemon = True
    timer.start()
    return timer


def listening(mark: str) -> list[str]:
    """Where processes with this in their environment wait for connections."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() not in (process / "environ").read_bytes():
                continue
            for file in (process / "fd").iterdir():
                with suppress(OSError):
                    sockets.add(str(file.readlink()))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]


def test_a_cluster_started_here_listens_on_this_machine_alone() -> None:
    script = (
        "from fedsieve.engines.ray_cluster import connect\nconnect(None)\nprint('connected', flush=True)\ninput()\n"
    )
    mark = f"started by {os.getpid()} at {time.time_ns()}"
    environment = os.environ | {"RAY_ADDRESS": "", "FEDSIEVE_TEST": mark}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "connected\n"
        time.sleep(1)
        found = listening(mark)
        driver.communicate("\n")
    assert len(found) >= 3
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
    assert [address for address in found if not address.startswith(loopback)] == []


@pytest.mark.parametrize("actors", [None, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "fedavg"},
        {"algorithm": "fedcm-ts", "score": "cross-entropy"},
        {"algorithm": "fedca", "scored_by": "weights", "ratio": 0.3},
        {"algorithm": "fedcm-ucb", "attack": "inner-product", "hostile": 0.3},
        {"algorithm": "fedsieve", "precision": "bf16"},
    ],
    ids=lambda settings: str(settings["algorithm"]),
)
def test_a_cluster_does_what_one_machine_does(cluster: Cluster, settings: dict[str, Any], actors: int | None) -> None:
    there = fs.run(config(engine="ray", actors=actors, **settings))
    same(fs.run(config(**settings)), there)
    until = time.monotonic() + 10
    while workers() and time.monotonic() < until:
        time.sleep(0.1)
    assert not workers()  # they are let go of


def test_a_sampler_that_looks_at_models_sees_those_of_one_machine(cluster: Cluster) -> None:
    agent = pretrain_favor(config(), 1, 0.9).agent
    same(fs.run(config(), sampler=FavorSampler(agent)), fs.run(config(engine="ray"), sampler=FavorSampler(agent)))


def test_models_stay_where_they_were_trained(cluster: Cluster) -> None:
    _, local = assemble(config(augment=True))
    _, engine = assemble(config(engine="ray", augment=True))
    assert isinstance(engine, RayEngine) and engine.augments and local.augments
    start = engine.initial_model()
    updates = engine.train(start, [7, 2, 5, 0], round=1)
    reference = local.train(start, [7, 2, 5, 0], round=1)
    assert [update.client for update in updates] == [7, 2, 5, 0]
    assert {actor.place.node for actor in engine._holder.values()} == {actor.place.node for actor in engine._actors}
    assert torch.equal(engine.logits(Models(updates), "validation"), local.logits(Models(reference), "validation"))
    for one, other in zip(updates, reference, strict=True):
        assert one.model is not None and other.model is not None and torch.equal(one.model, other.model)
        assert one.loss == other.loss and one.problem(start) is None
    given, crops = torch.arange(40), draw_crops_and_flips(np.random.default_rng(0), 40)
    for more in ((), (crops,)):
        score, gradient = engine.score_and_gradient(start, given, *more)
        expected, slope = local.score_and_gradient(start, given, *more)
        assert float(score) == pytest.approx(float(expected)) and torch.equal(gradient, slope)
    for examples in (None, 5):
        losses = engine.local_losses(start, [7, 2, 5], 1, examples)
        assert losses.tolist() == local.local_losses(start, [7, 2, 5], 1, examples).tolist()
    engine.close()


def test_who_is_slow_gets_less_to_do(cluster: Cluster) -> None:
    _, engine = assemble(config(engine="ray", heterogeneity="iid", clients=8))
    assert isinstance(engine, RayEngine)
    quick, slow = engine._living()
    assert sorted(map(len, engine._share_out(range(8), []).values())) == [4, 4]
    quick.pace, slow.pace = 0.001, 0.003
    shares = engine._share_out(range(8), [])
    assert (len(shares[quick]), len(shares[slow])) == (6, 2)
    shares = engine._share_out(range(8), [(client, quick) for client in range(5)])
    assert shares[slow] == [0, 1, 2, 3, 4] and shares[quick] == [5, 6, 7]
    engine.close()


class Mortal(nn.Module):
    """Kills the first process on the cluster that trains it, or already the first that makes one."""

    def __init__(self, marker: Path, at_once: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.marker = marker
        if at_once:
            self.die_once()

    def die_once(self) -> None:
        if on_the_cluster():
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.die_once()
        outputs: Tensor = self.linear(inputs.flatten(1))
        return outputs


@pytest.mark.parametrize("at_once", [False, True], ids=["while it trains", "while it starts"])
def test_an_actor_that_dies_changes_nothing(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    settings = config(clients=8, ratio=1.0, rounds=2, local_epochs=1, algorithm="fedca")
    marker = tmp_path / "died"

    def build() -> nn.Module:
        return Mortal(marker, at_once)

    with caplog.at_level(logging.WARNING, "fedsieve"):
        there = fs.run(settings.model_copy(update={"engine": "ray"}), model=build)
    assert marker.exists() and caplog.text.count("a Ray actor is lost") == 1
    same(fs.run(settings, model=build), there)


def test_models_that_were_lost_are_trained_again(cluster: Cluster) -> None:
    _, local = assemble(config())
    _, engine = assemble(config(engine="ray"))
    start = engine.initial_model()
    updates = engine.train(start, [1, 2, 3, 4], round=1)
    os.kill(a_worker(), signal.SIGKILL)
    expected = local.logits(Models(local.train(start, [1, 2, 3, 4], round=1)), "validation")
    assert torch.equal(engine.logits(Models(updates), "validation"), expected)
    os.kill(a_worker(), signal.SIGKILL)
    again = engine.train(start, [5, 6], round=2)
    assert [update.problem(start) for update in again] == [None, None]
    engine.close()


def test_a_node_lost_in_the_middle_of_a_round_changes_nothing(cluster: Cluster) -> None:
    settings = config(clients=9, ratio=1.0, rounds=2, local_epochs=4)
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    class Unplug(fs.Callback):
        def on_start(self, config: fs.Config, done: int) -> None:
            wait_for(3)
            soon(lambda: cluster.remove_node(node), 0.5)  # type: ignore[no-untyped-call]

    there = fs.run(settings.model_copy(update={"engine": "ray"}), model=Slow, callbacks=[Unplug()])
    same(fs.run(settings, model=Slow), there)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 3


class Hungry(nn.Module):
    """In the first process that makes one there is hardly any memory left, which every step needs."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**27, resource.RLIM_INFINITY))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            torch.empty(2**28, dtype=torch.uint8)
        outputs: Tensor = self.linear(inputs.flatten(1))
        return outputs


def test_an_actor_without_memory_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    settings = config(clients=4, ratio=1.0, rounds=2, local_epochs=1)
    marker = tmp_path / "taken"

    def build() -> nn.Module:
        return Hungry(marker if on_the_cluster() else Path(os.devnull))

    there = fs.run(settings.model_copy(update={"engine": "ray"}), model=build)
    assert marker.exists()
    same(fs.run(settings, model=build), there)
    assert all(not row["excluded"] for row in there.rows)


class Deadly(nn.Module):
    """Kills the process that trains it on a certain client's data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and bool((inputs.flatten(1)[:, 0] == 7.0).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        outputs: Tensor = self.linear(inputs.flatten(1))
        return outputs


def test_a_client_that_kills_its_actor_is_found_and_left_out(cluster: Cluster) -> None:
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(240, 64)).astype(np.float32), np.repeat(np.arange(10), 24)
    settings = config(clients=4, ratio=1.0, rounds=1, heterogeneity="iid", validation_per_class=2, algorithm="fedavg")
    data = fs.data.Dataset.from_arrays(inputs, labels, inputs, labels)
    _, partition = fs.runs.assembly.split_data(settings, data)
    inputs[partition[2], 0] = 7.0
    there = fs.run(settings.model_copy(update={"engine": "ray"}), model=Deadly, dataset=data)
    assert there.rows[0]["kept"] == [0, 1, 3]
    assert there.rows[0]["excluded"] == {"2": "lost its Ray actor 4 times"}


def test_a_cluster_that_shrinks_to_nothing_is_said_and_gone_on_with(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(rounds=4)

    class Unplug(fs.Callback):
        def on_round(self, row: Any) -> None:
            if row["round"] == 2:
                monkeypatch.setattr(ray_cluster, "PATIENCE", 4.0)
                for node in list(cluster.worker_nodes):
                    cluster.remove_node(node)  # type: ignore[no-untyped-call]

    with pytest.raises(ClusterLost, match=r"no Ray actor could be had for 4 s.*--resume goes on") as caught:
        fs.run(settings.model_copy(update={"engine": "ray"}), out=tmp_path, callbacks=[Unplug()])
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    there = fs.run(settings.model_copy(update={"engine": "ray"}), out=tmp_path, resume=True)
    same(fs.run(settings), there)


def test_an_actor_that_cannot_start_says_why(cluster: Cluster) -> None:
    def build() -> nn.Module:
        if on_the_cluster():
            raise ModuleNotFoundError("no module named secret")
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    with pytest.raises(ClusterLost, match=r"can't start: .*no module named secret"):
        fs.run(config(engine="ray"), model=build)


def test_more_actors_than_cores_are_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidSetting, match="actors: 9 is not allowed; use 1 to 2, the CPUs of the cluster"):
        assemble(config(engine="ray", actors=9))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [({"device": "cuda"}, "auto or cpu: the cluster has no GPU"), ({"precision": "tf32"}, "fp32 or bf16 where no GPU")],
)
def test_what_only_a_gpu_can_do_is_refused(cluster: Cluster, settings: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidSetting, match=allowed):
        assemble(config(engine="ray", **settings))


def grid(folder: Path, **changes: Any) -> dict[Path, fs.Config]:
    return {
        folder / f"{algorithm}-{seed}": config(algorithm=algorithm, seed=seed, **changes)
        for algorithm in ("fedavg", "fedcm-ucb")
        for seed in range(3)
    }


def test_runs_on_a_cluster_are_those_of_one_machine_whatever_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    expected = run_many(grid(tmp_path / "here", rounds=8))
    stop = threading.Event()
    killed: list[int] = []

    def kill_now_and_then() -> None:
        seen = 0
        while len(killed) < 2 and not stop.wait(0.02):
            done = sum(path.read_text().count("\n") for path in (tmp_path / "there").rglob("metrics.jsonl"))
            if done < seen + 3:  # by rounds, not by time: a slow machine gets somewhere, a quick one is hit
                continue
            for process in workers("ray::_run_there")[:1]:
                with suppress(ProcessLookupError):  # its run has just ended
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)
                    seen = done

    thread = threading.Thread(target=kill_now_and_then, daemon=True)
    thread.start()
    events: list[tuple[Path, Any]] = []
    done: list[Path] = []
    try:
        found = run_many(
            grid(tmp_path / "there", rounds=8, engine="ray"),
            when_done=lambda folder, history: done.append(folder),
            watch=lambda folder, event: events.append((folder, event)),
        )
    finally:
        stop.set()
        thread.join()
    assert killed
    assert [told(one) for one in found.values()] == [told(one) for one in expected.values()]
    assert len(done) == 6 and sum(event["state"] == "done" for _, event in events) == 6
    assert any(event.get("round", 0) > 3 and 0 < event["accuracy"] < 1 for _, event in events if "accuracy" in event)
    assert not list(tmp_path.rglob(".driver-*"))
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    again = run_many(grid(tmp_path / "there", rounds=8, engine="ray"))
    assert [told(one) for one in again.values()] == [told(one) for one in expected.values()]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == stamps  # not run again


def test_runs_are_fetched_back_where_no_files_are_shared(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "touch", lambda *given, **more: None)  # nodes don't see the driver's sign
    found = run_many(dict(list(grid(tmp_path / "there", engine="ray", actors=1).items())[:2]))
    monkeypatch.undo()
    expected = run_many(dict(list(grid(tmp_path / "here").items())[:2]))
    assert [told(one) for one in found.values()] == [told(one) for one in expected.values()]
    here, there = (
        sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*"))
        for name in ("here", "there")
    )
    assert here == there


def test_a_killed_driver_leaves_a_run_to_go_on_with(tmp_path: Path, typed: Typed) -> None:
    words = ["run", "--rounds", "12", "--clients", "10", "--seed", "3", "--out", str(tmp_path / "run")]
    driver = subprocess.Popen(
        [sys.executable, "-c", "from fedsieve.cli import main; main()", *words, "--engine", "ray", "--actors", "1"],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RAY_ADDRESS": ""},
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    with suppress(ProcessLookupError):  # Ray's agents outlive a driver that had no time to end them
        os.killpg(driver.pid, signal.SIGKILL)
    assert 3 <= metrics.read_text().count("\n") < 12
    status, printed, _ = typed(*words, "--resume", "--engine", "workers")
    assert status == 0 and "12 rounds" in printed
    undisturbed = fs.run(fs.Config(rounds=12, clients=10, seed=3))
    assert told(fs.runs.load(tmp_path / "run")) == told(undisturbed)


def test_without_ray_one_line_says_how_to_get_it(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fedsieve.engines.ray")
    status, _, said = typed("run", "--engine", "ray", "--rounds", "1")
    assert status == 2 and said.count("\n") == 1
    assert "engine: 'ray' is not allowed" in said and "pip install 'fedsieve[ray]'" in said


def test_an_address_where_nothing_is(typed: Typed) -> None:
    if ray.is_initialized():
        ray.shutdown()
    status, _, said = typed("run", "--engine", "ray", "--address", "127.0.0.1:1", "--rounds", "1")
    assert status == 2 and said.startswith("error: address: '127.0.0.1:1' is not allowed; use host:port of a running")
