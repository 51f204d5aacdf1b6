"""Samplers and filters by name: each runs in place of an algorithm's own, and says before a run what it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Typed

import fedsieve as fs
from fedsieve.algorithms import Options
from fedsieve.attacks import ATTACKS
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import Krum
from fedsieve.parts import FILTERS, SAMPLERS
from fedsieve.runs import assemble, pretrain_favor


def config(**changes: Any) -> fs.Config:
    settings: dict[str, Any] = {"dataset": "digits", "rounds": 3, "batch_size": 16, "lr": 0.05, "alpha": 1.0}
    return fs.Config(**settings | {"algorithm": "fedpdp"} | changes)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("favor") / "agent.safetensors"
    path.write_bytes(pretrain_favor(config(), 1, 0.9).agent.to_bytes())
    return path


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("filter", ["all", "combinatorial"])
def test_every_sampler_runs_and_runs_alike(sampler: str, filter: str, agent: Path) -> None:
    needed = {"favor_agent": agent} if SAMPLERS[sampler].agent else {}
    settings = config(sampler=sampler, filter=filter, system="drawn", deadline=60.0, **needed)
    one, other = fs.run(settings), fs.run(settings)
    assert [row["sampled"] for row in one.rows] == [row["sampled"] for row in other.rows]
    assert one.model is not None and other.model is not None and torch.equal(one.model, other.model)
    assert all(1 <= len(set(row["sampled"])) <= 8 for row in one.rows)
    assert "own_parts" not in one.summary


@pytest.mark.parametrize("filter", FILTERS)
def test_every_filter_runs_among_hostile_clients(filter: str) -> None:
    history = fs.run(config(filter=filter, attack="noise", hostile=0.1, ratio=0.6))
    assert history.config.options().byzantine == 1
    assert all(row["kept"] for row in history.rows)


def test_names_stand_for_the_algorithms_own_parts() -> None:
    for name, parts in {
        "fedca": {"sampler": "uniform", "filter": "combinatorial"},
        "fedcm-ts": {"sampler": "thompson", "filter": "combinatorial"},
        "fedcm-ucb": {"sampler": "ucb", "filter": "combinatorial"},
    }.items():
        assert fs.run(config(algorithm=name)).accuracy == fs.run(config(**parts)).accuracy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--sampler oort",
            "sampler: 'oort' is not allowed; use it with --system drawn or a CSV file: it looks at times",
        ),
        ("--sampler fedcs", "sampler: 'fedcs' is not allowed; use it with --system drawn or a CSV file"),
        (
            "--sampler fedcs --deadline 30",
            "deadline: 30.0 is not allowed; use it with --system drawn or a CSV file, which fedcs needs too\n",
        ),
        ("--sampler fedcs --system drawn", "deadline: None is not allowed; use a number of seconds with fedcs"),
        ("--sampler ort", "sampler: 'ort' is not allowed; use 'oort' (nearest)"),
        ("--filter krum --byzantine 3", "byzantine: 3 is not allowed; use at most 2: krum needs 2f + 3 models"),
        ("--filter bulyan --byzantine 2", "use at most 1: bulyan needs 4f + 3 models, and 8 are asked for"),
        ("--filter trimmed-mean --byzantine 9", "byzantine: 9 is not allowed; use at most 3: trimmed-mean needs"),
        (
            "--filter trimmed-mean --attack sign-flip --hostile 0.5",
            "byzantine: 4 is not allowed; use at most 3: trimmed-mean needs 2f + 1 models, and 8 are asked for",
        ),
        ("--filter krum --ratio 0.1", "filter: 'krum' is not allowed; use another, or a higher ratio: krum needs"),
        ("--filter fltrust --validation-per-class 0", "validation_per_class: 0 is not allowed; use at least 1"),
        ("--sampler favor", "favor_agent: None is not allowed; use with favor an agent's file"),
        ("--byzantine -1", "byzantine: -1 is not allowed; use a whole number of at least 0"),
    ],
)
def test_what_a_part_lacks_is_said_before_the_run(typed: Typed, words: str, said: str) -> None:
    status, _, printed = typed("run", "--algorithm", "fedpdp", "--out", "run", *words.split())
    assert status == 2 and printed.count("\n") == 1 and said in printed


def test_liars_are_assumed_as_many_as_there_may_be() -> None:
    assert config(attack="nan", hostile=0.2).options().byzantine == 2  # of 8, rounded
    assert config(byzantine=3, filter="krum", attack="nan", hostile=0.2).options().byzantine == 3
    assert config().options().byzantine == 0


def test_all_are_listed(typed: Typed) -> None:
    status, printed, _ = typed("algorithms")
    assert status == 0
    for name in (*SAMPLERS, *FILTERS, *ATTACKS):
        assert f"│ {name} " in printed
    assert "2f + 3 models" in printed and "--system" in printed and "--favor-agent" in printed
    listed = json.loads(typed("algorithms", "--json")[1])
    assert [part["name"] for part in listed["samplers"]] == list(SAMPLERS)
    assert [part["name"] for part in listed["filters"]] == list(FILTERS)
    needs = {part["name"]: part["needs"] for part in listed["samplers"]}
    assert needs["uniform"] == needs["power-of-choice"] == "–"
    assert needs["power-of-choice-exact"] == needs["power-of-choice-batch"] == "losses from clients"
    assert needs["fedcs"] == "--system, --deadline"
    assert {"name": "oort", "source": "Lai et al. 2021", "needs": "--system"} in listed["samplers"]
    assert {"name": "krum", "source": "Blanchard et al. 2017", "needs": "2f + 3 models"} in listed["filters"]
    assert [attack["name"] for attack in listed["attacks"]] == list(ATTACKS)
    assert {"name": "inner-product", "source": "Xie et al. 2020"} in listed["attacks"]


def test_who_needs_losses_is_listed_so() -> None:
    options = fs.Config(deadline=1.0, system="drawn").options()
    for name, part in SAMPLERS.items():
        if not part.agent:
            assert part.make(options).needs_losses == part.losses, name


def test_a_sampler_by_hand_goes_before_a_name() -> None:
    federation, _ = assemble(config(sampler="ucb"), sampler=fs.sampling.UniformSampler())
    assert isinstance(federation.sampler, fs.sampling.UniformSampler)


def test_liars_are_counted_among_clients_that_hold_data() -> None:
    split = {"heterogeneity": "client", "alpha": 0.01, "clients": 60, "ratio": 0.2}
    config = fs.Config(algorithm="fedpdp", filter="krum", attack="sign-flip", hostile=0.2, **split)
    federation, engine = assemble(config)
    engine.close()
    filter = federation.sieve.filter
    assert len(federation.clients) < 40 and isinstance(filter, Krum)
    assert filter.byzantine == int(0.2 * federation.per_round + 0.5) == 1


@pytest.mark.parametrize("name", ["discounted-ucb", "window-ucb", "discounted-thompson", "window-thompson"])
def test_bandits_that_forget_refuse_the_stale_reading(name: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^refresh: 'stale' is not allowed; use 'fresh' where memory fades$"):
        SAMPLERS[name].make(Options(refresh="stale"))
