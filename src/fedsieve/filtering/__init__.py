"""Whom to believe: the filters, and the base class for your own."""

from fedsieve.filtering.base import Candidates, KeepAll, ModelFilter, Selection
from fedsieve.filtering.combinatorial import CombinatorialFilter
from fedsieve.filtering.scores import accuracy, log_likelihood

__all__ = [
    "Candidates",
    "CombinatorialFilter",
    "KeepAll",
    "ModelFilter",
    "Selection",
    "accuracy",
    "log_likelihood",
]
