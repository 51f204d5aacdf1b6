"""FAVOR: a double DQN that sees everybody's model (Wang, Kaplan, Niu & Li 2020, INFOCOM).

The state is the compressed weights of the global model and of the last model of every client, an action is a client,
and a round's reward is Ξ^(accuracy - target) - 1. An agent is pre-trained over many federations of the same clients
(`fedsieve.runs.pretrain_favor`); in a run it is frozen.

What differs from the paper, and why:

- Before the first round every client trains as in any round, with the run's epochs, where the paper has one epoch.
- The loadings of the principal components belong to the agent: other loadings would turn the axes of its states.
- Numbers in a state are in units of the first component's standard deviation: weights differ by hundredths, a network
  learns from numbers around 1.
- Pre-training explores by ε-greedy choice. The paper puts the network's outputs through a softmax; with values that
  differ by hundredths, all clients are then about equally likely.
- The target is that of van Hasselt et al., with the state that follows; an s_t in the paper's is taken for a slip.
- Discount, memory, batch, optimiser, learning rate and how often the target is brought up to date are our choice.
- A client whose first training fails stands in the state as if it had not trained, one that fails later as before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedsieve.errors import InvalidSetting, MissingData
from fedsieve.randomness import keys
from fedsieve.sampling.bandit import TIE_WIDTH
from fedsieve.sampling.base import Beliefs, ClientSampler, Feedback, Ids, highest, sorted_ids
from fedsieve.sampling.compression import Compression

BASE = 64.0  # Ξ
COMPONENTS = 100
MAKE_ONE = "an agent's file, which `fedsieve pretrain-favor` writes"

log = logging.getLogger("fedsieve")


def reward(accuracy: float, target: float) -> float:
    """Ξ^(accuracy - target) - 1: below 0 until the target is reached, so that every further round costs."""
    return float(BASE ** (accuracy - target) - 1)


@dataclass(frozen=True)
class Agent:
    """What was learnt of `clients` [n]: how to compress a model, and what a client is worth.

    `start` [components] is the initial model of the federations that taught it. `network` has the weights of two
    layers, from states [(1 + n) · components], the global model first and then clients by id, to values [n].
    """

    clients: Ids
    compression: Compression
    start: NDArray[np.float32]
    network: Mapping[str, Tensor]

    def values(self, state: NDArray[np.float32]) -> NDArray[np.float64]:
        """What it is worth to ask each client [n] in `state` [1 + n, components]."""
        network = self.network
        with torch.no_grad():
            seen = _tensor(state.reshape(-1)).to(network["0.bias"].device)
            inner = torch.relu(network["0.weight"] @ seen + network["0.bias"])
            values: Tensor = network["2.weight"] @ inner + network["2.bias"]
        return values.double().cpu().numpy()

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        packed: bytes = save(
            {
                "clients": _tensor(self.clients),
                "start": _tensor(self.start),
                "mean": self.compression.mean,
                "loadings": self.compression.loadings,
                "unit": torch.tensor(self.compression.unit, dtype=torch.float64),
                **{f"network.{name}": tensor.contiguous() for name, tensor in self.network.items()},
            }
        )
        return packed

    @classmethod
    def load(cls, path: Path | str) -> Agent:
        """From a file that has what `to_bytes` gave."""
        if not Path(path).is_file():
            raise MissingData(f"favor_agent: there is no file {path}")
        try:
            found = {name: tensor.clone() for name, tensor in load_file(path).items()}  # where PyTorch wants them
            compression = Compression(found.pop("mean"), found.pop("loadings"), float(found.pop("unit")))
            clients, start = found.pop("clients").numpy(), found.pop("start").numpy()
            network = {name.removeprefix("network."): tensor for name, tensor in found.items()}
            inputs, actions = network["0.weight"].shape[1], network["2.weight"].shape[0]
            if actions != len(clients) or inputs != (1 + len(clients)) * compression.components:
                raise ValueError(f"{inputs} inputs and {actions} outputs for {len(clients)} clients")
        except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
            raise InvalidSetting("favor_agent", str(path), f"{MAKE_ONE} ({' '.join(str(error).split())})") from None
        return cls(clients, compression, start, network)


class FavorSampler(ClientSampler):
    """Asks the clients that a pre-trained `agent` thinks most of, given what all of them made of the model.

    Before the first round every client trains once. Use it where the same clients learn together again and again, so
    that pre-training pays; the loadings take as much memory as 100 models, or as many as there are clients less one.
    """

    notation = "highest value to a pre-trained double DQN, without replacement"
    uses_prior_knowledge = True
    needs_models = True

    def __init__(self, agent: Agent, seed: int = 0) -> None:
        self.agent = agent
        self.compression = agent.compression
        self.seed = seed
        self._state: NDArray[np.float32] | None = None

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Check that the agent knows these clients and this model."""
        super().begin(seed, clients, weights)
        if self.global_model is None or self.local_models is None:
            raise InvalidSetting("sampler", "favor", "one that needs no models, or set global_model and local_models")
        known, size = self.agent.clients, self.agent.compression.size
        if strangers := np.setxor1d(clients, known).tolist():
            allowed = f"one of the {clients.size} clients here: client {strangers[0]} is not in both"
            raise InvalidSetting("favor_agent", f"of {known.size} clients", allowed)
        if self.global_model().numel() != size:
            here = self.global_model().numel()
            raise InvalidSetting("favor_agent", f"of a model of {size} numbers", f"one of a model of {here}")
        self.compression = self.agent.compression.to(self.global_model().device)
        if not np.allclose(self.compression([self.global_model()])[0], self.agent.start, atol=1e-3):
            log.info("favor's agent learnt from another initial model, as another seed gives, and perhaps other data")
        self._state = None

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """The `count` available clients of highest value, sorted; somebody the agent doesn't know comes last."""
        ids = sorted_ids(clients, count)
        if count == 0:
            return ids[:0]
        at = np.searchsorted(self.agent.clients, ids)
        known = at < self.agent.clients.size
        known[known] = self.agent.clients[at[known]] == ids[known]
        worth = np.full(ids.size, -np.inf)
        worth[known] = self.values()[at[known]] + TIE_WIDTH * keys(self.seed, "favor ties", round, ids[known])
        return ids[highest(worth, count)]

    def values(self) -> NDArray[np.float64]:
        """What the agent thinks of its clients now [n]."""
        return self.agent.values(self.state())

    def state(self) -> NDArray[np.float32]:
        """The compressed global model, and below it the clients' [1 + n, components]; before round 1 they train."""
        if self._state is None:
            assert self.global_model is not None and self.local_models is not None
            start, compression = self.global_model(), self.compression
            trained = (
                compression([start if model is None else model for model in models])
                for models in self.local_models(self.agent.clients)
            )
            self._state = np.concatenate([compression([start]), *trained])
        return self._state

    def observe(self, feedback: Feedback) -> None:
        """Take the new global model and the models of those who answered."""
        if not feedback.losses:
            return
        assert self.global_model is not None
        state = self.state().copy()
        answered = np.array(list(feedback.losses), dtype=np.int64)
        if len(feedback.models) != answered.size:
            raise InvalidSetting("models", len(feedback.models), f"one for each of {answered.size} that have a loss")
        compressed = self.compression([self.global_model(), *feedback.models])
        state[0] = compressed[0]
        state[1 + np.searchsorted(self.agent.clients, answered)] = compressed[1:]
        self._state = state

    def beliefs(self, round: int) -> Beliefs:
        """The agent's values."""
        return Beliefs(self.agent.clients, self.values(), np.zeros(self.agent.clients.size))

    def state_dict(self) -> dict[str, Any]:
        """The compressed models."""
        return {"compressed": None if self._state is None else self._state.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        rows = state["compressed"]
        self._state = None if rows is None else np.array(rows, dtype=np.float32)


def _tensor(array: NDArray[Any]) -> Tensor:
    """A copy that lies in memory as PyTorch's own do: the last bit of a product can depend on that."""
    return torch.from_numpy(array).clone()
