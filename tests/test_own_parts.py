"""Parts of a user's own that are not what they should be: one line says which, and what would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedsieve as fs
from fedsieve.averaging import Coefficients, Kept
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import Candidates, CombinatorialFilter, ModelFilter, Selection
from fedsieve.sampling import UniformSampler

CONFIG = fs.Config(rounds=1, clients=6, local_epochs=1, algorithm="fedpdp")


class Sampler(UniformSampler):
    """Asks whom it is told to."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice

    def sample(self, round: int, clients: Any, count: int) -> Any:
        return self.choice


class Filter(ModelFilter):
    """Keeps what it is told to."""

    def __init__(self, selection: Any) -> None:
        self.selection = selection

    def select(self, candidates: Candidates) -> Any:
        return self.selection


def told(coefficients: Any) -> Callable[[Kept], Any]:
    return lambda kept: coefficients


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sampler": "ucb"}, "sampler: 'ucb' is not allowed; use a ClientSampler, such as"),
        ({"sampler": UniformSampler}, r"sampler: <class .*UniformSampler'> is not allowed"),
        ({"filter": CombinatorialFilter}, r"filter: <class .* is not allowed; use a ModelFilter, such as"),
        ({"averaging": "mean"}, "averaging: 'mean' is not allowed; use a function of Kept to Coefficients"),
        ({"model": "cnn"}, r"model: 'cnn' is not allowed; use a torch.nn.Module"),
        ({"model": lambda: None}, r"model: None is not allowed; use a torch.nn.Module"),
        ({"model": nn.Linear(64, 3)}, "model: .* is not allowed"),
        ({"dataset": "mnist"}, "dataset: 'mnist' is not allowed; use a Dataset"),
        ({"callbacks": [print]}, "callbacks: <built-in function print> is not allowed; use .* Callback"),
        ({"sampler": Sampler([99])}, "sampled: 99 is not allowed; use ids of clients, from Sampler"),
        ({"sampler": Sampler(None)}, "sampled: None is not allowed; use ids of clients, from Sampler"),
        ({"sampler": Sampler(np.array([1.5]))}, r"sampled: array\(\[1.5\]\) is not allowed"),
        ({"filter": Filter(None)}, "select: None is not allowed; use a Selection, from Filter"),
        ({"filter": Filter(Selection((77,)))}, r"kept: \(77,\) is not allowed; use different positions among 2 models"),
        ({"filter": Filter(Selection((-1,)))}, r"kept: \(-1,\) is not allowed"),
        ({"filter": Filter(Selection((0, 0)))}, r"kept: \(0, 0\) is not allowed"),
        ({"filter": Filter(Selection(()))}, r"kept: \(\) is not allowed; use at least one model"),
        ({"averaging": told(None)}, "averaging: None is not allowed; use Coefficients with one number for each of 2"),
        ({"averaging": told(Coefficients(0.0, np.ones(3)))}, "averaging: Coefficients.* is not allowed"),
    ],
)
def test_a_wrong_part_is_one_line(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message) as caught:
        fs.run(CONFIG, **parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"rounds": 3}, "config.yaml"])
def test_a_configuration_is_a_config(given: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"config: .* is not allowed; use a Config, such as Config\(rounds=10\)"):
        fs.run(given)


def test_a_client_drawn_twice_counts_twice() -> None:
    history = fs.run(CONFIG, sampler=Sampler([1, 1, 2]), averaging=fs.averaging.mean)
    assert history.rows[0]["sampled"] == [1, 1, 2] and history.rows[0]["kept"] == [1, 2]
    assert history.rows[0]["coefficients"]["clients"] == pytest.approx([2 / 3, 1 / 3], abs=1e-6)


@pytest.mark.parametrize("where", ["validation examples", "test_inputs"])
def test_the_server_judges_by_numbers_alone(where: str) -> None:
    random = np.random.default_rng(0)
    rows, labels = random.normal(size=(120, 3)).astype(np.float32), np.arange(120) % 3
    test, right = rows[:30].copy(), labels[:30]
    (test if where == "test_inputs" else rows)[:, 0] = np.nan
    own = fs.data.Dataset.from_arrays(rows, labels, test, right)
    config = fs.Config(model="mlp", rounds=1, clients=4, validation_per_class=5, augment=False, device="cpu")
    with pytest.raises(InvalidSetting, match=f"dataset: 'NaN or infinity among the {where}' is not allowed"):
        fs.run(config, dataset=own)
