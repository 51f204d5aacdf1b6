"""Episodes of federated learning that teach FAVOR's agent whom to ask.

An action of the agent is a client, so all episodes have the run's clients, with their data and the run's initial model.
What is random in training belongs to seeds that no run has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from fedsieve import data
from fedsieve.data import Dataset
from fedsieve.engines import Engine
from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.federation import Federation
from fedsieve.filtering import accuracy
from fedsieve.parts import FILTERS
from fedsieve.randomness import generator
from fedsieve.runs.assembly import assemble
from fedsieve.runs.config import Config
from fedsieve.sampling import FavorSampler, UniformSampler
from fedsieve.sampling.base import ClientSampler, Ids, sorted_ids
from fedsieve.sampling.compression import Compression
from fedsieve.sampling.double_dqn import DoubleDQN, State, Transition
from fedsieve.sampling.favor import COMPONENTS, Agent, reward
from fedsieve.threads import single_thread

DISCOUNT = 0.9
LEAST_EXPLORATION = 0.1
EXPLORING = 0.8
"""The share of the episodes over which exploration falls."""


@dataclass(frozen=True)
class Pretraining:
    """An agent, the sum of rewards and the rounds of each episode, and what all of it cost."""

    agent: Agent
    returns: list[float]
    rounds: list[int]
    trainings: int
    seconds: float


def pretrain_favor(
    config: Config,
    episodes: int,
    target: float,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    dataset: Dataset | None = None,
    watch: Callable[[int, int, float], None] = lambda episode, round, reached: None,
) -> Pretraining:
    """Teach an agent for the clients of `config`.

    An episode asks one client a round, as the paper does, and ends when the validation accuracy reaches `target`, or
    after the configuration's rounds. `watch` hears of every round: episode, round and accuracy.
    """
    if episodes < 1:
        raise InvalidSetting("episodes", episodes, "a whole number of at least 1")
    if not 0 < target <= 1:
        raise InvalidSetting("target", target, "an accuracy above 0 and up to 1")
    if not config.validation_per_class:
        raise InvalidSetting("validation_per_class", 0, "at least 1: rewards are validation accuracies")
    began = time.perf_counter()
    with single_thread():
        school = School(config, target, model, dataset or data.load(config.dataset, config.data_dir))
        for episode in range(1, episodes + 1):
            school.play(episode, exploration(episode, episodes), watch)
    network = {name: tensor.cpu().clone() for name, tensor in school.agent.network.items()}
    trainings = len(school.agent.clients) + sum(school.rounds)
    seconds = time.perf_counter() - began
    agent = replace(school.agent, network=network, compression=school.agent.compression.to(torch.device("cpu")))
    return Pretraining(agent, school.returns, school.rounds, trainings, seconds)


def exploration(episode: int, episodes: int) -> float:
    """The share of choices made at random: 1 in the first episode, 0.1 after four fifths of them."""
    done = (episode - 1) / max(1.0, EXPLORING * episodes)
    return max(LEAST_EXPLORATION, 1 - (1 - LEAST_EXPLORATION) * done)


class School:
    """An agent that learns, and the federations in which it does. All clients train once, before the first episode."""

    def __init__(
        self, config: Config, target: float, model: nn.Module | Callable[[], nn.Module] | None, dataset: Dataset
    ) -> None:
        if config.filter in FILTERS and sum(FILTERS[config.filter].models) > 1:
            raise InvalidSetting(
                "filter", config.filter, "one that one model is enough for: agents learn with one a round"
            )
        one_a_round = {"sampler": "own", "favor_agent": None, "ratio": 1 / config.clients, "min_updates": 1}
        self.config = Config(**config.model_dump() | one_a_round)
        self.target, self.model, self.dataset = target, model, dataset
        self.returns: list[float] = []
        self.rounds: list[int] = []
        federation, engine = self._assemble(0, UniformSampler())
        clients, start = federation.clients, federation.model
        trained = torch.empty(len(clients), start.numel(), device=start.device)
        try:
            if len(clients) < 2:
                raise InvalidSetting("clients", len(clients), "at least 2 with data, for an agent to choose between")
            models = (own for group in federation.local_models(clients) for own in group)
            for place, own in enumerate(models):
                trained[place] = start if own is None else own
        finally:
            engine.close()
        compression = Compression.of(trained, min(COMPONENTS, len(clients) - 1))
        self.first: State = np.concatenate([compression([one]) for one in (start, *trained)])
        self.learner = DoubleDQN(self.first.size, len(clients), DISCOUNT, config.seed, device=start.device)
        # The agent's network is the one that learns.
        self.agent = Agent(clients, compression, self.first[0], self.learner.learner.state_dict())

    def play(self, episode: int, share: float, watch: Callable[[int, int, float], None]) -> None:
        """One episode, asking anybody in a `share` of the rounds.

        A round in which a client doesn't answer leaves the model as it was, and has a reward like any other.
        """
        sampler = Exploring(self.agent, share, episode)
        federation, engine = self._assemble(episode, sampler)
        sampler.load_state_dict({"compressed": self.first})
        rewards: list[float] = []
        try:
            for round in range(1, self.config.rounds + 1):
                state, sampler.asked = sampler.state(), None
                with suppress(TooFewUpdates):
                    federation.play(round)
                if sampler.asked is None:  # nobody could be reached
                    continue
                logits = engine.logits([federation.model], "validation")[0]
                reached = float(accuracy(logits, engine.labels("validation")))
                rewards.append(reward(reached, self.target))
                action = int(np.searchsorted(self.agent.clients, sampler.asked))
                following, ended = sampler.state().reshape(-1), reached >= self.target
                self.learner.remember(Transition(state.reshape(-1), action, rewards[-1], following, ended))
                self.learner.learn()
                watch(episode, round, reached)
                if ended:
                    break
        finally:
            engine.close()
        self.returns.append(sum(rewards))
        self.rounds.append(len(rewards))

    def _assemble(self, episode: int, sampler: ClientSampler) -> tuple[Federation, Engine]:
        draws = int(generator(self.config.seed, "favor episode", episode).integers(2**32, 2**62))
        return assemble(self.config, sampler, model=self.model, dataset=self.dataset, draws=draws)


class Exploring(FavorSampler):
    """Asks anybody in a `share` of the rounds, and knows whom it asked last."""

    asked: int | None = None

    def __init__(self, agent: Agent, share: float, episode: int) -> None:
        super().__init__(agent)
        self.share, self.episode = share, episode

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """One client, drawn uniformly or of highest value."""
        random = generator(self.seed, "favor exploration", round, self.episode)
        ids = sorted_ids(clients, count)
        chosen = random.choice(ids, 1) if random.random() < self.share else super().sample(round, ids, 1)
        self.asked = int(chosen[0])
        return chosen
