"""Agnostic federated learning: the mixture of clients that is worst for the model (Mohri, Sivek & Suresh 2019).

The model learns on the mixture Σ λ_k D_k of the clients' data while λ climbs towards higher loss: a step along the
losses, then back onto the simplex (Stochastic-AFL). Only clients that were asked report a loss. It is divided by the
chance of being asked, so that the step is right on average while all can be reached and answer; who often can't loses
weight, as if its loss were 0. A loss is the mean over a client's training, where the paper's is that of the model
before; a round's model is an average of models, where the paper takes one step; and what comes out is the last model,
not the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.randomness import generator
from fedsieve.sampling.base import Beliefs, ClientSampler, Feedback, Ids, sorted_ids
from fedsieve.sampling.ledger import Ledger, of_clients


class AgnosticSampler(ClientSampler):
    """Draws each of the `count` places independently, client k with probability (1 - ε) λ_k + ε / n among those there.

    λ starts at the weights p_k and moves by `step` times the losses; by 0.01 / n unless given, a hundredth of an equal
    share: what suits a few domains, as in the paper, would throw λ from one client to the next among hundreds. With
    ε = `exploration` of 0 clients are drawn by λ alone, as in the paper; a client whose λ_k has fallen to 0 would then
    never be asked again, and so never report that the model has become bad for it. Who joins later starts at 0. A
    client drawn twice is returned twice: it trains once and counts twice in the mean.
    """

    notation = "λ_k, with replacement"
    uses_prior_knowledge = True

    def __init__(self, step: float | None = None, exploration: float = 0.1, seed: int = 0) -> None:
        if step is not None and not step > 0:
            raise InvalidSetting("step", step, "a number above 0")
        if not 0 <= exploration <= 1:
            raise InvalidSetting("exploration", exploration, "a number from 0 to 1")
        self.step = step
        self.exploration = exploration
        self.seed = seed
        self._mixture = Ledger("lambda")
        self._there: tuple[int, Ids] | None = None

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed, and its weights as the first λ."""
        super().begin(seed, clients, weights)
        if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.sum() > 0:
            raise InvalidSetting("weights", weights.tolist(), "finite numbers, none negative and some positive")
        order = np.argsort(clients, kind="stable")
        self._mixture = Ledger("lambda")
        self._mixture.write(clients[order], **{"lambda": weights[order] / weights.sum()})

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` clients, sorted, some perhaps more than once."""
        ids = sorted_ids(clients, count, with_replacement=True)
        if count == 0:
            return ids[:0]
        self._there = (round, ids)
        cumulative = np.cumsum(self.chances(ids))
        places = generator(self.seed, "agnostic sampler", round).random(count) * cumulative[-1]
        drawn: Ids = ids[np.sort(np.searchsorted(cumulative, places, side="right"))]
        return drawn

    def chances(self, clients: Ids) -> NDArray[np.float64]:
        """How likely each of `clients` [n] is to get a place when exactly they are there [n]; even if all λ_k are 0."""
        mixture = self._mixture.read("lambda", clients, 0.0)
        total = mixture.sum()
        even = np.full(clients.size, 1 / clients.size)
        return (1 - self.exploration) * mixture / total + self.exploration * even if total > 0 else even

    def observe(self, feedback: Feedback) -> None:
        """λ ← the point of the simplex nearest to λ + step · gradient, which is loss · times drawn / (places · chance).

        Without word of who was there in that round, it is taken to be everybody known.
        """
        asked, times = np.unique(np.asarray(feedback.sampled, dtype=np.int64), return_counts=True)
        there = self._there[1] if self._there is not None and self._there[0] == feedback.round else asked[:0]
        if not np.isin(asked, there).all():
            there = np.union1d(self._mixture.clients, asked)
        answered, losses = of_clients(feedback.losses)
        usable = np.isin(answered, asked)
        answered, losses = answered[usable], losses[usable]
        if answered.size == 0:
            return
        chance = self.chances(there)[np.searchsorted(there, answered)]
        drawable = chance > 0  # who says to be somebody who could not be drawn teaches nothing
        answered, losses, chance = answered[drawable], losses[drawable], chance[drawable]
        drawn = times[np.searchsorted(asked, answered)]
        before = self._mixture.read("lambda", answered, 0.0)
        step = 0.01 / max(1, self._mixture.clients.size) if self.step is None else self.step
        ahead = before + step * losses * drawn / (times.sum() * chance)
        self._mixture.write(answered, **{"lambda": ahead})
        self._mixture.columns["lambda"] = onto_simplex(self._mixture.columns["lambda"])

    def beliefs(self, round: int) -> Beliefs:
        """λ."""
        return Beliefs(
            self._mixture.clients, self._mixture.columns["lambda"].copy(), np.zeros(self._mixture.clients.size)
        )

    def state_dict(self) -> dict[str, Any]:
        """λ by client."""
        return self._mixture.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._mixture.load_state_dict(state)


def onto_simplex(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point [n] with no negative part and sum 1 (Held, Wolfe & Crowder 1974): all fall by one amount.

    That amount is such that the parts still positive sum to 1; sorting finds how many those are.
    """
    falling = np.sort(point)[::-1]
    amounts = (np.cumsum(falling) - 1) / np.arange(1, point.size + 1)
    positive = np.count_nonzero(falling > amounts)
    nearest: NDArray[np.float64] = np.maximum(point - amounts[positive - 1], 0.0)
    return nearest
