"""A run on disk: `config.yaml`, `metrics.jsonl`, `summary.json` and `checkpoints/`.

A round is on disk before the next begins, or at least its row, where `run` is to save less often. Files are written
aside, flushed and renamed, so that a kill at any moment leaves either the old file or the new one. A round's row is
flushed before its checkpoint appears, and a checkpoint's JSON carries the digest of everything in it and is renamed
last: what has it is whole. `files.json` has the digests of files that the configuration names, if it names any, and
`parts.json` the names of parts of the user's own, if there are any.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedsieve.errors import InvalidSetting, MissingData, RunInUse
from fedsieve.locking import locked, made
from fedsieve.runs.config import Config, read_yaml
from fedsieve.vector import Layout

CHECKPOINTS_KEPT = 2
MODEL, SMOOTHED, VELOCITY = "", "smoothed/", "velocity/"  # before the names of tensors: what they are part of
TYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}

log = logging.getLogger("fedsieve")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round: the tensors of its vectors, and what the sampler knows."""

    round: int
    tensors: dict[str, Tensor]
    sampler: dict[str, Any]

    def model(self, layout: Layout) -> Tensor:
        """The flat model [size] that clients go on from."""
        return torch.cat([self.tensors[MODEL + piece.name].reshape(-1) for piece in layout.pieces])

    def beside(self, layout: Layout, kind: str) -> Tensor | None:
        """Another flat vector, SMOOTHED [size] or VELOCITY [parameters], if there is one."""
        parts = [self.tensors[name] for piece in layout.pieces if (name := kind + piece.name) in self.tensors]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else None


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.files_file = self.path / "files.json"
        self.parts_file = self.path / "parts.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.checkpoints = self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config_file.exists()

    @property
    def finished(self) -> bool:
        """Whether the run here came to its end."""
        return self.summary_file.exists()

    @contextmanager
    def sole_writer(self) -> Iterator[None]:
        """Inside, nobody else writes here; raises if somebody does now. Folders made for nothing are removed again."""
        with made(self.path), locked(self.path, wait=False) as is_ours:
            if not is_ours:
                raise RunInUse("out", str(self.path), "a folder that no other run is writing to")
            yield

    def create(self, config: Config, own_parts: Mapping[str, str] = {}) -> None:
        """Begin a run: write its configuration, and before it what files had in them, and own parts."""
        digests = {field: _digest_of(file) for field, file in config.files.items()}
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if digests:
                write_whole(self.files_file, (json.dumps(digests, indent=2) + "\n").encode())
            if own_parts:
                write_whole(self.parts_file, (json.dumps(own_parts, indent=2) + "\n").encode())
            write_whole(self.config_file, config.to_yaml().encode())
        except OSError as error:
            raise InvalidSetting("out", str(self.path), f"a folder that can be written to ({error.strerror})") from None

    def config(self) -> Config:
        """The configuration the run was begun with."""
        if not self.exists:
            raise MissingData(f"out: there is no run in {self.path}")
        fields = read_yaml(self.config_file)
        if lacking := [name for name in ("algorithm", "dataset", "rounds", "clients", "seed") if name not in fields]:
            allowed = f"a whole file, as a run writes it: this one has no {lacking[0]}"
            raise InvalidSetting("config", str(self.config_file), allowed)
        return Config(**fields)

    def own_parts(self) -> dict[str, str]:
        """The names of the user's own parts that the run was begun with."""
        if self.parts_file.exists():
            return _read_json(self.parts_file)
        found: dict[str, str] = self.summary().get("own_parts", {}) if self.finished else {}
        return found

    def check_files(self) -> None:
        """Raise if a file that the configuration names is not as it was when the run began."""
        if not self.files_file.exists():  # as in runs of earlier versions
            return
        digests = _read_json(self.files_file)
        for field, file in self.config().files.items():
            if digests.get(field) != _digest_of(file):
                raise InvalidSetting(field, str(file), f"the file as it was when the run in {self.path} began")

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        if not self.finished:
            raise MissingData(f"out: the run in {self.path} is not finished")
        return _read_json(self.summary_file)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` up to the first that is not whole."""
        if not self.metrics_file.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if not isinstance(row, dict) or row.get("round") != len(rows) + 1:
                break
            rows.append(row)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a round's row and flush it to the disk."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def save(
        self,
        round: int,
        model: Tensor,
        layout: Layout,
        sampler: Mapping[str, Any],
        beside: Mapping[str, Tensor | None] = {},
    ) -> None:
        """Write the state after a round, then drop all but the last two, and what is left of a later one."""
        vectors = {MODEL: model} | {kind: vector for kind, vector in beside.items() if vector is not None}
        content = _safetensors(vectors, layout)
        state = json.loads(json.dumps({"round": round, "sampler": sampler}))  # as it will be read: ids become texts
        write_whole(self._file(round, "safetensors"), *content)
        digest = _digest(state, *content)
        write_whole(self._file(round, "json"), json.dumps(state | {"sha256": digest}).encode())
        there = self._rounds()
        kept = [known for known in there if known <= round][-CHECKPOINTS_KEPT:]
        for other in set(there).difference(kept):
            for suffix in ("json", "safetensors"):
                self._file(other, suffix).unlink(missing_ok=True)

    def latest(self) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
        """The newest checkpoint that is whole, and the rows up to it; what came after is cut off.

        Raises, before anything is cut off, if files that the run reads have changed.
        """
        self.check_files()
        self.checkpoints.mkdir(exist_ok=True)  # someone may have thrown the checkpoints away
        rows = self.rows()
        checkpoint = None
        for round in reversed(self._rounds()):
            problem = None
            try:
                checkpoint = self._read(round)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
                problem = " ".join(str(error).split()) or type(error).__name__
            if checkpoint is not None and len(rows) < round:
                problem, checkpoint = f"metrics.jsonl ends at round {len(rows)}", None
            if checkpoint is not None:
                break
            log.warning("the checkpoint of round %d can't be used (%s); going back to the one before", round, problem)
        rows = rows[: checkpoint.round if checkpoint else 0]
        write_whole(self.metrics_file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        return checkpoint, rows

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary: the run is done."""
        write_whole(self.summary_file, (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())

    def _read(self, round: int) -> Checkpoint:
        content = self._file(round, "safetensors").read_bytes()
        state = json.loads(self._file(round, "json").read_text(encoding="utf-8"))
        if state.pop("sha256", None) != _digest(state, content):
            raise ValueError("damaged: its SHA-256 sum is wrong")
        return Checkpoint(round, load_tensors(content), state["sampler"])

    def _rounds(self) -> list[int]:
        numbers = (file.stem.removeprefix("round-") for file in self.checkpoints.glob("round-*.json"))
        return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())

    def _file(self, round: int, suffix: str) -> Path:
        return self.checkpoints / f"round-{round:06d}.{suffix}"


def write_whole(path: Path, *content: bytes | memoryview) -> None:
    """Write aside, flush, rename: at every moment `path` is absent, as before, or whole."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _safetensors(vectors: Mapping[str, Tensor], layout: Layout) -> list[bytes | memoryview]:
    """Vectors of one type, by what they are, as the parts of a safetensors file: a header, and bytes as they lie.

    The library's own `save` copies every tensor three times, which takes longer than all else a round writes.
    """
    entries, contents, before = {}, list[memoryview](), 0
    for kind, vector in vectors.items():
        width = vector.element_size()
        for piece in layout.pieces:
            if piece.stop <= len(vector):
                entries[kind + piece.name] = {
                    "dtype": TYPES[vector.dtype],
                    "shape": list(piece.shape),
                    "data_offsets": [before + piece.start * width, before + piece.stop * width],
                }
        contents.append(memoryview(vector.detach().cpu().contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type] # NumPy does not say so
        before += len(vector) * width
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *contents]


def _read_json(file: Path) -> dict[str, Any]:
    """What one of a run's files has; one that is damaged is named."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise InvalidSetting("out", str(file), f"a whole file, as a run writes it ({problem})") from None
    return found


def _digest_of(file: Path) -> str | None:
    """The SHA-256 sum of a file; None where there is none, which own parts may have no need of."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _digest(state: Mapping[str, Any], *content: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in (*content, json.dumps(state, sort_keys=True).encode()):
        digest.update(part)
    return digest.hexdigest()
