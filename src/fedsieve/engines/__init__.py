"""Where clients run."""

from fedsieve.engines.base import Engine, Judge, Update
from fedsieve.engines.lanes import LanesEngine
from fedsieve.engines.sequential import SequentialEngine
from fedsieve.engines.workers import WorkersEngine

__all__ = ["Engine", "Judge", "LanesEngine", "SequentialEngine", "Update", "WorkersEngine"]
