"""The data sets known by name, and how to open them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from fedsieve.data.dataset import Dataset
from fedsieve.errors import InvalidSetting, MissingData, unknown_name


@dataclass(frozen=True)
class CatalogueEntry:
    """A data set by name: what it holds, and the settings that suit it.

    `shape` is that of one stored example. `megabytes` is what it takes on disk. `sha256` holds one sum per
    stored array, of its bytes in C order; a bundled data set has none, since there is nothing to fetch.
    """

    title: str
    train_examples: int
    test_examples: int
    classes: int
    shape: tuple[int, ...]
    megabytes: float
    model: str
    validation_per_class: int
    batch_size: int
    augment: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def bundled(self) -> bool:
        """Whether the data set is there without fetching."""
        return not self.sha256

    @property
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each stored array, by its name."""
        return {
            "train_inputs": (self.train_examples, *self.shape),
            "train_labels": (self.train_examples,),
            "test_inputs": (self.test_examples, *self.shape),
            "test_labels": (self.test_examples,),
        }


DATASETS: Final[Mapping[str, CatalogueEntry]] = {
    "digits": CatalogueEntry(
        title="Handwritten digits of scikit-learn, 8 × 8",
        train_examples=1442,
        test_examples=355,
        classes=10,
        shape=(1, 8, 8),
        megabytes=0.1,
        model="mlp",
        validation_per_class=20,
        batch_size=16,
        augment=False,
    ),
    "mnist": CatalogueEntry(
        title="MNIST handwritten digits, 28 × 28",
        train_examples=60_000,
        test_examples=10_000,
        classes=10,
        shape=(28, 28),
        megabytes=55,
        model="cnn",
        validation_per_class=100,
        batch_size=64,
        augment=False,
        mean=(0.1307,),
        std=(0.3081,),
        sha256={
            "train_inputs": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "test_inputs": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        },
    ),
    "fashion-mnist": CatalogueEntry(
        title="Fashion-MNIST articles of clothing, 28 × 28",
        train_examples=60_000,
        test_examples=10_000,
        classes=10,
        shape=(28, 28),
        megabytes=55,
        model="cnn",
        validation_per_class=100,
        batch_size=64,
        augment=False,
        mean=(0.2860,),
        std=(0.3530,),
        sha256={
            "train_inputs": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "train_labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
            "test_inputs": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "test_labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        },
    ),
    "cifar10": CatalogueEntry(
        title="CIFAR-10 colour photographs, 32 × 32",
        train_examples=50_000,
        test_examples=10_000,
        classes=10,
        shape=(32, 32, 3),
        megabytes=184,
        model="vgg11",
        validation_per_class=500,
        batch_size=64,
        augment=True,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        sha256={
            "train_inputs": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test_inputs": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
    ),
}


_open: WeakValueDictionary[Path, Dataset] = WeakValueDictionary()  # runs at the same time share what they read


def load(name: str, folder: str | os.PathLike[str] | None = None) -> Dataset:
    """The data set `name`; one that was fetched is memory-mapped from `folder`, else `data_folder()`."""
    entry = entry_of(name)
    if entry.bundled:
        return _digits()
    place = data_folder(folder).absolute() / name
    if (dataset := _open.get(place)) is not None:
        return dataset
    arrays = stored_arrays(name, folder)
    try:
        dataset = Dataset(name, **arrays, classes=entry.classes, mean=entry.mean, std=entry.std)
    except InvalidSetting as error:
        raise _damaged(name, data_folder(folder), str(error)) from error
    return _open.setdefault(place, dataset)


def is_fetched(name: str, folder: str | os.PathLike[str] | None = None) -> bool:
    """Whether `load(name, folder)` finds its arrays, by their presence, types and shapes."""
    if entry_of(name).bundled:
        return True
    try:
        stored_arrays(name, folder)
    except MissingData:
        return False
    return True


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets lie: `folder` if given, else what FEDSIEVE_DATA says, else ~/.cache/fedsieve."""
    return Path(folder or os.environ.get("FEDSIEVE_DATA") or "~/.cache/fedsieve").expanduser()


def entry_of(name: str) -> CatalogueEntry:
    """What the catalogue says about `name`, or the error for an unknown one."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    return DATASETS[name]


def stored_arrays(name: str, folder: str | os.PathLike[str] | None = None) -> dict[str, NDArray[Any]]:
    """The memory-mapped uint8 arrays of a fetched data set, by name and with the shapes of `array_shapes`."""
    root = data_folder(folder)
    place = root / name
    if not place.is_dir():
        where = f"{root}" if root.is_dir() else f"{root}, and there is no such folder"
        raise MissingData(f"dataset {name!r} is not in {where}; fetch it with: {_fetch_command(name, root)}")
    arrays: dict[str, NDArray[Any]] = {}
    for array, shape in entry_of(name).array_shapes.items():
        file = place / f"{array}.npy"
        if not file.is_file():
            raise _damaged(name, root, f"{file.name} is missing")
        try:
            arrays[array] = np.lib.format.open_memmap(file, mode="r")
        except Exception as error:  # NumPy's reader of headers raises errors of many kinds
            reason = " ".join(str(error).split())
            raise _damaged(name, root, f"{file.name}: {reason}") from error
        if arrays[array].shape != shape or arrays[array].dtype != np.uint8:
            found = f"{arrays[array].dtype} {list(arrays[array].shape)}"
            raise _damaged(name, root, f"{file.name} holds {found}, not uint8 {list(shape)}")
    return arrays


def _damaged(name: str, root: Path, reason: str) -> MissingData:
    fetch = _fetch_command(name, root)
    return MissingData(f"dataset {name!r} in {root} is damaged ({reason}); fetch it again with: {fetch}")


def _fetch_command(name: str, root: Path) -> str:
    place = "" if root == data_folder() else f"FEDSIEVE_DATA={shlex.quote(str(root))} "
    return f"{place}fedsieve data fetch {name}"


def _digits() -> Dataset:
    """1,797 images `[1, 8, 8]` in [0, 1]; within each class every fifth example is a test example."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = (bunch.images[:, None] / 16).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return Dataset("digits", inputs[~is_test], labels[~is_test], inputs[is_test], labels[is_test], classes=10)
