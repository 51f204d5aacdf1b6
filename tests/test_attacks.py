"""Hostile clients: what they do is what their definitions say, and only they do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Typed
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedsieve as fs
from fedsieve.attacks import (
    ATTACKS,
    ALittleIsEnough,
    Backdoor,
    FreeRider,
    InnerProduct,
    LabelFlip,
    NaNSender,
    Noise,
    Scaled,
    Sent,
    hostile_clients,
)
from fedsieve.data import Dataset
from fedsieve.engines import Update
from fedsieve.engines.hostile import HostileEngine
from fedsieve.errors import InvalidSetting
from fedsieve.runs import assemble

PREVIOUS = torch.tensor([1.0, 1.0])
MODELS = {
    3: torch.tensor([2.0, 1.0]),
    5: torch.tensor([1.0, 4.0]),
    8: torch.tensor([3.0, 2.0]),
    9: torch.tensor([5.0, 6.0]),
}


def sent(*hostile: int) -> Sent:
    return Sent(PREVIOUS, MODELS, frozenset(hostile), seed=1, round=2)


def config(**changes: Any) -> fs.Config:
    settings: dict[str, Any] = {"dataset": "digits", "rounds": 3, "batch_size": 16, "lr": 0.05, "clients": 10}
    return fs.Config(**settings | changes)


def told(lies: Any) -> dict[int, list[float]]:
    return {client: lie.tolist() for client, lie in sorted(lies.items())}


def test_updates_are_turned_and_stretched() -> None:
    assert told(Scaled(-1.0).lies(sent(3, 5))) == {3: [0.0, 1.0], 5: [1.0, -2.0]}
    assert told(Scaled(10.0).lies(sent(8))) == {8: [21.0, 11.0]}


def test_a_free_rider_sends_what_it_got_and_a_broken_one_nothing_usable() -> None:
    assert told(FreeRider().lies(sent(3, 9))) == {3: [1.0, 1.0], 9: [1.0, 1.0]}
    assert torch.isnan(NaNSender().lies(sent(5))[5]).all()


def test_noise_is_as_long_as_it_says_and_each_clients_own() -> None:
    lies = Noise(10.0).lies(sent(3, 5))
    assert (lies[3] - PREVIOUS).norm() == pytest.approx(10 * 1) and (lies[5] - PREVIOUS).norm() == pytest.approx(30)
    assert not torch.allclose(lies[3] - PREVIOUS, (lies[5] - PREVIOUS) / 3)
    again = Noise(10.0).lies(sent(5))
    assert torch.equal(again[5], lies[5])  # whoever else lies


def test_inner_product_goes_against_the_honest_ones() -> None:
    # Honest 3 and 5 learned (1, 0) and (0, 3): on average (0.5, 1.5), of which half is taken away.
    assert told(InnerProduct(0.5).lies(sent(8, 9))) == {8: [0.75, 0.25], 9: [0.75, 0.25]}
    everyone = InnerProduct(1.0).lies(sent(*MODELS))
    assert everyone[3].tolist() == pytest.approx([1 - 1.75, 1 - 2.25])


def test_a_little_is_enough_stays_among_the_honest() -> None:
    # Of 50 clients 24 are hostile: 2 more are needed, and Φ(z) = 24 / 26 (the paper's own example).
    assert ALittleIsEnough.deviations(50, 24) == pytest.approx(1.4261, abs=1e-4)
    assert ALittleIsEnough.deviations(10, 1) == 0.0  # 5 of 9 would have to be further off
    assert ALittleIsEnough.deviations(10, 6) == 3.0
    lies = ALittleIsEnough().lies(sent(8, 9))  # 1 of 2 honest ones is needed: z = 0, the mean of the two
    assert told(lies) == {8: [4.0, 4.0], 9: [4.0, 4.0]}
    lies = ALittleIsEnough().lies(sent(5, 8, 9))  # a majority: three deviations below the mean
    mean, spread = np.array([3.0, 4.0]), np.array([np.std([1, 3, 5]), np.std([4, 2, 6])])
    assert lies[5].tolist() == pytest.approx((mean - 3 * spread).tolist())


def digits() -> Dataset:
    return fs.data.load("digits")


def test_labels_are_flipped_where_hostile_clients_hold_them_and_nowhere_else() -> None:
    data, held = digits(), np.array([0, 5, 7])
    flipped = LabelFlip().poison(data, held, seed=0)
    others = np.setdiff1d(np.arange(len(data.train_labels)), held)
    assert (flipped.train_labels[held] == 9 - data.train_labels[held]).all()
    assert (flipped.train_labels[others] == data.train_labels[others]).all()
    assert (LabelFlip().poison(flipped, held, seed=0).train_labels == data.train_labels).all()


def test_a_backdoor_marks_a_corner_of_half_of_what_is_held() -> None:
    data, held = digits(), np.arange(100, 140)
    marked = Backdoor(target=3).poison(data, held, seed=0)
    changed = np.flatnonzero(
        (marked.train_inputs != data.train_inputs).any((1, 2, 3)) | (marked.train_labels != data.train_labels)
    )
    assert set(changed) <= set(held) and len(changed) == 20
    assert (marked.train_labels[changed] == 3).all() and (marked.train_inputs[changed, 0, -1, -1] == 1).all()
    differs = (marked.train_inputs != data.train_inputs).any(0)[0]
    assert differs.sum() == 1 and differs[-1, -1]  # one pixel of 8 × 8
    inputs, labels = Backdoor(target=3).triggered(data)
    assert len(inputs) == (data.test_labels != 3).sum() and (labels == 3).all() and (inputs[:, 0, -1, -1] == 1).all()


@pytest.mark.parametrize("shape", [(6, 32, 32, 3), (6, 32, 32)])
def test_a_backdoor_on_bytes_is_white(shape: tuple[int, ...]) -> None:
    images, labels = np.zeros(shape, dtype=np.uint8), np.arange(6) % 2
    data = Dataset.from_arrays(images, labels, images, labels)
    inputs, _ = Backdoor().triggered(data)
    assert (inputs[:, -4:, -4:] == 255).all() and inputs.astype(np.int64).sum() == inputs[:, -4:, -4:].astype(
        np.int64
    ).sum()


def test_a_backdoor_needs_images() -> None:
    rows, labels = np.zeros((40, 5), dtype=np.float32), np.arange(40) % 2
    data = Dataset.from_arrays(rows, labels, rows, labels)
    with pytest.raises(InvalidSetting, match="attack: 'backdoor' is not allowed; use images, or another attack"):
        assemble(config(attack="backdoor", hostile=0.5, validation_per_class=1, model="mlp"), dataset=data)


@given(seed=st.integers(0, 1000), count=st.integers(1, 60), share=st.floats(0, 1), more=st.floats(0, 1))
def test_who_is_hostile_follows_from_the_seed(seed: int, count: int, share: float, more: float) -> None:
    clients = np.random.default_rng(seed).permutation(count * 3)[:count].astype(np.int64)
    few, many = (set(hostile_clients(seed, clients, part).tolist()) for part in sorted((share, more)))
    assert few <= many <= set(clients.tolist())
    assert len(many) == int(np.floor(max(share, more) * count + 0.5))
    assert few == set(hostile_clients(seed, np.sort(clients), min(share, more)).tolist())


@pytest.mark.parametrize("attack", ATTACKS)
def test_honest_clients_stay_honest(attack: str) -> None:
    _, honest = assemble(config())
    _, engine = assemble(config(attack=attack, hostile=0.3))
    assert isinstance(engine, HostileEngine) and len(engine.hostile) == 3
    start = honest.initial_model()
    pairs = zip(honest.train(start, list(range(10)), 1), engine.train(start, list(range(10)), 1), strict=True)
    for one, other in pairs:
        assert one.model is not None and other.model is not None
        assert torch.equal(one.model, other.model) == (one.client not in engine.hostile)


@pytest.mark.parametrize("attack", ["a-little-is-enough", "inner-product"])
def test_an_honest_client_that_diverges_disarms_nobody(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = assemble(config(attack=attack, hostile=0.3))
    assert isinstance(engine, HostileEngine)
    start, diverging = engine.initial_model(), min(set(range(10)).difference(engine.hostile))
    honest = {update.client: update for update in engine.engine.train(start, list(range(10)), 1)}
    honest[diverging] = Update(diverging, torch.full_like(start, torch.nan), 0.1)
    monkeypatch.setattr(engine.engine, "train", lambda model, clients, round: list(honest.values()))
    sent = {update.client: update.problem(start) for update in engine.train(start, list(range(10)), 1)}
    assert {client: problem for client, problem in sent.items() if problem} == {diverging: "model with NaN or infinity"}


@pytest.mark.parametrize("attack", ["sign-flip", "label-flip", "nan"])
def test_where_no_client_is_asked_nobody_is_hostile(attack: str) -> None:
    settings = {"algorithm": "server-only", "rounds": 2}
    plain, attacked = fs.run(config(**settings)), fs.run(config(attack=attack, hostile=0.9, **settings))
    assert plain.accuracy == attacked.accuracy and attacked.summary["hostile"] == []


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


@pytest.mark.parametrize("attack", ["sign-flip", "scaled", "noise", "a-little-is-enough", "inner-product"])
def test_lies_are_about_what_is_trained_alone(attack: str) -> None:
    """A variance times ten, or a count of batches with noise, would be told at once, or make the model useless."""
    _, honest = assemble(config(), model=normed)
    _, engine = assemble(config(attack=attack, hostile=0.3), model=normed)
    assert isinstance(engine, HostileEngine)
    start, trained = honest.initial_model(), honest.layout.parameters
    pairs = list(zip(honest.train(start, list(range(10)), 1), engine.train(start, list(range(10)), 1), strict=True))
    models = {one.client: (one.model, other.model) for one, other in pairs}
    truths, lies = {}, {}
    for client, (truth, lie) in models.items():
        assert truth is not None and lie is not None
        assert torch.equal(truth[trained:], lie[trained:])  # 12 means, 12 variances, a count
        truths[client], lies[client] = truth[:trained], lie[:trained]
    said = ATTACKS[attack]().lies(Sent(start[:trained], truths, engine.hostile, seed=0, round=1))
    assert said.keys() == engine.hostile
    for client in truths:
        assert torch.equal(lies[client], said.get(client, truths[client]))


def test_a_free_rider_learns_no_statistics() -> None:
    _, engine = assemble(config(attack="free-rider", hostile=0.3), model=normed)
    assert isinstance(engine, HostileEngine)
    start = engine.initial_model()
    for update in engine.train(start, sorted(engine.hostile), 1):
        assert update.model is not None and torch.equal(update.model, start)


@pytest.mark.parametrize("attack", ["none", *ATTACKS])
def test_a_run_with_hostile_clients_goes_on_bit_for_bit(attack: str, tmp_path: Path) -> None:
    settings = config(attack=attack, hostile=0.0 if attack == "none" else 0.4, algorithm="fedca")
    whole = fs.run(settings)

    class Stop(fs.Callback):
        def on_round(self, row: Any) -> None:
            if row["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(settings, out=tmp_path, callbacks=[Stop()])
    resumed = fs.run(settings, out=tmp_path, resume=True)
    assert whole.accuracy == resumed.accuracy
    assert whole.model is not None and resumed.model is not None and torch.equal(whole.model, resumed.model)
    assert ("hostile" in whole.summary) == (attack != "none")
    assert all(("backdoor_success" in row) == (attack == "backdoor") for row in whole.rows)


def test_senders_of_nan_are_left_out_and_named() -> None:
    history = fs.run(config(attack="nan", hostile=0.4, ratio=1.0, rounds=1, algorithm="fedavg"))
    assert history.rows[0]["excluded"] == {
        str(client): "model with NaN or infinity" for client in history.summary["hostile"]
    }


def test_a_backdoor_is_measured_apart_from_accuracy() -> None:
    settings = config(rounds=8, alpha=5.0, algorithm="fedpdp", ratio=1.0)
    clean = fs.run(settings.model_copy(update={"attack": "backdoor"}))
    assert clean.accuracy == fs.run(settings).accuracy  # nobody is hostile: only the success is noted, too
    attacked = fs.run(settings.model_copy(update={"attack": "backdoor", "hostile": 0.5}))
    assert attacked.rows[-1]["backdoor_success"] > clean.rows[-1]["backdoor_success"] + 0.5


def test_bad_input_is_one_line(typed: Typed) -> None:
    status, _, said = typed("run", "--attack", "sign", "--hostile", "0.2")
    assert status == 2 and "attack: 'sign' is not allowed; use 'sign-flip' (nearest)" in said
    status, _, said = typed("run", "--hostile", "0.2")
    assert status == 2 and "attack: 'none' is not allowed; use one of label-flip" in said and said.count("\n") == 1
    status, _, said = typed("run", "--attack", "nan", "--hostile", "1.5")
    assert status == 2 and "hostile: 1.5 is not allowed; use a number of at least 0 and at most 1" in said


def test_a_share_without_any_hostile_client_is_refused_with_one_that_has() -> None:
    with pytest.raises(InvalidSetting, match=r"hostile: 0.01 is not allowed; use 0.1 or more, at which one of the 10 "):
        assemble(config(attack="sign-flip", hostile=0.01, heterogeneity="iid"))
    for clients in (3, 7, 30):
        few = config(attack="noise", hostile=0.001, clients=clients, heterogeneity="iid")
        with pytest.raises(InvalidSetting) as caught:
            assemble(few)
        share = float(caught.value.allowed.split()[0])
        assert len(hostile_clients(0, np.arange(clients), share)) == 1


def test_somebody_has_to_be_honest_where_hostile_clients_send_no_model() -> None:
    for share in (0.96, 1.0):
        with pytest.raises(InvalidSetting, match=r"hostile: .* use a share that leaves one of 10 clients honest"):
            assemble(config(attack="nan", hostile=share, heterogeneity="iid"))
    assemble(config(attack="nan", hostile=0.94, heterogeneity="iid"))
    assemble(config(attack="free-rider", hostile=1.0, heterogeneity="iid"))


def test_an_attack_needs_somebody_who_attacks() -> None:
    with pytest.raises(InvalidSetting, match=r"hostile: 0\.0 is not allowed; use a share of the clients above 0"):
        fs.Config(attack="sign-flip")
    with pytest.raises(InvalidSetting, match="attack: 'none' is not allowed"):
        fs.Config(hostile=0.2)


def test_attacks_by_name() -> None:
    kinds = [LabelFlip, Backdoor, Scaled, Scaled, Noise, ALittleIsEnough, InnerProduct, FreeRider, NaNSender]
    assert [type(make()) for make in ATTACKS.values()] == kinds
    assert ATTACKS["sign-flip"]() == Scaled(-1.0) and ATTACKS["scaled"]() == Scaled(10.0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_a_gpu(name: str) -> None:
    settings = {"attack": name, "hostile": 0.5, "algorithm": "fedca", "rounds": 2}
    here, there = (fs.run(config(**settings, device=device)) for device in ("cpu", "cuda"))
    assert here.summary["hostile"] == there.summary["hostile"]
    assert [row["sampled"] for row in here.rows] == [row["sampled"] for row in there.rows]
    assert here.rows[0]["excluded"] == there.rows[0]["excluded"]
