"""The paper's tables and figures, from one command, with its numbers beside ours."""

from fedsieve.reproduction.grid import TARGETS, Study, find_targets
from fedsieve.reproduction.reproduce import Reproduction, write_up

__all__ = ["TARGETS", "Reproduction", "Study", "find_targets", "write_up"]
