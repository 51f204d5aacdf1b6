"""A Ray cluster: how it is joined or started, what it has, and what it says when something is lost."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from fedsieve.data import Dataset
from fedsieve.errors import InvalidSetting

PATIENCE = 60.0  # seconds that an empty cluster is waited for


def connect(address: str | None) -> None:
    """Join the cluster at `address` (or $RAY_ADDRESS), or start one for this process, which nobody else can reach."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        with _loopback_alone():
            ray.init(address="local", include_dashboard=False, **quiet)
        return
    try:
        host, _, port = address.rpartition(":")
        if host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:120]
        allowed = f"host:port of a running cluster, auto on one of its nodes, or none to start one here ({said})"
        raise InvalidSetting("address", address, allowed) from None


@contextmanager
def _loopback_alone() -> Iterator[None]:
    """Inside, a cluster that is started listens on this machine alone, as Ray does by itself on macOS and Windows."""
    outside = os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        os.environ.pop(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
        if outside[0] is not None:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = outside[0]
        ray_constants.ENABLE_RAY_CLUSTER = outside[1]


def nodes() -> dict[str, dict[str, int]]:
    """The nodes of the cluster and how many cores and GPUs each has."""
    return {
        node["NodeID"]: {kind: int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU")}
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }


def in_memory(dataset: Dataset) -> Dataset:
    """The data set with plain arrays, which all actors of a node read from one place; memory-mapped ones are copied."""
    return Dataset(
        dataset.name,
        np.asarray(dataset.train_inputs),
        np.asarray(dataset.train_labels),
        np.asarray(dataset.test_inputs),
        np.asarray(dataset.test_labels),
        dataset.classes,
        dataset.mean,
        dataset.std,
    )


def reason(error: RayError, line: int = 0) -> str:
    """What happened, in a few words: Ray tells it in many lines, the first of them or the last."""
    lines = [text for text in map(str.strip, str(error).splitlines()) if text]
    return " ".join((lines or [type(error).__name__])[line].split())[:160]
