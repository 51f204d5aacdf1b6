"""The baselines of a sceptic: the validation data as training data, after averaging or as one more client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsieve as fs
from fedsieve.averaging import Coefficients, combine
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import (
    Candidates,
    CombinatorialFilter,
    FineTuning,
    KeepAll,
    LearnedAveraging,
    Selection,
)
from fedsieve.runs import assemble

SETTINGS: dict[str, Any] = {"rounds": 4, "clients": 8, "ratio": 0.5, "lr": 0.05, "batch_size": 16, "device": "cpu"}


def pulled_to_2(examples: int) -> Candidates:
    """The log-likelihood is -|w - 2|² / 2 whatever the batch, so its gradient is 2 - w; two models average to 1."""
    return Candidates(
        logits=torch.empty(0),
        labels=torch.zeros(examples),
        weights=torch.ones(2),
        average=lambda kept: torch.tensor([float(len(kept)) - 1]),
        score_and_gradient=lambda model, examples, crops=None: (torch.zeros(()), 2 - model),
        random=np.random.default_rng(0),
    )


def test_fine_tuning_is_sgd_with_momentum_by_hand() -> None:
    # From the average, 1, with rates 0.1 and 0.05: velocity 1, w 1.1; velocity 0.9 + 0.9 = 1.8, w 1.19.
    tuning = FineTuning(batch=3, rate=0.1, passes=1, least=2)
    selection = tuning.select(pulled_to_2(examples=5))
    assert selection.kept == (0, 1) and selection.model is not None
    assert selection.model.tolist() == pytest.approx([1.19])
    # Half as long steps: velocity 1, w 1.05; velocity 0.95 + 0.9 = 1.85, w 1.05 + 0.025 · 1.85.
    slower = tuning.select(replace(pulled_to_2(examples=5), pace=0.5)).model
    assert slower is not None and slower.tolist() == pytest.approx([1.09625])


@pytest.mark.parametrize(
    ("examples", "passes", "least", "taken"),
    [(6, 2, 0, 4), (5, 2, 4, 4), (7, 2, 1, 5), (3, 2, 0, 2), (2, 3, 0, 3), (1, 5, 5, 5), (5, 0, 0, 0), (7, 2, 6, 6)],
)
def test_fine_tuning_sees_as_much_as_so_many_passes_would(examples: int, passes: int, least: int, taken: int) -> None:
    seen: list[int] = []

    def noted(model: Tensor, examples: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append(0 if examples is None else len(examples))
        return torch.zeros(()), 2 - model

    candidates = replace(pulled_to_2(examples), score_and_gradient=noted)
    FineTuning(batch=3, passes=passes, least=least).select(candidates)
    assert seen == [3 if examples > 3 else 0] * taken  # 0: all there are


@pytest.mark.parametrize(
    ("clients_do", "asked", "does"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
@pytest.mark.parametrize(("examples", "batch"), [(7, 3), (2, 2)])
def test_fine_tuning_crops_and_flips_where_clients_do_or_as_it_is_told(
    clients_do: bool, asked: bool | None, does: bool, examples: int, batch: int
) -> None:
    given: list[Any] = []

    def noted(model: Tensor, examples: Tensor | None, crops: Any = None) -> tuple[Tensor, Tensor]:
        given.append(crops)
        return torch.zeros(()), 2 - model

    candidates = replace(pulled_to_2(examples), score_and_gradient=noted, augments=clients_do)
    FineTuning(batch=3, augment=asked).select(candidates)
    assert len(given) > 1 and all((crops is not None) == does for crops in given)
    if does:
        assert all(crops.shape == (batch, 3) for crops in given) and (given[0] != given[1]).any()


def test_a_run_crops_and_flips_validation_images_if_it_does_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    train = FineTuning.train

    def noted(self: FineTuning, candidates: Candidates, model: Tensor, rates: Iterable[float], augment: bool) -> Tensor:
        told.append(augment)
        return train(self, candidates, model, rates, augment)

    monkeypatch.setattr(FineTuning, "train", noted)
    settings = SETTINGS | {"rounds": 1, "algorithm": "fedpdp-finetune"}
    lies = {"attack": "noise", "hostile": 0.25}  # through another engine around the first
    runs = [fs.run(fs.Config(augment=augment, **settings, **more)) for augment in (True, False) for more in ({}, lies)]
    assert told == [True, True, False, False]
    assert len({run.accuracy[-1] for run in runs}) > 1


def test_what_is_no_image_is_not_cropped() -> None:
    inputs, labels = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32), np.arange(400) % 2
    dataset = fs.data.Dataset.from_arrays(inputs, labels, inputs, labels, classes=2)
    config = fs.Config(algorithm="fedpdp", validation_per_class=10, **SETTINGS)
    with pytest.raises(InvalidSetting, match=r"augment: True is not allowed.*false for inputs \(6,\), which are no"):
        fs.run(config, dataset=dataset, model=lambda: torch.nn.Linear(6, 2), filter=FineTuning(augment=True))


class Gives(KeepAll):
    """A filter that has decided."""

    needs_models = True

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def select(self, candidates: Candidates) -> Selection:
        return self.selection


@pytest.mark.parametrize(
    ("selection", "start"),
    [
        (Selection((0, 2)), 20.0),  # the scheme's average of those kept, here a plain sum of their places times ten
        (Selection((0, 2), weights=torch.tensor([0.75, 0.0, 0.25])), 0.75 * 1 + 0.25 * 3),
        (Selection((1,), model=torch.tensor([7.0])), 7.0),
    ],
)
def test_fine_tuning_begins_where_its_filter_ends(selection: Selection, start: float) -> None:
    candidates = Candidates(
        logits=torch.empty(0),
        labels=torch.zeros(1),
        weights=torch.ones(3),
        models=[torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])],
        previous=torch.zeros(1),
        average=lambda kept: torch.tensor([10.0 * sum(kept)]),
        score_and_gradient=lambda model, examples: (torch.zeros(()), torch.ones(1)),
        random=np.random.default_rng(0),
    )
    tuned = FineTuning(Gives(selection), passes=1, rate=0.5, least=0).select(candidates)
    assert tuned.model is not None and tuned.model.tolist() == pytest.approx([start + 0.5])
    assert tuned.kept == selection.kept and tuned.weights is selection.weights


def test_fine_tuning_reads_what_its_filter_reads() -> None:
    assert not FineTuning().needs_logits and not FineTuning(LearnedAveraging()).needs_logits
    assert FineTuning(CombinatorialFilter()).needs_logits


def test_steps_at_the_server_get_smaller_within_a_round_and_as_those_of_the_clients_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[list[float]] = []
    train = FineTuning.train

    def noted(self: FineTuning, candidates: Candidates, model: Tensor, rates: Iterable[float], augment: bool) -> Tensor:
        taken.append(list(rates))
        return train(self, candidates, model, taken[-1], augment)

    monkeypatch.setattr(FineTuning, "train", noted)
    fs.run(fs.Config(algorithm="fedsieve-finetune", **SETTINGS))
    first = [rates[0] for rates in taken]
    assert first == pytest.approx([0.1 * left for left in (1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2)])  # cosine
    for rates in taken:
        assert len(rates) == 12 and rates[6] == pytest.approx(rates[0] / 2) and rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("pair", [("fedsieve", "fedsieve-finetune"), ("fedpdp", "fedpdp-finetune")])
def test_a_run_says_with_which_weights_was_averaged_before_the_server_trained(pair: tuple[str, str]) -> None:
    uneven = SETTINGS | {"heterogeneity": "client"}
    plain, tuned = (fs.run(fs.Config(algorithm=name, **uneven)) for name in pair)
    assert tuned.rows[0]["coefficients"] == plain.rows[0]["coefficients"]
    assert tuned.rows[0]["test_loss"] != plain.rows[0]["test_loss"]


def test_the_server_is_one_more_client_of_every_round() -> None:
    config = fs.Config(algorithm="fedpdp-server-client", **SETTINGS)
    federation, engine = assemble(config)
    before = federation.model.clone()
    played = federation.play(1)
    assert max(played.sampled) < 8 and len(played.sampled) == 4
    # By hand: FedPdp of those sampled and the server, weighted by how many examples each has.
    assert federation.server is not None
    models = [update.model for update in engine.train(before, [*sorted(played.sampled), 8], 1)]
    examples = [float(engine.partition[client].size) for client in [*sorted(played.sampled), 8]]  # type: ignore[attr-defined]
    shares = np.array(examples) / sum(examples)
    assert examples[-1] == config.validation_per_class * 10
    expected = combine(before, [model for model in models if model is not None], Coefficients(0.0, shares))
    assert torch.allclose(federation.model, expected, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    "algorithm",
    ["fedpdp-finetune", "fedpdp-server-client", "fedsieve", "fedsieve-ucb", "fedsieve-ts", "fedsieve-finetune"],
)
def test_they_learn_and_need_validation_data(algorithm: str, device: str) -> None:
    history = fs.run(fs.Config(algorithm=algorithm, **SETTINGS | {"device": device}))
    assert history.accuracy[-1] > 0.3
    with pytest.raises(InvalidSetting, match="validation_per_class: 0"):
        fs.run(fs.Config(algorithm=algorithm, **SETTINGS | {"validation_per_class": 0}))


def test_a_server_that_trains_alone_needs_nobody_chosen_and_waits_for_nobody() -> None:
    alone = {"algorithm": "server-only", **SETTINGS}
    told = alone | {"filter": "krum", "sampler": "ucb", "min_updates": 4, "system": "drawn", "clients": 20}
    plain, other = fs.run(fs.Config(**alone | {"clients": 20})), fs.run(fs.Config(**told))
    assert other.accuracy == plain.accuracy and other.accuracy[-1] > 0.3
    assert other.simulated("seconds") is None


@pytest.mark.parametrize("name", ["fedpdp-finetune", "fedsieve-finetune"])
def test_the_server_trains_at_twice_the_clients_rate(name: str) -> None:
    filter = fs.algorithms.find(name).filter(fs.algorithms.Options(lr=0.02))
    assert isinstance(filter, FineTuning) and filter.rate == 0.04


class Looking(torch.nn.Module):
    """Picks features by an index, hides some by a mask and counts, all of them buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 10)
        self.register_buffer("chosen", torch.arange(0, 64, 2))
        self.register_buffer("hidden", torch.arange(32) % 5 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.flatten(1)[:, self.chosen].masked_fill(self.hidden, 0.0)  # type: ignore[index, arg-type]
        return torch.nn.functional.linear(seen, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize("engine", ["sequential", "workers"])
@pytest.mark.parametrize("settings", [{"algorithm": "fedsieve-finetune"}, {"algorithm": "fedpdp", "filter": "fltrust"}])
def test_buffers_may_be_whole_numbers_and_masks(settings: dict[str, str], engine: str) -> None:
    config = fs.Config(**settings, engine=engine, **SETTINGS | {"rounds": 8})
    history = fs.run(config, model=Looking)
    assert not any("lost" in row for row in history.rows) and history.accuracy[-1] > 0.5
