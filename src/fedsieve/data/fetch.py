"""Bringing a data set into the data folder: whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from fedsieve.data.catalogue import CatalogueEntry, data_folder, entry_of, stored_arrays
from fedsieve.data.sources import SOURCES, Arrays, SourceFailed
from fedsieve.errors import FetchFailed, InvalidSetting, MissingData
from fedsieve.locking import locked

_WORKSPACE: Final = ".fetching-"


class Progress(Protocol):
    """Told how a fetch goes on: the source in use, the bytes that came and, where known, of how many."""

    def __call__(self, source: str, done: int, total: int | None) -> None:
        """Called often, first with 0 bytes when a source is tried."""


def fetch(name: str, folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Brings the data set `name` into `folder` (by default `data_folder()`) and returns where it lies.

    The sources are tried in order; the first whose arrays have the known SHA-256 sums is taken. Until then
    nothing appears under the data set's name, whatever interrupts. Arrays that are there and have the right
    sums are kept, damaged ones are replaced. A bundled data set needs no fetching, and nothing is done.
    """
    entry = entry_of(name)
    root = data_folder(folder)
    if entry.bundled or _is_intact(name, root):
        return root if entry.bundled else root / name
    with _workspace(root, name) as workspace:
        try:
            arrays = _first_good(name, entry, workspace, progress or _silent)
            _store(arrays, workspace, root / name)
        except OSError as error:
            raise FetchFailed(f"dataset {name!r} could not be written to {root}: {error}") from error
    return root / name


def fetch_with_bar(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """`fetch`, with a progress bar on a terminal, else with one line on standard error per source tried."""
    if not sys.stderr.isatty():
        return fetch(name, folder, _Lines(name))
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Bars(text, *columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(name, total=None)

        def show(source: str, done: int, total: int | None) -> None:
            bars.update(bar, description=f"{name} from {source}", completed=done, total=total)

        return fetch(name, folder, show)


class _Lines:
    """Progress as one plain line per source."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shown: set[str] = set()

    def __call__(self, source: str, done: int, total: int | None) -> None:
        if source not in self.shown:
            self.shown.add(source)
            print(f"fetching {self.name} from {source}", file=sys.stderr, flush=True)


def _silent(source: str, done: int, total: int | None) -> None:
    pass


def _first_good(name: str, entry: CatalogueEntry, workspace: Path, progress: Progress) -> Arrays:
    reasons = []
    for source in SOURCES[name]:
        report = partial(progress, source.name)
        files = workspace / "files"
        files.mkdir()
        try:
            report(0, None)
            source.bring(files, report)
            arrays = source.decode(files)
            _verify(arrays, entry)
            return arrays
        except Exception as error:  # whatever is wrong with one source, the next may do
            reasons.append(f"{source.name}: {' '.join(str(error).split()) or type(error).__name__}")
        finally:
            shutil.rmtree(files, ignore_errors=True)
    raise FetchFailed(f"dataset {name!r} could not be fetched ({'; '.join(reasons)})")


def _verify(arrays: Arrays, entry: CatalogueEntry) -> None:
    for array, shape in entry.array_shapes.items():
        if arrays[array].shape != shape:
            raise SourceFailed(f"{array} has shape {list(arrays[array].shape)}, not {list(shape)}")
        found = hashlib.sha256(np.ascontiguousarray(arrays[array]).data).hexdigest()
        if found != entry.sha256[array]:
            raise SourceFailed(f"{array} has another SHA-256 sum, {found[:12]}..., than it should")


def _is_intact(name: str, root: Path) -> bool:
    try:
        _verify(stored_arrays(name, root), entry_of(name))
    except (MissingData, SourceFailed):
        return False
    return True


def _store(arrays: Arrays, workspace: Path, place: Path) -> None:
    """Writes the arrays aside, flushes them to disk, and gives them their place in one step."""
    aside = workspace / "arrays"
    aside.mkdir()
    for array, values in arrays.items():
        with (aside / f"{array}.npy").open("wb") as file:
            np.save(file, np.ascontiguousarray(values), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    _flush_folder(aside)
    if place.exists():
        place.replace(workspace / "damaged")
    aside.replace(place)
    _flush_folder(place.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _workspace(root: Path, name: str) -> Iterator[Path]:
    """A folder for the work of one fetch, on the disk of its result; gone afterwards, with all that is in it.

    Its fetch holds a lock on it, which ends with the process: a workspace that nobody has locked was left
    behind by a fetch that was killed, and is removed.
    """
    workspace = root / f"{_WORKSPACE}{name}"
    with ExitStack() as until_done:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root):
                for leftover in root.glob(f"{_WORKSPACE}*"):
                    with locked(leftover, wait=False) as is_ours:
                        if is_ours:
                            shutil.rmtree(leftover)
                if workspace.exists():
                    raise FetchFailed(f"dataset {name!r} is being fetched into {root} by another process")
                workspace.mkdir()
                until_done.enter_context(locked(workspace))
        except OSError as error:
            raise InvalidSetting("data_folder", str(root), "a folder that can be written to") from error
        try:
            yield workspace
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
