"""Data sets by name: bundled ones, fetched ones, missing and damaged ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedsieve.data import DATASETS, data_folder, is_fetched, load
from fedsieve.errors import InvalidSetting, MissingData


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with an MNIST of 30 training and 20 test images."""
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], train_examples=30, test_examples=20))
    (tmp_path / "mnist").mkdir()
    for part, examples in (("train", 30), ("test", 20)):
        images = np.arange(examples * 784).reshape(examples, 28, 28).astype(np.uint8)
        np.save(tmp_path / "mnist" / f"{part}_inputs.npy", images)
        np.save(tmp_path / "mnist" / f"{part}_labels.npy", np.arange(examples, dtype=np.uint8) % 10)
    return tmp_path


def test_digits_are_all_there_once_with_every_fifth_of_a_class_for_testing() -> None:
    digits, original = load("digits"), load_digits()
    assert digits.input_shape == DATASETS["digits"].shape == (1, 8, 8)
    seen: dict[int, int] = dict.fromkeys(range(10), 0)
    train: list[tuple[NDArray[np.float64], int]] = []
    test: list[tuple[NDArray[np.float64], int]] = []
    for image, label in zip(original.images, original.target, strict=True):
        seen[label] += 1
        (test if seen[label] % 5 == 0 else train).append((image / 16, label))
    for inputs, labels, expected in (
        (digits.train_inputs, digits.train_labels, train),
        (digits.test_inputs, digits.test_labels, test),
    ):
        assert labels.tolist() == [label for _, label in expected]
        np.testing.assert_array_equal(inputs[:, 0], np.array([image for image, _ in expected]))
    assert digits.train_inputs.max() == 1 and digits.train_inputs.min() == 0


def test_the_catalogue_says_what_digits_hold() -> None:
    digits, entry = load("digits"), DATASETS["digits"]
    assert (len(digits.train_labels), len(digits.test_labels)) == (entry.train_examples, entry.test_examples)
    assert entry.bundled and is_fetched("digits")


@pytest.mark.parametrize(
    ("name", "model", "validation", "augment"),
    [
        ("digits", "mlp", 20, False),
        ("mnist", "cnn", 100, False),
        ("fashion-mnist", "cnn", 100, False),
        ("cifar10", "vgg11", 500, True),
    ],
)
def test_each_data_set_names_the_settings_that_suit_it(name: str, model: str, validation: int, augment: bool) -> None:
    entry = DATASETS[name]
    assert (entry.model, entry.validation_per_class, entry.augment) == (model, validation, augment)


def test_fetched_arrays_are_memory_mapped(stored: Path) -> None:
    assert is_fetched("mnist", stored)
    mnist = load("mnist", stored)
    assert isinstance(mnist.train_inputs, np.memmap)
    assert not mnist.train_inputs.flags.writeable
    assert (mnist.input_shape, mnist.classes) == ((1, 28, 28), 10)
    assert mnist.prepare(mnist.train_inputs[:3]).shape == (3, 1, 28, 28)


def test_the_data_folder_is_the_one_given_else_the_variable_else_the_cache(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIEVE_DATA", str(stored))
    assert data_folder() == stored
    assert data_folder("/elsewhere") == Path("/elsewhere")
    assert len(load("mnist").train_labels) == 30
    monkeypatch.delenv("FEDSIEVE_DATA")
    assert data_folder() == Path.home() / ".cache" / "fedsieve"


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    for call in (load, is_fetched):
        with pytest.raises(InvalidSetting, match=r"dataset: 'cifar' .* 'cifar10' \(nearest\)"):
            call("cifar")


def test_a_data_set_not_fetched_says_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_DATA", str(tmp_path))
    with pytest.raises(MissingData) as caught:
        load("cifar10")
    assert str(caught.value) == f"dataset 'cifar10' is not in {tmp_path}; fetch it with: fedsieve data fetch cifar10"
    assert not is_fetched("cifar10")


def test_a_missing_folder_is_named_with_the_command_that_fills_it(tmp_path: Path) -> None:
    folder = tmp_path / "not here"
    with pytest.raises(MissingData) as caught:
        load("cifar10", folder)
    assert "there is no such folder" in str(caught.value)
    assert f"FEDSIEVE_DATA='{folder}' fedsieve data fetch cifar10" in str(caught.value)
    assert "\n" not in str(caught.value)


def damage_missing(file: Path) -> None:
    file.unlink()


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_emptied(file: Path) -> None:
    file.write_bytes(b"")


def damage_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[10:40] = b"'([{\"" * 6
    file.write_bytes(content)


def damage_type(file: Path) -> None:
    np.save(file, np.load(file).astype(np.int64))


def damage_shape(file: Path) -> None:
    np.save(file, np.load(file)[:-1])


@pytest.mark.parametrize("array", ["train_inputs", "test_labels"])
@pytest.mark.parametrize(
    "damage", [damage_missing, damage_truncated, damage_emptied, damage_header, damage_type, damage_shape]
)
def test_damaged_arrays_are_named_in_one_line_that_says_to_fetch_again(
    stored: Path, damage: object, array: str
) -> None:
    assert callable(damage)
    damage(stored / "mnist" / f"{array}.npy")
    with pytest.raises(MissingData) as caught:
        load("mnist", stored)
    message = str(caught.value)
    assert f"{array}.npy" in message and "damaged" in message and "fetch it again with" in message
    assert "\n" not in message
    assert not is_fetched("mnist", stored)


def test_stored_labels_outside_the_classes_are_damage(stored: Path) -> None:
    np.save(stored / "mnist" / "train_labels.npy", np.full(30, 77, dtype=np.uint8))
    with pytest.raises(MissingData, match=r"damaged \(train_labels: 77 .* labels 0 to 9"):
        load("mnist", stored)


def test_importing_the_package_leaves_slow_libraries_alone() -> None:
    script = "import sys, fedsieve.data; print([m for m in ('sklearn', 'PIL', 'rich') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
