"""How many models may lie: the one setting that most robust rules share."""

from __future__ import annotations

from numbers import Integral

from fedsieve.errors import InvalidSetting, TooFewUpdates
from fedsieve.filtering.base import Candidates


def count_of(field: str, value: int, least: int = 0) -> int:
    """A whole number from `least` up, or an error that names the field."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidSetting(field, value, f"a whole number from {least} up")
    return int(value)


def liars_among(models: int, candidates: Candidates, byzantine: int, times: int, more: int) -> int:
    """How many of n `models` are assumed to lie, by a rule that needs n ≥ `times` · f + `more`.

    f = `byzantine`, unless too few are left for it. Then as many as the rule can stand, if the difference is made up by
    clients that sent no model at all: they were among the f.
    """
    most = (models - more) // times
    if most < max(0, byzantine - candidates.nonsense):
        needed = f"n ≥ {'' if times == 1 else times}f + {more}"
        raise TooFewUpdates(f"{models} usable models, {needed} needed with f = byzantine = {byzantine}")
    return min(byzantine, most)
