"""Seconds and bytes as people write them."""

from __future__ import annotations

TIME = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))
SIZE = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))

Units = tuple[tuple[str, float], ...]


def unit_for(value: float, units: Units) -> tuple[str, float]:
    """The largest unit of which the value is at least two, else the smallest: its name and size."""
    return next((unit for unit in reversed(units) if value >= 2 * unit[1]), units[0])


def written(value: float, units: Units) -> str:
    """With three digits and the unit that suits it."""
    name, size = unit_for(value, units)
    amount = value / size
    return f"{amount:.{max(0, 3 - len(str(int(amount))))}f} {name}"
