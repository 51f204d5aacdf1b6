"""Whom to ask: the samplers of the paper, others to compare with, and the base class for your own."""

from fedsieve.sampling.agnostic import AgnosticSampler
from fedsieve.sampling.bandit import BanditSampler
from fedsieve.sampling.base import Beliefs, ClientSampler, Feedback
from fedsieve.sampling.cs_ucb import CSUCBQSampler, CSUCBSampler
from fedsieve.sampling.favor import FavorSampler
from fedsieve.sampling.fedcs import FedCSSampler
from fedsieve.sampling.memory import Memory
from fedsieve.sampling.oort import OortSampler
from fedsieve.sampling.power_of_choice import PowerOfChoiceSampler
from fedsieve.sampling.proportional import ProportionalSampler
from fedsieve.sampling.thompson import ThompsonSampler
from fedsieve.sampling.ucb import UCBSampler
from fedsieve.sampling.uniform import UniformSampler

__all__ = [
    "AgnosticSampler",
    "BanditSampler",
    "Beliefs",
    "CSUCBQSampler",
    "CSUCBSampler",
    "ClientSampler",
    "FavorSampler",
    "FedCSSampler",
    "Feedback",
    "Memory",
    "OortSampler",
    "PowerOfChoiceSampler",
    "ProportionalSampler",
    "ThompsonSampler",
    "UCBSampler",
    "UniformSampler",
]
