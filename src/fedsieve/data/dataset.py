"""What a model learns from: training and test examples as arrays, and how they look to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples with their labels.

    Inputs are uint8 images `[n, height, width]` or `[n, height, width, channels]`, which `prepare` scales and
    normalises, or floats `[n, ...]`, which a model sees as they are. Labels are integers `[n]` from 0 to
    `classes - 1`, of any integer type. `mean` and `std` are per channel, for pixels in [0, 1]. Arrays may be
    memory-mapped: only the labels are read when a data set is made.
    """

    name: str
    train_inputs: NDArray[Any]
    train_labels: NDArray[np.integer[Any]]
    test_inputs: NDArray[Any]
    test_labels: NDArray[np.integer[Any]]
    classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise InvalidSetting("classes", self.classes, "a whole number of at least 1")
        _check_inputs("train_inputs", self.train_inputs)
        _check_inputs("test_inputs", self.test_inputs)
        check_labels("train_labels", self.train_labels, self.classes)
        check_labels("test_labels", self.test_labels, self.classes)
        _check_lengths("train_labels", self.train_inputs, self.train_labels)
        _check_lengths("test_labels", self.test_inputs, self.test_labels)
        train, test = _kind(self.train_inputs), _kind(self.test_inputs)
        if train != test:
            raise InvalidSetting("test_inputs", test, f"what train_inputs has, {train}")
        self._check_normalisation()

    @classmethod
    def from_arrays(
        cls,
        train_inputs: ArrayLike,
        train_labels: ArrayLike,
        test_inputs: ArrayLike,
        test_labels: ArrayLike,
        classes: int | None = None,
        name: str = "arrays",
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> Dataset:
        """Your own data: inputs `[n, ...]` and labels `[n]` for training and test, in the forms of `Dataset`.

        Without `classes`, there are as many as the highest label says. uint8 images are scaled to [0, 1], and
        normalised when `mean` and `std` are given.

        >>> rows = np.zeros((4, 3), dtype=np.float32)
        >>> Dataset.from_arrays(rows, [0, 1, 2, 1], rows, [0, 0, 1, 2]).classes
        3
        """
        train_inputs, train_labels = _native(train_inputs), _native(train_labels)
        test_inputs, test_labels = _native(test_inputs), _native(test_labels)
        if classes is None:
            check_labels("train_labels", train_labels)
            check_labels("test_labels", test_labels)
            classes = 1 + max(int(train_labels.max()), int(test_labels.max()))
        return cls(name, train_inputs, train_labels, test_inputs, test_labels, classes, mean, std)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example as a model sees it: `(channels, height, width)` for images, else as stored."""
        stored = self.train_inputs.shape[1:]
        if self.train_inputs.dtype != np.uint8:
            return stored
        return (1, *stored) if len(stored) == 2 else (stored[2], stored[0], stored[1])

    def prepare(self, inputs: NDArray[Any]) -> torch.Tensor:
        """Stored inputs `[n, ...]` as a model sees them: float32 `[n, *input_shape]`, a copy."""
        return self.normalise(torch.from_numpy(np.array(inputs)))

    def normalise(self, stored: torch.Tensor) -> torch.Tensor:
        """The same for stored inputs that lie in a tensor, on its device; floats may be given back as they are."""
        if stored.dtype != torch.uint8:
            return stored.to(torch.float32)
        images = stored.unsqueeze(1) if stored.ndim == 3 else stored.permute(0, 3, 1, 2)
        pixels = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        if self.mean is not None and self.std is not None:
            mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            pixels.sub_(mean).div_(std)
        return pixels

    def _check_normalisation(self) -> None:
        if self.mean is None and self.std is None:
            return
        if self.train_inputs.dtype != np.uint8:
            raise InvalidSetting("mean", self.mean, "None: float inputs are used as they are")
        channels = self.input_shape[0]
        for field, values in (("mean", self.mean), ("std", self.std)):
            if values is None or len(values) != channels or not np.isfinite(values).all():
                raise InvalidSetting(field, values, f"{channels} finite numbers, one per channel, or neither")
        if self.std is not None and min(self.std) <= 0:
            raise InvalidSetting("std", self.std, "numbers above 0")


def check_labels(field: str, labels: NDArray[Any], classes: int | None = None) -> None:
    """Refuses anything but integer labels `[n]` from 0, up to `classes - 1` where that is given."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0:
        raise InvalidSetting(field, f"{labels.dtype} {list(labels.shape)}", "integers [n], at least one")
    allowed = "labels from 0 up" if classes is None else f"labels 0 to {classes - 1}"
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        raise InvalidSetting(field, lowest, allowed)
    if classes is not None and highest >= classes:
        raise InvalidSetting(field, highest, allowed)


def _check_inputs(field: str, inputs: NDArray[Any]) -> None:
    given = f"{inputs.dtype} {list(inputs.shape)}"
    is_image = inputs.dtype == np.uint8 and inputs.ndim in (3, 4)
    is_float = inputs.dtype.kind == "f" and inputs.ndim >= 2
    if not (is_image or is_float):
        raise InvalidSetting(field, given, "uint8 images [n, h, w] or [n, h, w, c], or floats [n, ...]")
    if inputs.size == 0:
        raise InvalidSetting(field, given, "at least one example with at least one value")


def _check_lengths(field: str, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
    if len(labels) != len(inputs):
        raise InvalidSetting(field, f"{len(labels)} labels", f"as many labels as inputs, {len(inputs)}")


def _kind(inputs: NDArray[Any]) -> str:
    form = "uint8 images" if inputs.dtype == np.uint8 else "floats"
    return f"{form} [n, {', '.join(map(str, inputs.shape[1:]))}]"


def _native(values: ArrayLike) -> NDArray[Any]:
    """An array in this machine's byte order: PyTorch takes no other, and files may be written in it."""
    array = np.asarray(values)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
