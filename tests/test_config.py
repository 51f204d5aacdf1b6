"""One configuration, from Python, YAML or flags; what it refuses, it refuses in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsieve as fs
from fedsieve.errors import FedSieveError, InvalidSetting, MissingData
from fedsieve.reproduction.paper import SETTLED


def test_defaults_are_the_papers_setting_on_bundled_data() -> None:
    config = fs.Config()
    assert (config.clients, config.ratio, config.local_epochs, config.alpha, config.mu) == (20, 0.4, 5, 0.1, 0.1)
    assert (config.dataset, config.model, config.augment) == ("digits", "mlp", False)


def test_defaults_serve_the_baselines_as_the_settled_setting_does() -> None:
    assert {name: getattr(fs.Config(dataset="cifar10"), name) for name in SETTLED} == SETTLED
    digits = fs.Config()
    assert (digits.batch_size, digits.lr, digits.schedule) == (16, SETTLED["lr"], SETTLED["schedule"])


def test_a_data_set_brings_its_own_habits_unless_told_otherwise() -> None:
    habits = fs.Config(dataset="cifar10")
    assert (habits.model, habits.validation_per_class, habits.augment) == ("vgg11", 500, True)
    told = fs.Config(dataset="cifar10", model="cnn", validation_per_class=0, augment=False)
    assert (told.model, told.validation_per_class, told.augment) == ("cnn", 0, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0}, "ratio: 0 is not allowed; use a number above 0 and at most 1"),
        ({"ratio": 1.5}, "ratio: 1.5 is not allowed; use a number above 0 and at most 1"),
        ({"alpha": -1}, "alpha: -1 is not allowed; use a number above 0"),
        ({"alpha": float("nan")}, "alpha: nan is not allowed; use a number above 0"),
        ({"clients": 0}, "clients: 0 is not allowed; use a whole number of at least 1"),
        ({"rounds": "many"}, "rounds: 'many' is not allowed; use a whole number of at least 1"),
        ({"local_steps": 0}, "local_steps: 0 is not allowed; use a whole number of at least 1"),
        ({"actors": 2}, "actors: 2 is not allowed; use it with --engine ray alone"),
        ({"address": "auto", "engine": "workers"}, "address: 'auto' is not allowed; use it with --engine ray alone"),
        (
            {"byzantine": 1, "filter": "median"},
            "byzantine: 1 is not allowed; use it with one of these filters alone: krum, ",
        ),
        ({"momentum": 1}, "momentum: 1 is not allowed; use a number of at least 0 and below 1"),
        ({"algorithm": "fedcn-ts"}, "algorithm: 'fedcn-ts' is not allowed; use 'fedcm-ts' (nearest), or one of: "),
        ({"dataset": "cifar"}, "dataset: 'cifar' is not allowed; use 'cifar10' (nearest), or one of: "),
        ({"score": "f1"}, "score: 'f1' is not allowed; use one of: accuracy, cross-entropy"),
        ({"learning_rate": 1}, "field: 'learning_rate' is not allowed; use "),
        ({"device": "tpu"}, "device: 'tpu' is not allowed; use auto, cpu, cuda or cuda:N"),
    ],
)
def test_bad_settings_name_field_value_and_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        fs.Config(**settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, FedSieveError)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"clients": 5000}, "clients"),
        ({"validation_per_class": 500}, "validation_per_class"),
        ({"validation_per_class": 0, "algorithm": "fedca"}, "validation_per_class"),
        ({"model": "vgg11"}, "model"),
    ],
)
def test_what_the_data_can_not_give_is_refused_before_anything_is_written(
    settings: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        fs.run(fs.Config(**settings), out=tmp_path / "run")
    assert caught.value.field == field
    assert not (tmp_path / "run").exists()


def test_a_label_outside_the_classes_is_refused() -> None:
    inputs, labels = np.zeros((4, 3), dtype=np.float32), np.array([0, 1, 12, 2])
    with pytest.raises(InvalidSetting, match="train_labels: 12"):
        fs.Dataset.from_arrays(inputs, labels, inputs, np.array([0, 1, 2, 1]), classes=10)


def test_a_missing_data_folder_names_the_command_that_fetches(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="fedsieve data fetch cifar10"):
        fs.run(fs.Config(dataset="cifar10", data_dir=tmp_path / "nowhere"))


@pytest.mark.parametrize("content", ["a: [1", "- 1\n- 2", "\x00", "3: 4"])
def test_an_unreadable_yaml_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(InvalidSetting, match="YAML") as caught:
        fs.Config.load(tmp_path / "config.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"nothing\.yaml"):
        fs.Config.load(tmp_path / "nothing.yaml")


def test_what_is_given_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rounds: 7\nlr: 0.5\n")
    config = fs.Config.load(tmp_path / "config.yaml", lr=0.25, alpha=None)
    assert (config.rounds, config.lr, config.alpha) == (7, 0.25, 0.1)


@given(
    alpha=st.floats(min_value=1e-6, max_value=1e6),
    lr=st.floats(min_value=1e-12, max_value=10),
    rounds=st.integers(1, 10**6),
    steps=st.none() | st.integers(1, 1000),
    augment=st.booleans(),
)
def test_a_saved_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, alpha: float, lr: float, rounds: int, steps: int | None, augment: bool
) -> None:
    config = fs.Config(alpha=alpha, lr=lr, rounds=rounds, local_steps=steps, augment=augment)
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(config.to_yaml())
    assert fs.Config.load(file) == config


def test_where_a_run_happens_is_no_difference() -> None:
    here = fs.Config(device="cpu")
    assert here.differences(fs.Config(device="auto", engine="sequential", data_dir=Path("/x"))) == []
    assert here.differences(fs.Config(lr=1, seed=2)) == ["lr", "seed"]


@pytest.mark.parametrize("device", ["cuda:99999999999999", "cuda:²", "cpu:0", "gpu"])
def test_what_is_no_device_is_named(device: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^device: .* is not allowed; use auto, cpu, cuda or cuda:N$"):
        fs.Config(device=device)


@pytest.mark.parametrize("field", ["clients", "lr", "hostile", "byzantine"])
def test_yes_is_no_number(field: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{field}: True is not allowed; use a (whole )?number"):
        fs.Config(**{field: True})
    assert fs.Config(augment=False, even_classes=True).even_classes
