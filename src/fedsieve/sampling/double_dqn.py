"""Double Q-learning of which action is worth most in a state (van Hasselt, Guez & Silver 2016)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve.randomness import generator, torch_draws

HIDDEN = 512
MEMORY, BATCH, RATE = 5_000, 32, 1e-3
STEPS_OF_A_TARGET = 50

State = NDArray[np.float32]


@dataclass(frozen=True)
class Transition:
    """In `state` [inputs], `action` brought `reward` and led to `following` [inputs], where it `ended` or not."""

    state: State
    action: int
    reward: float
    following: State
    ended: bool


def network(inputs: int, actions: int, hidden: int = HIDDEN) -> nn.Sequential:
    """States [n, inputs] to values [n, actions]."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, actions))


def double_q_targets(
    rewards: Tensor, ended: Tensor, following: Tensor, learner: nn.Module, target: nn.Module, discount: float
) -> Tensor:
    """Y = r + γ Q(s', argmax_a Q(s', a; θ); θ') of n transitions [n]; r alone where an episode ended with it."""
    with torch.no_grad():
        chosen = learner(following).argmax(1, keepdim=True)
        worth: Tensor = target(following).gather(1, chosen).squeeze(1)
        return rewards + discount * worth * ~ended


class DoubleDQN:
    """Two networks: one that learns at every step, and one, brought up to date now and then, that says what to learn.

    It remembers the last 5,000 transitions and learns from 32 of them at a time.
    """

    def __init__(
        self,
        inputs: int,
        actions: int,
        discount: float,
        seed: int,
        hidden: int = HIDDEN,
        device: torch.device | str = "cpu",
    ) -> None:
        self.discount, self.seed, self.device = discount, seed, torch.device(device)
        with torch_draws(seed, "value network"):
            self.learner = network(inputs, actions, hidden).to(device)
        self.target = network(inputs, actions, hidden).to(device)
        self.target.load_state_dict(self.learner.state_dict())
        self.optimiser = torch.optim.Adam(self.learner.parameters(), lr=RATE)
        self.memory: deque[Transition] = deque(maxlen=MEMORY)
        self.steps = 0

    def values(self, state: State) -> NDArray[np.float32]:
        """What each action is worth [actions] in `state` [inputs]."""
        with torch.no_grad():
            values: NDArray[np.float32] = self.learner(torch.from_numpy(state).to(self.device)).cpu().numpy()
        return values

    def remember(self, transition: Transition) -> None:
        """Add a transition to the memory, from which the oldest one goes if it is full."""
        self.memory.append(transition)

    def learn(self) -> None:
        """One step down the squared error on a batch, once there is one in the memory."""
        if len(self.memory) < BATCH:
            return
        random = generator(self.seed, "replayed transitions", self.steps)
        batch = [self.memory[place] for place in random.choice(len(self.memory), BATCH, replace=False).tolist()]
        targets = double_q_targets(
            torch.tensor([one.reward for one in batch], device=self.device),
            torch.tensor([one.ended for one in batch], device=self.device),
            self._stacked([one.following for one in batch]),
            self.learner,
            self.target,
            self.discount,
        )
        actions = torch.tensor([[one.action] for one in batch], device=self.device)
        said = self.learner(self._stacked([one.state for one in batch])).gather(1, actions).squeeze(1)
        self.optimiser.zero_grad()
        nn.functional.mse_loss(said, targets).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.steps += 1
        if self.steps % STEPS_OF_A_TARGET == 0:
            self.target.load_state_dict(self.learner.state_dict())

    def _stacked(self, states: list[State]) -> Tensor:
        return torch.from_numpy(np.stack(states)).to(self.device)
