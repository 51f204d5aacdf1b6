"""What a sampler remembers of clients, by id: only those it knows something of are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsieve.sampling.base import Ids


class Ledger:
    """One row per client, sorted by id: `clients` [n], and a column [n] of numbers under each name."""

    def __init__(self, *columns: str) -> None:
        self.clients: Ids = np.empty(0, dtype=np.int64)
        self.columns = {name: np.empty(0) for name in columns}

    def known(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of `ids` [m] have a row."""
        return self._find(ids)[1]

    def read(self, name: str, ids: Ids, missing: float) -> NDArray[np.float64]:
        """The numbers [m] of `ids` [m] in one column, `missing` for those without a row."""
        if np.array_equal(ids, self.clients):
            return self.columns[name].copy()
        at, known = self._find(ids)
        values = np.full(ids.size, missing, dtype=np.float64)
        values[known] = self.columns[name][at[known]]
        return values

    def write(self, ids: Ids, **values: NDArray[np.float64] | float) -> None:
        """Set columns of `ids` [m], sorted and each once; a new row has 0 in columns that are not named."""
        new = ids[~self.known(ids)]
        if new.size:
            at = np.searchsorted(self.clients, new)
            self.clients = np.insert(self.clients, at, new)
            self.columns = {name: np.insert(column, at, 0.0) for name, column in self.columns.items()}
        at = np.searchsorted(self.clients, ids)
        for name, value in values.items():
            self.columns[name][at] = value

    def state_dict(self) -> dict[str, Any]:
        """Client ids and one list per column."""
        return {"clients": self.clients.tolist(), **{name: column.tolist() for name, column in self.columns.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.clients = np.array(state["clients"], dtype=np.int64)
        self.columns = {name: np.array(state[name], dtype=np.float64) for name in self.columns}

    def _find(self, ids: Ids) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Where the rows of `ids` [m] are or would be, and which of them there are."""
        at = np.searchsorted(self.clients, ids)
        found = at < self.clients.size
        found[found] = self.clients[at[found]] == ids[found]
        return at, found


def of_clients(values: Mapping[int, float]) -> tuple[Ids, NDArray[np.float64]]:
    """The ids [n] in `values`, sorted, and their numbers [n], without those that are not finite."""
    ids = np.array(sorted(values), dtype=np.int64)
    numbers = np.array([values[client] for client in ids.tolist()], dtype=np.float64)
    usable = np.isfinite(numbers)
    return ids[usable], numbers[usable]
