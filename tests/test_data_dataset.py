"""Data sets as arrays: what is refused, and what a model gets to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsieve.data import Dataset
from fedsieve.errors import InvalidSetting

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
LABELS = np.array([0, 1, 2, 1])
COLOUR = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
GREY = COLOUR[..., 0]


def made(**changes: Any) -> Dataset:
    fields: dict[str, Any] = {"name": "mine", "classes": 3}
    fields |= {"train_inputs": ROWS, "train_labels": LABELS, "test_inputs": ROWS, "test_labels": LABELS}
    return Dataset(**(fields | changes))


def test_floats_reach_the_model_as_they_are() -> None:
    dataset = made()
    assert dataset.input_shape == (3,)
    seen = dataset.prepare(dataset.train_inputs[1:3])
    assert seen.dtype == torch.float32
    assert seen.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_prepared_floats_are_a_copy() -> None:
    dataset = made(train_inputs=ROWS.copy())
    dataset.prepare(dataset.train_inputs).zero_()
    assert np.array_equal(dataset.train_inputs, ROWS)


def test_doubles_become_single_precision() -> None:
    assert made().prepare(ROWS.astype(np.float64)).dtype == torch.float32


def test_grey_images_get_a_channel_and_the_range_0_to_1() -> None:
    dataset = made(train_inputs=GREY, test_inputs=GREY)
    seen = dataset.prepare(GREY)
    assert dataset.input_shape == tuple(seen.shape[1:]) == (1, 5, 6)
    np.testing.assert_allclose(seen[:, 0].numpy(), GREY / 255, rtol=1e-6)


def test_colour_images_are_channel_first_and_normalised_pixel_by_pixel() -> None:
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.5, 2.0)
    dataset = made(train_inputs=COLOUR, test_inputs=COLOUR, mean=mean, std=std)
    seen = dataset.prepare(COLOUR)
    assert dataset.input_shape == tuple(seen.shape[1:]) == (3, 5, 6)
    assert seen.is_contiguous()
    for image, row, column, channel in np.ndindex(*COLOUR.shape):
        by_hand = (COLOUR[image, row, column, channel] / 255 - mean[channel]) / std[channel]
        assert seen[image, channel, row, column].item() == pytest.approx(by_hand, abs=1e-5)


def test_memory_mapped_images_are_prepared_without_complaint(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", COLOUR)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    dataset = made(train_inputs=mapped, test_inputs=mapped)
    assert torch.equal(dataset.prepare(mapped[:2]), made(train_inputs=COLOUR, test_inputs=COLOUR).prepare(COLOUR[:2]))


def test_own_arrays_tell_the_number_of_classes() -> None:
    assert Dataset.from_arrays(ROWS, [0, 1, 2, 1], ROWS, [0, 4, 0, 0]).classes == 5
    assert Dataset.from_arrays(ROWS, LABELS, ROWS, LABELS, classes=7).classes == 7


def test_own_images_are_scaled_and_normalised_on_request() -> None:
    plain = Dataset.from_arrays(GREY, LABELS, GREY, LABELS)
    normalised = Dataset.from_arrays(GREY, LABELS, GREY, LABELS, mean=(0.5,), std=(0.25,))
    torch.testing.assert_close(normalised.prepare(GREY), (plain.prepare(GREY) - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("changes", "field", "value", "allowed"),
    [
        ({"train_labels": np.array([0, 1, 12, 3]), "classes": 10}, "train_labels", 12, "labels 0 to 9"),
        ({"test_labels": np.array([0, -1, 2, 1])}, "test_labels", -1, "labels 0 to 2"),
        ({"train_labels": LABELS[:3]}, "train_labels", "3 labels", "as many labels as inputs, 4"),
        ({"train_labels": LABELS.astype(float)}, "train_labels", "float64 [4]", "integers"),
        ({"train_labels": LABELS > 0}, "train_labels", "bool [4]", "integers"),
        ({"train_labels": np.eye(4, 3, dtype=int)}, "train_labels", "int64 [4, 3]", "integers"),
        ({"test_inputs": ROWS[:0], "test_labels": LABELS[:0]}, "test_inputs", "float32 [0, 3]", "at least one"),
        ({"test_inputs": ROWS[:, :2]}, "test_inputs", "floats [n, 2]", "what train_inputs has, floats [n, 3]"),
        ({"test_inputs": COLOUR}, "test_inputs", "uint8 images [n, 5, 6, 3]", "floats [n, 3]"),
        ({"train_inputs": ROWS.astype(int)}, "train_inputs", "int64 [4, 3]", "uint8 images"),
        ({"train_inputs": ROWS.astype(np.uint8)}, "train_inputs", "uint8 [4, 3]", "uint8 images"),
        ({"classes": 0}, "classes", 0, "at least 1"),
        ({"mean": (0.5,), "std": (0.5,)}, "mean", (0.5,), "used as they are"),
    ],
)
def test_unusable_arrays_are_refused_by_name(changes: dict[str, Any], field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        made(**changes)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mean", "std", "field"),
    [((0.5,), (0.5, 0.5, 0.5), "mean"), ((0.5,) * 3, None, "std"), ((0.5,) * 3, (0.5, 0, 0.5), "std")],
)
def test_normalisation_needs_one_positive_number_per_channel(mean: Any, std: Any, field: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        made(train_inputs=COLOUR, test_inputs=COLOUR, mean=mean, std=std)
    assert caught.value.field == field


@pytest.mark.parametrize("order", ["<", ">"])
def test_own_arrays_may_be_of_any_byte_order(order: str) -> None:
    rows, labels = np.arange(12).reshape(4, 3).astype(f"{order}f4"), np.array([0, 1, 1, 0]).astype(f"{order}i4")
    dataset = Dataset.from_arrays(rows, labels, rows, labels)
    assert dataset.prepare(dataset.train_inputs).tolist() == rows.tolist()
    assert torch.from_numpy(dataset.train_labels).tolist() == [0, 1, 1, 0]


def test_own_arrays_with_a_negative_label_are_refused_before_counting_classes() -> None:
    with pytest.raises(InvalidSetting, match="train_labels: -3"):
        Dataset.from_arrays(ROWS, [0, -3, 1, 1], ROWS, LABELS)
