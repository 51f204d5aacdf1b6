"""Where clients run."""

from fedsieve.engines.base import Engine, Update
from fedsieve.engines.sequential import SequentialEngine

__all__ = ["Engine", "SequentialEngine", "Update"]
