"""Flower's arrays of a model as one flat vector, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedsieve.errors import InvalidSetting
from fedsieve.vector import Layout, Piece, Vectors


@dataclass(frozen=True)
class ArrayLayout:
    """Where each array of a record lies in a vector [size].

    `keys` are the record's names in its own order, `dtypes` their types; `places` are positions in `layout.pieces`.
    """

    layout: Layout
    keys: tuple[str, ...]
    dtypes: tuple[np.dtype[np.generic], ...]
    places: tuple[int, ...]
    memory: Vectors = field(default_factory=Vectors, repr=False, compare=False)

    @classmethod
    def of(cls, record: ArrayRecord, module: Layout | None = None, state: Mapping[str, str] = {}) -> ArrayLayout:
        """The layout of a record's arrays: that of the `module` they belong to, or floats and then whole numbers.

        Arrays go by the names in `state`, the module's `piece_names`, or, where they have others, by their order there.
        Without a module all floats count as trained.
        """
        keys, arrays = tuple(record), list(record.values())
        shapes = [tuple(array.shape) for array in arrays]
        dtypes = tuple(np.dtype(array.dtype) for array in arrays)
        if module is None:
            floats_first = sorted(range(len(keys)), key=lambda number: dtypes[number].kind != "f")
            pieces, size, trained = list[Piece](), 0, 0
            for number in floats_first:
                pieces.append(Piece(keys[number], shapes[number], size, size + math.prod(shapes[number])))
                size = pieces[-1].stop
                trained = size if dtypes[number].kind == "f" else trained
            wide = any(dtype == np.float64 for dtype in dtypes)
            layout = Layout(tuple(pieces), trained, size, torch.float64 if wide else torch.float32)
            return cls(layout, keys, dtypes, tuple(np.argsort(floats_first).tolist()))
        by_name = {piece.name: place for place, piece in enumerate(module.pieces)}
        places = tuple(by_name[state[key]] for key in (keys if set(state) == set(keys) else state))
        expected = [module.pieces[place].shape for place in places]
        if shapes != expected:
            raise InvalidSetting("initial_arrays", _first_difference(keys, shapes, expected), "the model's arrays")
        return cls(module, keys, dtypes, places)

    def read(self, record: ArrayRecord) -> Tensor:
        """The arrays of a record as a vector [size]; raises ValueError with the reason where they don't fit."""
        if set(record) != set(self.keys):
            different = sorted(set(record) ^ set(self.keys))
            raise ValueError(f"arrays {', '.join(different[:3])} are missing or too many")
        vector = self.memory.empty(self.layout.size, self.layout.dtype)
        flat = vector.numpy()
        for key, place in zip(self.keys, self.places, strict=True):
            piece = self.layout.pieces[place]
            try:
                values = _view(record[key])
            except Exception as error:  # clients send what they like, and NumPy raises a dozen types
                raise ValueError(f"array {key} can't be read: {str(error) or type(error).__name__}") from None
            if values.shape != piece.shape:
                raise ValueError(f"array {key} has shape {values.shape}, expected {piece.shape}")
            with np.errstate(all="ignore"):  # what is too large becomes infinity, which is seen later
                np.copyto(flat[piece.start : piece.stop], values.reshape(-1), casting="unsafe")
        return vector

    def write(self, vector: Tensor) -> ArrayRecord:
        """A vector [size] as a record of arrays of the types they had."""
        record = ArrayRecord()
        for key, dtype, place in zip(self.keys, self.dtypes, self.places, strict=True):
            piece = self.layout.pieces[place]
            values = vector[piece.start : piece.stop].detach().cpu().view(piece.shape).numpy()
            record[key] = Array(np.asarray((values if dtype.kind == "f" else np.rint(values)).astype(dtype)))
        return record


def piece_names(module: nn.Module) -> dict[str, str]:
    """For each name in a module's state dictionary that of the piece it is; layers may share one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}


def _view(array: Array) -> np.ndarray[Any, Any]:
    """What an array holds, where it lies: `Array.numpy` would copy it."""
    if array.stype != "numpy.ndarray":
        raise TypeError(f"it is kept as {array.stype}")
    file = BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    if dtype.kind not in "fiub":
        raise TypeError(f"it holds {dtype}")
    count = int(np.prod(shape, dtype=np.int64))
    values = np.frombuffer(array.data, dtype, count, file.tell())
    return values.reshape(shape, order="F" if by_columns else "C")


def _first_difference(keys: tuple[str, ...], shapes: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> str:
    if len(shapes) != len(expected):
        return f"{len(shapes)} arrays for {len(expected)}"
    key, given, wanted = next(
        (key, one, other) for key, one, other in zip(keys, shapes, expected, strict=True) if one != other
    )
    return f"{key} {given} for {wanted}"
