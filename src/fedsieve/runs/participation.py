"""How a run treated its clients: how evenly it asked them, and how many of the models were theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def requests(rows: Sequence[Mapping[str, Any]], clients: Sequence[int]) -> NDArray[np.int64]:
    """In how many rounds each of the `clients` was asked [n]; drawn twice in a round, it is asked once."""
    counts = Counter(client for row in rows for client in set(row["sampled"]))
    return np.array([counts[client] for client in clients], dtype=np.int64)


def gini(counts: ArrayLike) -> float:
    """The Gini coefficient of counts [n]: 0 if all are equal, (n - 1) / n if one has everything.

    It is the mean difference of two counts, over all n² pairs, divided by twice their mean.
    """
    rising = np.sort(np.asarray(counts, dtype=np.float64))
    n, total = len(rising), rising.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ rising / (n * total)) if total else 0.0


def share_of(clients: Collection[int], rows: Sequence[Mapping[str, Any]], what: str) -> float | None:
    """Which part of all requests (`what` is "sampled") or models kept ("kept") went to or came from these clients."""
    listed = [client for row in rows for client in set(row[what])]
    return sum(client in clients for client in listed) / len(listed) if listed else None
