"""How the learning rate changes over the rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int, int], float]
"""(round, rounds) to a factor of the learning rate; rounds count from 1."""


def constant(round: int, rounds: int) -> float:
    """Always 1."""
    return 1.0


def step(round: int, rounds: int) -> float:
    """1, then 0.1 after half of the rounds, then 0.01 after three quarters."""
    done = (round - 1) / rounds
    return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01


def cosine(round: int, rounds: int) -> float:
    """Half a cosine from 1 in the first round towards 0 after the last (Loshchilov & Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))


SCHEDULES: dict[str, Schedule] = {"constant": constant, "step": step, "cosine": cosine}
