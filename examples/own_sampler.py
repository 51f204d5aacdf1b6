"""Your own sampler: ask the clients whose last training loss was highest, and those never asked first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import fedsieve as fs
from fedsieve.randomness import keys


class HighestLossSampler(fs.sampling.ClientSampler):
    notation = "highest last loss"
    uses_prior_knowledge = True

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def sample(self, round: int, clients: ArrayLike, count: int) -> NDArray[np.int64]:
        ids = np.sort(np.asarray(clients, dtype=np.int64))
        last = np.array([self.losses.get(int(client), np.inf) for client in ids])
        ties = keys(self.seed, "highest loss", round, ids)  # the run's own randomness
        return ids[np.lexsort((ties, -last))[:count]]

    def observe(self, feedback: fs.sampling.Feedback) -> None:
        self.losses.update(feedback.losses)

    def state_dict(self) -> dict[str, Any]:  # so that a killed run can go on
        return {"losses": {str(client): loss for client, loss in self.losses.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = {int(client): loss for client, loss in state["losses"].items()}


if __name__ == "__main__":
    config = fs.Config(algorithm="fedca", rounds=5)
    history = fs.run(config, sampler=HighestLossSampler())
    print(f"accuracy after {config.rounds} rounds: {history.accuracy[-1]:.3f}")
