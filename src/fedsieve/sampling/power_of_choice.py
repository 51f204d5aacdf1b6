"""Power-of-choice: the clients of highest loss among a few drawn by weight (Cho et al. 2020, arXiv 2010.01243)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting, unknown_name
from fedsieve.randomness import keys
from fedsieve.sampling.base import Beliefs, Feedback, Ids, sorted_ids
from fedsieve.sampling.ledger import Ledger, of_clients
from fedsieve.sampling.weighted import WeightedSampler, drawn_by_weight

Losses = Literal["last", "exact", "mini-batch"]


class PowerOfChoiceSampler(WeightedSampler):
    """Draws d candidates without replacement by p_k, then asks those among them whose loss is highest.

    `losses="last"` (π_rpow-d) takes the mean training loss of the round in which a client was last asked; a client
    never asked comes first, and one that was asked but has never answered comes last: with the default of d that is
    hardly ever again. `"exact"` (π_pow-d) and `"mini-batch"` (π_cpow-d, of `mini_batch` examples) call `local_losses`
    for the candidates, which whoever runs the federation sets; who has no loss to tell comes last. Ties are broken at
    random. `candidates` is d; by default twice as many as are asked. With d as large as the population only losses
    decide.
    """

    notation = "highest loss among d drawn by p_k, without replacement"
    uses_prior_knowledge = True

    def __init__(
        self, candidates: int | None = None, losses: Losses = "last", seed: int = 0, mini_batch: int = 64
    ) -> None:
        super().__init__(seed)
        if candidates is not None and candidates < 1:
            raise InvalidSetting("candidates", candidates, "1 or more")
        if losses not in get_args(Losses):
            raise unknown_name("losses", losses, get_args(Losses))
        if mini_batch < 1:
            raise InvalidSetting("mini_batch", mini_batch, "1 or more examples")
        self.candidates = candidates
        self.losses = losses
        self.needs_losses = losses != "last"
        self.mini_batch = mini_batch
        self._last = Ledger("loss")

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed and weights."""
        super().begin(seed, clients, weights)
        self._last = Ledger("loss")

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` different clients, sorted."""
        ids = sorted_ids(clients, count)
        if self.candidates is not None and self.candidates < count:
            raise InvalidSetting("candidates", self.candidates, f"{count} or more, as many as are asked")
        if self.needs_losses and self.local_losses is None:
            raise InvalidSetting("losses", self.losses, "'last', or set local_losses")
        size = min(2 * count if self.candidates is None else self.candidates, ids.size)
        if count == 0:
            return ids[:0]
        drawn = drawn_by_weight(self.seed, "power of choice", round, ids, self._weights_of(ids), size)
        candidates = ids[drawn]
        ties = keys(self.seed, "power of choice ties", round, candidates)
        by_loss = np.lexsort((ties, self._losses_of(round, candidates)))
        return np.sort(candidates[by_loss[size - count :]])

    def observe(self, feedback: Feedback) -> None:
        """Take the losses of those who answered."""
        asked = np.unique(np.asarray(feedback.sampled, dtype=np.int64))
        self._last.write(asked[~self._last.known(asked)], loss=-np.inf)
        answered, losses = of_clients(feedback.losses)
        self._last.write(answered, loss=losses)

    def beliefs(self, round: int) -> Beliefs:
        """The last loss of those who have answered, as certain as it is old."""
        answered = np.isfinite(self._last.columns["loss"])
        return Beliefs(self._last.clients[answered], self._last.columns["loss"][answered], np.zeros(answered.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Last losses by client; None for a client that has never answered."""
        losses = [loss if np.isfinite(loss) else None for loss in self._last.columns["loss"].tolist()]
        return {"clients": self._last.clients.tolist(), "loss": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        losses = [-np.inf if loss is None else loss for loss in state["loss"]]
        self._last.load_state_dict({"clients": state["clients"], "loss": losses})

    def _losses_of(self, round: int, candidates: Ids) -> NDArray[np.float64]:
        if self.losses == "last" or self.local_losses is None:
            return self._last.read("loss", candidates, np.inf)
        losses = np.asarray(
            self.local_losses(round, candidates, self.mini_batch if self.losses == "mini-batch" else None),
            dtype=np.float64,
        )
        if losses.shape != candidates.shape:
            raise InvalidSetting("local_losses", losses.shape, f"one loss for each of {candidates.size} candidates")
        return np.where(np.isnan(losses), -np.inf, losses)
