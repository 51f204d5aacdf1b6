"""FAVOR against its definitions: PCA, rewards, double Q-learning, whom it asks, and what pre-training is worth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Typed
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from torch import Tensor, nn

import fedsieve as fs
from fedsieve.errors import FedSieveError, InvalidSetting
from fedsieve.runs import assemble, pretrain_favor
from fedsieve.runs.pretraining import exploration
from fedsieve.sampling import FavorSampler, Feedback, UniformSampler
from fedsieve.sampling import compression as compressing
from fedsieve.sampling.compression import Compression
from fedsieve.sampling.double_dqn import BATCH, DoubleDQN, Transition, double_q_targets
from fedsieve.sampling.favor import Agent, reward
from fedsieve.threads import single_thread

pytestmark = pytest.mark.usefixtures("one_thread")
CLIENTS = np.array([-3, 0, 1, 4, 7, 20, 2**50], dtype=np.int64)
SIZE = 30


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a run."""
    with single_thread():
        yield


def models_of(clients: NDArray[np.int64], seed: int = 0) -> Tensor:
    return torch.randn(len(clients), SIZE, generator=torch.Generator().manual_seed(seed))


def agent_of(clients: NDArray[np.int64] = CLIENTS, size: int = SIZE, hidden: int = 8, seed: int = 0) -> Agent:
    """An agent that has learnt nothing, with loadings fitted to random models."""
    draws = torch.Generator().manual_seed(seed)
    compression = Compression.of(torch.randn(len(clients), size, generator=draws), max(1, len(clients) - 1))
    inputs = (1 + len(clients)) * compression.components
    start = compression([torch.zeros(size)])[0]
    network = {
        "0.weight": torch.randn(hidden, inputs, generator=draws),
        "0.bias": torch.randn(hidden, generator=draws),
        "2.weight": torch.randn(len(clients), hidden, generator=draws),
        "2.bias": torch.randn(len(clients), generator=draws),
    }
    return Agent(clients, compression, start, network)


class Elsewhere:
    """Whoever runs a federation, to a sampler: a global model, and clients that make theirs of it."""

    def __init__(self, clients: NDArray[np.int64], size: int = SIZE) -> None:
        self.model = torch.zeros(size)
        self.first = dict(zip(clients.tolist(), models_of(clients, 1), strict=True))
        self.asked: list[list[int]] = []

    def local_models(self, clients: NDArray[np.int64]) -> Iterator[Sequence[Tensor | None]]:
        self.asked.append(clients.tolist())
        for client in clients.tolist():
            yield [None if client == 4 else self.first[client]]

    def begin(self, sampler: FavorSampler, seed: int = 3) -> FavorSampler:
        sampler.global_model, sampler.local_models = lambda: self.model, self.local_models
        count = len(sampler.agent.clients)
        sampler.begin(seed, sampler.agent.clients, np.full(count, 1 / count))
        return sampler


# Compression


@given(count=st.integers(2, 12), size=st.integers(2, 40), seed=st.integers(0, 2**20), data=st.data())
@settings(max_examples=40)
def test_components_are_those_of_a_singular_value_decomposition(
    count: int, size: int, seed: int, data: st.DataObject
) -> None:
    components = data.draw(st.integers(1, min(count - 1, size)))
    models = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) + 5
    ours = Compression.of(models, components)
    theirs = PCA(components, svd_solver="full").fit(models.double().numpy())
    assert ours.mean.numpy() == pytest.approx(theirs.mean_, abs=1e-5)
    assert ours.unit == pytest.approx(np.sqrt(theirs.explained_variance_[0]))
    for row, expected in zip(ours.loadings.numpy(), theirs.components_, strict=True):
        assert row * np.sign(row @ expected) == pytest.approx(expected, abs=2e-3)
    elsewhere = torch.randn(3, size, generator=torch.Generator().manual_seed(seed + 1)) + 5
    signs = np.sign((ours.loadings.numpy() * theirs.components_).sum(1))
    expected = theirs.transform(elsewhere.double().numpy()) * signs / ours.unit
    assert ours(list(elsewhere)) == pytest.approx(expected, abs=2e-2)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Compression.of(models_of(CLIENTS), 5)
    monkeypatch.setattr(compressing, "BLOCK", 7)
    parts = Compression.of(models_of(CLIENTS), 5)
    assert torch.allclose(whole.loadings, parts.loadings, atol=1e-6)
    assert whole.unit == pytest.approx(parts.unit)


def test_models_that_are_all_alike_have_components_of_nothing() -> None:
    alike = Compression.of(torch.ones(4, SIZE), 3)
    assert not alike.loadings.any() and alike.unit == 1
    assert alike([torch.full((SIZE,), 7.0)]).tolist() == [[0, 0, 0]]
    doubled = Compression.of(models_of(CLIENTS)[[0, 0, 1, 1]], 3)
    assert doubled.loadings[0].norm() == pytest.approx(1) and not doubled.loadings[1:].any()


def test_more_components_than_models_are_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"^components: 8 is not allowed; use 1 to 7, the number of models$"):
        Compression.of(models_of(CLIENTS), 8)


# Rewards and double Q-learning


def test_rewards_by_hand() -> None:
    assert reward(0.9, 0.9) == 0
    assert reward(0.4, 0.9) == pytest.approx(64**-0.5 - 1) == pytest.approx(1 / 8 - 1)
    assert reward(1.0, 0.5) == pytest.approx(7)


def table(values: list[list[float]]) -> nn.Linear:
    """A network that gives row i to the i-th unit vector."""
    layer = nn.Linear(len(values), len(values[0]), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values).T)
    return layer


def test_targets_by_hand() -> None:
    """The learner chooses (action 1, then 0), the target says what that is worth: 10, then 3. The third one ended."""
    learner, target = table([[1.0, 5.0], [4.0, 2.0]]), table([[20.0, 10.0], [3.0, 30.0]])
    following = torch.tensor([[1.0, 0], [0, 1], [1, 0]])
    targets = double_q_targets(
        torch.tensor([-0.5, 0.0, -0.25]), torch.tensor([False, False, True]), following, learner, target, 0.9
    )
    assert targets.tolist() == pytest.approx([-0.5 + 0.9 * 10, 0.9 * 3, -0.25])


def test_a_step_of_learning_lowers_the_error_and_the_target_follows_later() -> None:
    dqn = DoubleDQN(2, 2, 0.0, seed=0, hidden=16)
    states = np.eye(2, dtype=np.float32)
    dqn.learn()  # from nothing
    for place in range(BATCH):
        dqn.remember(Transition(states[place % 2], place % 2, float(place % 2), states[0], ended=False))
    before = dqn.target.state_dict()["0.weight"].clone()
    for _ in range(49):
        dqn.learn()
    assert torch.equal(dqn.target.state_dict()["0.weight"], before)
    dqn.learn()
    assert torch.equal(dqn.target.state_dict()["0.weight"], dqn.learner.state_dict()["0.weight"])
    for _ in range(400):
        dqn.learn()
    assert dqn.values(states[0])[0] == pytest.approx(0, abs=0.1)
    assert dqn.values(states[1])[1] == pytest.approx(1, abs=0.1)


def test_values_are_those_of_a_known_chain() -> None:
    """Two states; action 1 leads on, action 0 stays. On from the second ends with 1: Q = (γ², γ), (γ, 1), γ = 1/2."""
    dqn = DoubleDQN(2, 2, 0.5, seed=1, hidden=32)
    one, two = np.eye(2, dtype=np.float32)
    for _ in range(10):
        dqn.remember(Transition(one, 0, 0.0, one, ended=False))
        dqn.remember(Transition(one, 1, 0.0, two, ended=False))
        dqn.remember(Transition(two, 0, 0.0, two, ended=False))
        dqn.remember(Transition(two, 1, 1.0, two, ended=True))
    for _ in range(1500):
        dqn.learn()
    assert dqn.values(one).tolist() == pytest.approx([0.25, 0.5], abs=0.03)
    assert dqn.values(two).tolist() == pytest.approx([0.5, 1.0], abs=0.03)


# The sampler


def values_by_hand(agent: Agent, state: NDArray[np.float32]) -> list[float]:
    inputs = [float(number) for row in state.tolist() for number in row]
    layers = {name: tensor.tolist() for name, tensor in agent.network.items()}
    inner = [
        max(0.0, bias + sum(weight * number for weight, number in zip(row, inputs, strict=True)))
        for row, bias in zip(layers["0.weight"], layers["0.bias"], strict=True)
    ]
    return [
        bias + sum(weight * number for weight, number in zip(row, inner, strict=True))
        for row, bias in zip(layers["2.weight"], layers["2.bias"], strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_asks_the_available_clients_of_highest_value(seed: int) -> None:
    """The state is kept by hand: the global model in the first row, the last model of each client below."""
    agent = agent_of(seed=seed)
    there = Elsewhere(CLIENTS)
    sampler = there.begin(FavorSampler(agent))
    first = [there.model if client == 4 else there.first[client] for client in CLIENTS.tolist()]
    rows = [agent.compression([model])[0] for model in (there.model, *first)]
    random = np.random.default_rng(seed)
    for round in range(1, 15):
        available = random.permutation(CLIENTS)[:5].tolist()
        values = dict(zip(CLIENTS.tolist(), values_by_hand(agent, np.stack(rows)), strict=True))
        asked = [int(client) for client in sampler.sample(round, available, 3)]
        assert asked == sorted(sorted(available, key=lambda client: -values[client])[:3])
        there.model = torch.from_numpy(random.normal(size=SIZE).astype(np.float32))
        answers = {client: torch.from_numpy(random.normal(size=SIZE).astype(np.float32)) for client in asked[1:]}
        losses = dict.fromkeys(answers, 1.0)
        sampler.observe(Feedback(round, asked, [], losses, {}, list(answers.values())))
        rows[0] = agent.compression([there.model])[0]
        for client, model in answers.items():
            rows[1 + CLIENTS.tolist().index(client)] = agent.compression([model])[0]
        assert sampler.state() == pytest.approx(np.stack(rows), abs=1e-5)
    assert there.asked == [CLIENTS.tolist()]  # once, before the first round
    beliefs = sampler.beliefs(15)
    assert beliefs.mean == pytest.approx(values_by_hand(agent, np.stack(rows)), abs=1e-3)


def test_ties_are_broken_at_random_and_a_stranger_comes_last() -> None:
    agent = agent_of()
    for tensor in agent.network.values():
        tensor.zero_()
    sampler = Elsewhere(CLIENTS).begin(FavorSampler(agent))
    seen = Counter(int(sampler.sample(round, CLIENTS, 1)[0]) for round in range(1, 701))
    assert all(seen[client] == pytest.approx(100, abs=37) for client in CLIENTS.tolist())  # four standard deviations
    assert sampler.sample(1, [4, 99], 1).tolist() == [4]
    assert sampler.sample(1, [4, 99], 2).tolist() == [4, 99]


def test_a_loaded_twin_goes_on_identically_and_nobody_trains_again() -> None:
    agent, there = agent_of(), Elsewhere(CLIENTS)
    original = there.begin(FavorSampler(agent))
    random = np.random.default_rng(0)

    def play(sampler: FavorSampler, round: int, model: Tensor) -> list[int]:
        asked = [int(client) for client in sampler.sample(round, CLIENTS, 3)]
        sampler.observe(Feedback(round, asked, [], dict.fromkeys(asked, 1.0), {}, [model + client for client in asked]))
        return asked

    def draw() -> Tensor:
        return torch.from_numpy(random.normal(size=SIZE).astype(np.float32))

    for round in range(1, 6):
        play(original, round, draw())
    twin = there.begin(FavorSampler(agent))
    twin.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for round in range(6, 12):
        model = draw()
        assert play(original, round, model) == play(twin, round, model)
    assert original.state_dict() == twin.state_dict()
    assert len(there.asked) == 1


def test_what_does_not_fit_is_said() -> None:
    agent = agent_of()
    with pytest.raises(InvalidSetting, match=r"^sampler: 'favor' is not allowed; use one that needs no models"):
        FavorSampler(agent).begin(0, CLIENTS, np.ones(7))
    sampler = Elsewhere(CLIENTS).begin(FavorSampler(agent))
    with pytest.raises(InvalidSetting, match=r"^favor_agent: 'of 7 clients' is not allowed; use one of the 3 clients"):
        sampler.begin(0, CLIENTS[:3], np.ones(3))
    with pytest.raises(InvalidSetting, match=r"^favor_agent: 'of a model of 30 numbers' is not allowed"):
        Elsewhere(CLIENTS, SIZE + 1).begin(FavorSampler(agent))
    sampler.sample(1, CLIENTS, 2)
    with pytest.raises(InvalidSetting, match=r"^models: 0 is not allowed; use one for each of 1 that have a loss$"):
        sampler.observe(Feedback(1, [1], [], {1: 0.5}))


def test_flower_says_at_once_that_it_has_no_such_thing() -> None:
    flower = pytest.importorskip("fedsieve.flower")
    with pytest.raises(
        InvalidSetting,
        match=r"^sampler: 'FavorSampler' is not allowed; use one that goes by what earlier rounds showed",
    ):
        flower.SieveStrategy(FavorSampler(agent_of()), fs.filtering.KeepAll())


# Files


def test_an_agent_comes_back_from_its_file(tmp_path: Path) -> None:
    agent = agent_of()
    path = tmp_path / "agent.safetensors"
    path.write_bytes(agent.to_bytes())
    again = Agent.load(path)
    assert again.clients.tolist() == CLIENTS.tolist() and again.compression.unit == agent.compression.unit
    state = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    assert again.values(state).tolist() == agent.values(state).tolist()
    assert again.compression([models_of(CLIENTS)[0]]).tolist() == agent.compression([models_of(CLIENTS)[0]]).tolist()


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_a_file_that_is_no_agent_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FedSieveError) as caught:
        Agent.load(path)
    assert str(caught.value).startswith("favor_agent: ") and "\n" not in str(caught.value)


# In a run

SETTINGS: dict[str, Any] = {
    "algorithm": "fedpdp",
    "clients": 6,
    "ratio": 0.5,
    "rounds": 3,
    "local_epochs": 1,
    "lr": 0.05,
    "alpha": 1.0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def agent_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("favor") / "agent.safetensors"
    path.write_bytes(pretrain_favor(fs.Config(**SETTINGS), 3, 0.9).agent.to_bytes())
    return path


def test_a_run_that_is_gone_on_with_ends_as_an_undisturbed_one(agent_file: Path, tmp_path: Path) -> None:
    config = fs.Config(**SETTINGS | {"rounds": 5}, sampler="favor", favor_agent=agent_file)
    whole = fs.run(config, out=tmp_path / "whole")

    class Killed(fs.Callback):
        def on_round(self, row: Any) -> None:
            if row["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(config, out=tmp_path / "killed", callbacks=[Killed()])
    resumed = fs.run(config, out=tmp_path / "killed", resume=True)
    assert [row["sampled"] for row in whole.rows] == [row["sampled"] for row in resumed.rows]
    assert whole.model is not None and resumed.model is not None and torch.equal(whole.model, resumed.model)
    last = "checkpoints/round-000005.json"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "killed" / last).read_bytes()


def test_engines_agree_on_whom_to_ask(agent_file: Path) -> None:
    config = {**SETTINGS, "sampler": "favor", "favor_agent": agent_file}
    workers, sequential = (fs.run(fs.Config(**config, engine=engine)) for engine in ("workers", "sequential"))
    assert [row["sampled"] for row in workers.rows] == [row["sampled"] for row in sequential.rows]


def test_training_of_everybody_counts_in_simulated_time(agent_file: Path) -> None:
    config = fs.Config(**SETTINGS, sampler="favor", favor_agent=agent_file, system="drawn")
    federation, engine = assemble(config)
    first, second = federation.play(1), federation.play(2)
    engine.close()
    assert first.simulated is not None and second.simulated is not None and federation.system is not None
    everyone = federation.system.seconds(federation.clients, federation.examples, federation._model_bytes).max()
    assert first.simulated["seconds"] > everyone > second.simulated["seconds"] - everyone
    in_round = first.simulated["bytes"] - 12 * federation._model_bytes
    assert 0 < in_round <= 6 * federation._model_bytes >= second.simulated["bytes"]


def test_another_initial_model_is_noted(agent_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fedsieve")
    assemble(fs.Config(**SETTINGS, sampler="favor", favor_agent=agent_file))[1].close()
    assert not caplog.messages
    assemble(fs.Config(**SETTINGS, sampler="favor", favor_agent=agent_file, seed=1))[1].close()
    assert "another initial model" in caplog.messages[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sampler favor", "favor_agent: None is not allowed; use with favor an agent's file"),
        ("--sampler favor --favor-agent none.safetensors", "favor_agent: there is no file none.safetensors"),
        (
            "--favor-agent none.safetensors",
            "favor_agent: 'none.safetensors' is not allowed; use none without --sampler",
        ),
        (
            "--sampler favor --favor-agent AGENT",
            "favor_agent: 'of 6 clients' is not allowed; use one of the 20 clients",
        ),
        ("--sampler favor --clients 6 --alpha 1 --model cnn --favor-agent AGENT", "favor_agent: 'of a model of "),
    ],
)
def test_what_a_run_lacks_is_said_before_it(typed: Typed, words: str, said: str, agent_file: Path) -> None:
    words = words.replace("AGENT", str(agent_file))
    status, _, printed = typed("run", "--algorithm", "fedpdp", "--out", "run", *words.split())
    assert status == 2 and said in printed and "note" not in printed and printed.count("\n") == 1
    assert not Path("run").exists()


# Pre-training


def test_exploration_falls_to_a_tenth() -> None:
    assert [exploration(episode, 10) for episode in (1, 5, 9, 10)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert exploration(1, 1) == 1


def test_pre_training_is_repeatable_and_seeds_matter() -> None:
    config = fs.Config(**SETTINGS)
    one, other = pretrain_favor(config, 2, 0.9), pretrain_favor(config, 2, 0.9)
    assert one.agent.to_bytes() == other.agent.to_bytes() and one.returns == other.returns
    assert one.trainings == 6 + sum(one.rounds) == 6 + 2 * 3
    assert pretrain_favor(fs.Config(**SETTINGS, seed=1), 2, 0.9).returns != one.returns
    reached = pretrain_favor(config, 2, 0.01)
    assert reached.rounds == [1, 1] and all(value >= 0 for value in reached.returns)


def test_pre_training_goes_on_where_clients_drop_out() -> None:
    done = pretrain_favor(fs.Config(**SETTINGS | {"rounds": 15}, system="drawn", min_updates=2), 2, 1.0)
    assert all(12 <= rounds <= 15 for rounds in done.rounds)
    assert max(done.returns) > 15 * reward(0.12, 1.0)  # some rounds brought something


@pytest.mark.parametrize(
    ("changes", "arguments", "field"),
    [
        ({}, (0, 0.9), "episodes"),
        ({}, (1, 0.0), "target"),
        ({}, (1, 1.1), "target"),
        ({"validation_per_class": 0}, (1, 0.9), "validation_per_class"),
        ({"clients": 1}, (1, 0.9), "clients"),
    ],
)
def test_impossible_lessons_are_refused(changes: dict[str, Any], arguments: tuple[int, float], field: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        pretrain_favor(fs.Config(**SETTINGS | changes), *arguments)
    assert caught.value.field == field


def test_pre_training_finds_the_clients_that_are_useful() -> None:
    """Of 8 clients 2 have right labels; drawn uniformly, most are of no use."""
    random = np.random.default_rng(0)
    labels = np.arange(880) % 4
    inputs = (np.eye(4)[labels] * 3 + random.normal(size=(880, 4))).astype(np.float32)
    train, test = slice(0, 680), slice(680, None)
    config = fs.Config(
        algorithm="fedpdp", clients=8, ratio=0.25, rounds=8, local_epochs=1, lr=0.1, batch_size=16,
        heterogeneity="iid", validation_per_class=10, attack="label-flip", hostile=0.75, device="cpu",
    )  # fmt: skip
    dataset = fs.Dataset.from_arrays(inputs[train], labels[train], inputs[test], labels[test], classes=4)

    done = pretrain_favor(config, 25, 1.0, model=Small, dataset=dataset)
    assert np.mean(done.returns[-3:]) > np.mean(done.returns[:3])
    chosen = fs.run(config, sampler=FavorSampler(done.agent), model=Small, dataset=dataset)
    drawn = fs.run(config, sampler=UniformSampler(), model=Small, dataset=dataset)
    useful = set(range(8)) - set(chosen.summary["hostile"])
    assert sum(set(row["sampled"]) == useful for row in chosen.rows) >= 7
    assert np.mean(chosen.accuracy) > np.mean(drawn.accuracy) + 0.2


class Small(nn.Module):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


def test_the_command_writes_an_agent_and_says_what_it_cost(typed: Typed) -> None:
    words = ["--algorithm", "fedpdp", "--clients", "6", "--rounds", "2", "--local-epochs", "1", "--alpha", "1"]
    status, printed, noted = typed("pretrain-favor", *words, "--episodes", "2", "--out", "agents/one.safetensors")
    assert status == 0 and not noted and "2 episodes, 4 rounds, 10 trainings of a client, " in printed
    assert Agent.load("agents/one.safetensors").clients.tolist() == list(range(6))
    words += ["--sampler", "favor", "--favor-agent", "agents/one.safetensors", "--out", "run"]
    assert typed("run", *words)[0] == 0
    status, _, said = typed("pretrain-favor", "--episodes", "0")
    assert status == 2 and said == "error: episodes: 0 is not allowed; use a whole number of at least 1\n"


@pytest.mark.cuda
def test_an_agent_is_taught_and_asked_on_a_gpu(tmp_path: Path) -> None:
    config = fs.Config(**SETTINGS | {"device": "cuda"})
    taught = pretrain_favor(config, 3, 0.9)
    assert taught.agent.compression.mean.device.type == "cpu" and len(taught.returns) == 3
    (tmp_path / "agent").write_bytes(taught.agent.to_bytes())
    settings = config.model_dump() | {"sampler": "favor", "favor_agent": tmp_path / "agent"}
    assert len(fs.run(fs.Config(**settings)).rows) == config.rounds
