"""Oort's training selector: Algorithm 1 of Lai, Zhu, Madhyastha & Chowdhury (OSDI 2021).

What differs from the paper, and why:

- The statistical utility |B_i| √(Σ loss² / |B_i|) needs the loss of every sample. Clients report the mean of their
  losses, so that |B_i| · |mean loss| stands for it: never more (Jensen), and the same where samples agree.
- Sizes |B_i| are known up to a factor, as the weights p_k. Utilities are therefore measured in units of their 95th
  percentile, at which they are clipped; otherwise the unit of size would decide what the bonus for staleness weighs.
  (The authors' program scales them from lowest to highest instead.)
- The pacer looks once in every W rounds, as the authors' program does. Looking in every round, it would raise T every
  time while the loss falls, which it does all along. It raises T when the utility of all who answered has fallen, as
  in the paper; the program when that of those it chose by utility is flat, and it lowers T too.
- A client that was asked and did not answer counts as tried, with the mean utility of those who did and the time that
  its device takes, or the longest known; the program does so with clients that were too slow, and leaves alone those
  that dropped out. Where that time is no hindrance, such a client would be asked for ever: the mean therefore counts
  by how often the client answers, (answers + 1) / (times asked + 1).
- As in that program, clients are banned for having been asked very often only if that is set. Here it is only while as
  many others are there as are needed; the program bans a limited share of all.
- The paper's knob for fairness is not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.sampling.base import Beliefs, Feedback, Ids, sorted_ids
from fedsieve.sampling.ledger import Ledger, of_clients
from fedsieve.sampling.weighted import WeightedSampler, drawn_by_weight

FIRST_EXPLORATION, EXPLORATION_DECAY, LEAST_EXPLORATION = 0.9, 0.98, 0.2
CLIPPED_ABOVE = 0.95
CUT_OFF = 0.95


class OortSampler(WeightedSampler):
    """Asks clients with much to learn from that are not too slow, and a share of clients never tried.

    A client slower than the preferred duration T loses utility by (T / its duration)^`penalty`. T begins at
    `pacer_step` seconds and grows by as much when the last `pacer_window` rounds brought less utility than as many
    before; a step that isn't given is the median duration in the first round that has any. Clients never tried are
    drawn by speed where it is known from `device_times`, else uniformly. Who has been asked in more than `most_rounds`
    rounds is not asked again, if anybody else can be.
    """

    notation = "by utility, and untried ones by speed, without replacement"
    uses_prior_knowledge = True

    def __init__(
        self,
        penalty: float = 2.0,
        pacer_step: float | None = None,
        pacer_window: int = 20,
        seed: int = 0,
        most_rounds: int | None = None,
    ) -> None:
        super().__init__(seed)
        if not penalty >= 0:
            raise InvalidSetting("penalty", penalty, "0 or more")
        if pacer_step is not None and not pacer_step > 0:
            raise InvalidSetting("pacer_step", pacer_step, "a number of seconds above 0")
        if pacer_window < 1:
            raise InvalidSetting("pacer_window", pacer_window, "1 or more rounds")
        if most_rounds is not None and most_rounds < 1:
            raise InvalidSetting("most_rounds", most_rounds, "1 or more rounds")
        self.penalty = penalty
        self.pacer_window = pacer_window
        self.most_rounds = most_rounds
        self.pacer_step = pacer_step
        self._forget()

    def begin(self, seed: int, clients: Ids, weights: NDArray[np.float64]) -> None:
        """Take the run's seed and weights."""
        super().begin(seed, clients, weights)
        self._forget()

    def _forget(self) -> None:
        self._step = self._preferred = self.pacer_step
        self._tried = Ledger("loss", "round", "duration", "rounds", "answers")
        self._observed = 0
        self._round_utilities: list[float] = []

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """`count` different clients, sorted: (1 - ε) of them by utility, the others never tried before."""
        ids = sorted_ids(clients, count)
        known = self._tried.known(ids)
        untried = ids[~known]
        tried = self._not_banned(ids[known], count - untried.size)
        exploited = min(math.floor((1 - exploration(round)) * count + 0.5), tried.size)
        exploited = max(exploited, count - untried.size)
        pool, utilities = self._worth_asking(round, tried, exploited)
        familiar = pool[drawn_by_weight(self.seed, "oort exploitation", round, pool, utilities, exploited)]
        new = untried[
            drawn_by_weight(self.seed, "oort exploration", round, untried, self._speeds(untried), count - exploited)
        ]
        return np.sort(np.concatenate([familiar, new]))

    def observe(self, feedback: Feedback) -> None:
        """Take loss, time and round of those who answered, what stands for that of the others, then pace."""
        answered, losses = of_clients(feedback.losses)
        failed = np.setdiff1d(np.asarray(feedback.sampled, dtype=np.int64), answered)
        answers = self._tried.read("answers", answered, 0.0) + 1
        self._write_asked(feedback.round, answered, loss=np.abs(losses), answers=answers)
        self._write_asked(feedback.round, failed, loss=self._losses_of_failed(failed, self._utility(answered)))
        timed, durations = of_clients(feedback.durations)
        there = self._tried.known(timed)
        self._tried.write(timed[there], duration=durations[there])
        untimed = np.setdiff1d(failed, timed)
        self._tried.write(untimed, duration=self._durations_of_failed(untimed))
        if self._step is None and durations.size and np.median(durations) > 0:
            self._step = self._preferred = float(np.median(durations))
        self._pace(float(self._utility(answered).sum()))

    def utilities(self, round: int, clients: Ids) -> NDArray[np.float64]:
        """Util(i) [n] of tried `clients` [n] (Algorithm 1, exploitation #1), in units of the 95th percentile of U."""
        if clients.size == 0:
            return np.empty(0)
        utility = self._utility(clients)
        last = self._tried.read("round", clients, 1.0)
        duration = self._tried.read("duration", clients, 0.0)
        top = np.quantile(utility, CLIPPED_ABOVE)
        total = np.minimum(utility / top, 1.0) if top > 0 else np.zeros(clients.size)
        total += np.sqrt(0.1 * math.log(round) / last)
        if self._preferred is not None:
            slow = duration > self._preferred
            total[slow] *= (self._preferred / duration[slow]) ** self.penalty
        return total

    def beliefs(self, round: int) -> Beliefs:
        """The utility of tried clients, and the part of it that staleness makes up at most."""
        bonus = np.sqrt(0.1 * math.log(round) / self._tried.columns["round"])
        return Beliefs(self._tried.clients, self.utilities(round, self._tried.clients), bonus)

    def state_dict(self) -> dict[str, Any]:
        """Tried clients and the pacer."""
        return {
            **self._tried.state_dict(),
            "step": self._step,
            "preferred": self._preferred,
            "observed": self._observed,
            "round_utilities": list(self._round_utilities),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._tried.load_state_dict(state)
        self._step = state["step"]
        self._preferred = state["preferred"]
        self._observed = state["observed"]
        self._round_utilities = list(state["round_utilities"])

    def _utility(self, clients: Ids) -> NDArray[np.float64]:
        """U(i) [n]: |B_i| · |mean loss|, by the weights of now."""
        return self._weights_of(clients) * self._tried.read("loss", clients, 0.0)

    def _write_asked(self, round: int, clients: Ids, **values: NDArray[np.float64]) -> None:
        """Set columns of `clients` [n], who were asked in this round."""
        rounds = self._tried.read("rounds", clients, 0.0) + 1
        self._tried.write(clients, round=float(round), rounds=rounds, **values)

    def _losses_of_failed(self, failed: Ids, of_others: NDArray[np.float64]) -> NDArray[np.float64]:
        """Losses [n] that make the round's mean utility, by how often they answer.

        If nobody answered, it is the mean utility of all who ever have.
        """
        if not of_others.size:
            of_others = self._utility(self._tried.clients[self._tried.columns["answers"] > 0])
        answers, rounds = (self._tried.read(name, failed, 0.0) for name in ("answers", "rounds"))
        weights = self._weights_of(failed)
        utilities = float(of_others.mean() if of_others.size else 0.0) * (answers + 1) / (rounds + 2)
        return np.divide(utilities, weights, out=np.zeros(failed.size), where=weights > 0)

    def _durations_of_failed(self, failed: Ids) -> NDArray[np.float64] | float:
        """What their devices take [n], or the longest duration known."""
        if self.device_times is not None:
            return sum(self.device_times(failed))
        return float(self._tried.columns["duration"].max(initial=0.0))

    def _not_banned(self, tried: Ids, needed: int) -> Ids:
        """Those who have not been asked too often, or everybody if they are fewer than `needed`."""
        if self.most_rounds is None:
            return tried
        others = tried[self._tried.read("rounds", tried, 0.0) <= self.most_rounds]
        return others if others.size >= needed else tried

    def _speeds(self, untried: Ids) -> NDArray[np.float64]:
        """Rounds a second [n]; the same for all where nothing is known of that."""
        if self.device_times is None:
            return np.ones(untried.size)
        return 1 / np.maximum(sum(self.device_times(untried)), np.finfo(np.float64).tiny)

    def _worth_asking(self, round: int, tried: Ids, count: int) -> tuple[Ids, NDArray[np.float64]]:
        """Those of at least 95 % of the `count`-th highest utility, and their utilities (exploitation #2)."""
        if count == 0:
            return tried[:0], np.empty(0)
        utilities = self.utilities(round, tried)
        weakest = np.partition(utilities, tried.size - count)[tried.size - count]
        enough = utilities >= CUT_OFF * weakest
        return tried[enough], utilities[enough]

    def _pace(self, utility: float) -> None:
        """T ← T + Δ when Σ U(R-2W : R-W) > Σ U(R-W : R)."""
        window = self.pacer_window
        self._observed += 1
        self._round_utilities = [*self._round_utilities, utility][-2 * window :]
        if self._observed < 2 * window or self._observed % window:
            return
        falling = sum(self._round_utilities[:window]) > sum(self._round_utilities[window:])
        if falling and self._step is not None and self._preferred is not None:
            self._preferred += self._step


def exploration(round: int) -> float:
    """ε, the share of untried clients in a round: 0.9 at first, times 0.98 in every round, at least 0.2."""
    return max(FIRST_EXPLORATION * EXPLORATION_DECAY ** (round - 1), LEAST_EXPLORATION)
