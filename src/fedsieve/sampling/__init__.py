"""Whom to ask: the samplers of the paper, and the base class for your own."""

from fedsieve.sampling.bandit import BanditSampler
from fedsieve.sampling.base import Beliefs, ClientSampler, Feedback
from fedsieve.sampling.proportional import ProportionalSampler
from fedsieve.sampling.thompson import ThompsonSampler
from fedsieve.sampling.ucb import UCBSampler
from fedsieve.sampling.uniform import UniformSampler

__all__ = [
    "BanditSampler",
    "Beliefs",
    "ClientSampler",
    "Feedback",
    "ProportionalSampler",
    "ThompsonSampler",
    "UCBSampler",
    "UniformSampler",
]
