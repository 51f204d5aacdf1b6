"""The paper's tables and figures and comparisons with the field, from one command."""

from fedsieve.reproduction.plans import ATTACKS, FIELD, PAPER, find_plan
from fedsieve.reproduction.reproduce import Reproduction, write_up
from fedsieve.reproduction.study import Plan, Study

__all__ = ["ATTACKS", "FIELD", "PAPER", "Plan", "Reproduction", "Study", "find_plan", "write_up"]
