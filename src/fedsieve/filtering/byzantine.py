"""How many models may lie: the one setting that most robust rules share."""

from __future__ import annotations

from fedsieve.errors import InvalidSetting, TooFewUpdates


def count_of(field: str, value: int, least: int = 0) -> int:
    """A whole number from `least` up, or an error that names the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSetting(field, value, f"a whole number from {least} up")
    return value


def check_enough(models: int, byzantine: int, times: int, more: int) -> None:
    """Refuse a round of n `models` in which n ≥ `times` · f + `more` does not hold, f being `byzantine`."""
    if models < times * byzantine + more:
        needed = f"n ≥ {'' if times == 1 else times}f + {more}"
        raise TooFewUpdates(f"{models} usable models, {needed} needed with f = byzantine = {byzantine}")
