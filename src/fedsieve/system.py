"""A model of the clients' devices: how fast they compute and send, when they can be reached, and when they drop out.

With it a round has a simulated time, which methods that look at time can look at, and a number of bytes sent. All draws
follow from the run's seed; nothing depends on the machine that simulates.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsieve.errors import InvalidSetting, MissingData
from fedsieve.randomness import keys

Seconds = NDArray[np.float64]

COLUMNS = ("client", "examples_per_second", "download_mbit", "upload_mbit", "availability", "dropout")

SPEED, DOWNLOAD, UPLOAD = 100.0, 20.0, 5.0  # medians: examples a second, Mbit a second
SPREAD = 0.8  # of their logarithms: one device in ten is three times as fast or slow as the median
AVAILABILITY = (8.0, 2.0)  # a Beta distribution, mean 0.8
DROPOUT = 0.05
BYTES_PER_MBIT = 1e6 / 8

LEAST, MOST = 1e-6, 1e12  # a trace's speeds and bandwidths, with which no time is infinite


@dataclass(frozen=True)
class SystemModel:
    """What each of the `clients` [n], in rising order, has: arrays [n].

    `speed` in examples a second, `download` and `upload` in bytes a second; `availability` is the share of rounds in
    which a client can be reached, `dropout` of those in which it is asked and never answers.
    """

    seed: int
    clients: NDArray[np.int64]
    speed: NDArray[np.float64]
    download: NDArray[np.float64]
    upload: NDArray[np.float64]
    availability: NDArray[np.float64]
    dropout: NDArray[np.float64]

    @classmethod
    def drawn(cls, seed: int, clients: NDArray[np.int64]) -> SystemModel:
        """Log-normal speeds and bandwidths, availability from a Beta distribution; each client's own draws."""
        from scipy.special import betaincinv, ndtri

        clients = np.sort(clients)

        def log_normal(what: str, median: float) -> NDArray[np.float64]:
            values: NDArray[np.float64] = median * np.exp(SPREAD * ndtri(keys(seed, what, 0, clients)))
            return values

        return cls(
            seed,
            clients,
            speed=log_normal("compute speed", SPEED),
            download=log_normal("download", DOWNLOAD * BYTES_PER_MBIT),
            upload=log_normal("upload", UPLOAD * BYTES_PER_MBIT),
            availability=betaincinv(*AVAILABILITY, keys(seed, "how available", 0, clients)),
            dropout=np.full(len(clients), DROPOUT),
        )

    @classmethod
    def from_trace(cls, path: Path, seed: int, clients: NDArray[np.int64]) -> SystemModel:
        """From a CSV file with a line per client and the columns of `COLUMNS`."""
        rows, clients = _read(path), np.sort(clients)
        if missing := [client for client in clients.tolist() if client not in rows]:
            raise InvalidSetting("system", str(path), f"a trace with a line for every client; {missing[0]} has none")
        table = np.array([rows[client] for client in clients.tolist()]).reshape(-1, 5).T
        system = cls(seed, clients, table[0], table[1] * BYTES_PER_MBIT, table[2] * BYTES_PER_MBIT, table[3], table[4])
        if not system.may_answer.any():
            can = "that can be reached (availability above 0) and answers (dropout below 1)"
            raise InvalidSetting("system", str(path), f"a trace with at least one client {can}")
        return system

    @property
    def may_answer(self) -> NDArray[np.bool_]:
        """Which clients [n] can be reached in some rounds and don't always drop out."""
        return (self.availability > 0) & (self.dropout < 1)

    def least_deadline(self, examples: NDArray[np.int64], model_bytes: int, have_model: bool) -> float:
        """Seconds without which nobody ever answers in time, where clients train on so many `examples` [n].

        Those who `have_model` when they are asked need not get it.
        """
        download, training, upload = self.parts(self.clients, examples, model_bytes)
        needed = training + upload if have_model else download + training + upload
        return float(needed[self.may_answer].min())

    def seconds(self, clients: NDArray[np.int64], examples: NDArray[np.int64], model_bytes: int) -> Seconds:
        """How long clients [k] take to get a model, train on so many `examples` [k], and send a model back [k]."""
        download, training, upload = self.parts(clients, examples, model_bytes)
        return download + training + upload

    def parts(
        self, clients: NDArray[np.int64], examples: NDArray[np.int64], model_bytes: int
    ) -> tuple[Seconds, Seconds, Seconds]:
        """The same apart: download, training and upload [k]."""
        at = self._at(clients)
        return model_bytes / self.download[at], examples / self.speed[at], model_bytes / self.upload[at]

    def available(self, round: int, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the clients that can be reached in a round."""
        at = self._at(clients)
        return clients[keys(self.seed, "availability", round, clients) < self.availability[at]]

    def dropped(self, round: int, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the clients that never answer when they are asked in a round."""
        return clients[keys(self.seed, "dropout", round, clients) < self.dropout[self._at(clients)]]

    def _at(self, clients: NDArray[np.int64]) -> NDArray[np.intp]:
        return np.searchsorted(self.clients, clients)


def _read(path: Path) -> dict[int, list[float]]:
    """The numbers of each client."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel begins a file with a mark
            reader = csv.DictReader(file)
            if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
                allowed = f"a header with {', '.join(COLUMNS)}, commas between; it lacks {', '.join(missing)}"
                raise InvalidSetting("system", f"line 1 of {path.name}", allowed)
            lines = [(reader.line_num, line) for line in reader]
    except FileNotFoundError:
        raise MissingData(f"system: there is no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidSetting("system", str(path), f"a readable CSV file ({error})") from None
    rows: dict[int, list[float]] = {}
    for number, line in lines:
        where = f"line {number} of {path.name}"
        if None in line:  # where DictReader puts what no column is for
            raise InvalidSetting("system", where, "no more values than the header has columns")
        try:
            named, values = line[COLUMNS[0]], [float(line[column]) for column in COLUMNS[1:]]
        except (TypeError, ValueError):
            raise InvalidSetting("system", where, f"numbers {', '.join(COLUMNS)}") from None
        try:
            client = int(named)
        except (TypeError, ValueError):
            raise InvalidSetting("system", f"{where}: client {named}", "a whole number for each client") from None
        if client in rows:
            raise InvalidSetting("system", f"{where}: client {client}", "one line for each client")
        if not (all(LEAST <= speed <= MOST for speed in values[:3]) and all(0 <= share <= 1 for share in values[3:])):
            allowed = f"speeds from {LEAST:g} to {MOST:g}, and availability and dropout from 0 to 1"
            raise InvalidSetting("system", where, allowed)
        rows[client] = values
    return rows
