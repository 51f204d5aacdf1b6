"""Whom to believe: the filters, and the base class for your own."""

from fedsieve.filtering.base import Candidates, KeepAll, ModelFilter, Selection
from fedsieve.filtering.combinatorial import CombinatorialFilter
from fedsieve.filtering.coordinates import CoordinateMedian, TrimmedMean
from fedsieve.filtering.fine_tuning import FineTuning
from fedsieve.filtering.geometric_median import GeometricMedian
from fedsieve.filtering.krum import Bulyan, Krum, MultiKrum
from fedsieve.filtering.learned import LearnedAveraging
from fedsieve.filtering.rejection import ErrorRejection, LossRejection, UnionRejection
from fedsieve.filtering.scores import accuracy, log_likelihood
from fedsieve.filtering.updates import FLTrust, NormClipping

__all__ = [
    "Bulyan",
    "Candidates",
    "CombinatorialFilter",
    "CoordinateMedian",
    "ErrorRejection",
    "FLTrust",
    "FineTuning",
    "GeometricMedian",
    "KeepAll",
    "Krum",
    "LearnedAveraging",
    "LossRejection",
    "ModelFilter",
    "MultiKrum",
    "NormClipping",
    "Selection",
    "TrimmedMean",
    "UnionRejection",
    "accuracy",
    "log_likelihood",
]
