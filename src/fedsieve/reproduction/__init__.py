"""The paper's tables and figures, comparisons with the field and what validation data is worth, from one command."""

from fedsieve.reproduction.plans import ATTACKS, FIELD, OURS, PAPER, VALIDATION, find_plan
from fedsieve.reproduction.reproduce import Reproduction, write_up
from fedsieve.reproduction.study import Plan, Study

__all__ = ["ATTACKS", "FIELD", "OURS", "PAPER", "VALIDATION", "Plan", "Reproduction", "Study", "find_plan", "write_up"]
