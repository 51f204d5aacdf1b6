"""Finished runs wherever they lie, as run directories or as records."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedsieve.errors import FedSieveError, InvalidSetting, MissingData
from fedsieve.runs.experiment import History, read_whole
from fedsieve.runs.record import FORMAT, read_record

log = logging.getLogger("fedsieve")


def find_runs(places: Sequence[Path]) -> list[History]:
    """The finished runs in these files and folders and below; the unfinished and damaged are left out with a note."""
    histories = []
    for place in places:
        if not (place.is_dir() or is_record(place)):
            raise InvalidSetting("runs", str(place), "folders of runs, or records of runs")
        for found in _below(place):
            try:
                histories.append(read_record(found) if found.is_file() else read_whole(found))
            except MissingData:
                log.warning("%s is left out: it is not finished", found)
            except (FedSieveError, ValueError, KeyError, TypeError, OSError) as error:
                log.warning("%s is left out: it is damaged (%s)", found, " ".join(str(error).split()))
    return histories


def is_record(path: Path) -> bool:
    """Whether a file says that it is the record of a run."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(100)


def _below(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    yield from sorted(file.parent for file in place.rglob("config.yaml"))
    yield from sorted(filter(is_record, place.rglob("*.json")))
