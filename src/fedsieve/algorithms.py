"""The paper's Table 1 as data: each algorithm is one line: sampler + objective + filter + averaging scheme.

Below the paper's own stand ours, and the baselines of a sceptic, who would rather train on the validation data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedsieve.averaging import Scheme, fedavg, fedpdp, mean
from fedsieve.clients import Objective, Plain, Proximal
from fedsieve.errors import unknown_name
from fedsieve.filtering import CombinatorialFilter, FineTuning, KeepAll, LearnedAveraging, ModelFilter
from fedsieve.filtering.combinatorial import ScoredBy, Search
from fedsieve.filtering.scores import Score
from fedsieve.sampling import ClientSampler, ProportionalSampler, ThompsonSampler, UCBSampler, UniformSampler
from fedsieve.sampling.bandit import Refresh


@dataclass(frozen=True)
class Options:
    """What the text leaves open or a study varies; each algorithm reads those it has a use for."""

    lr: float = 0.05
    mu: float = 0.1
    score: Score = "accuracy"
    scored_by: ScoredBy = "logits"
    coefficients: str = "normalised"
    refresh: Refresh = "fresh"
    search: Search = "auto"
    ratio: float = 0.4
    per_round: int = 8
    byzantine: int = 0
    deadline: float | None = None
    favor_agent: Path | None = None


@dataclass(frozen=True)
class Algorithm:
    """How to make the four parts of an algorithm from its options."""

    title: str
    sampler: Callable[[Options], ClientSampler]
    objective: Callable[[Options], Objective]
    filter: Callable[[Options], ModelFilter]
    averaging: Callable[[Options], Scheme]
    source: str
    at_server: bool = False
    """Whether no client is asked: the server trains on its validation data, as one client would."""
    server_trains: bool = False
    """Whether the server's validation data is one more client, which takes part in every round."""

    @property
    def trains_on_validation(self) -> bool:
        """Whether validation data is training data, alone or beside the clients'."""
        return self.at_server or self.server_trains

    def row(self) -> dict[str, Any]:
        """This algorithm's row of Table 1, read off the parts themselves."""
        options = Options()
        sampler, scheme, filter = self.sampler(options), self.averaging(options), self.filter(options)
        averaging = filter.formula or _formula(scheme, "S_opt" if filter.chooses else "S_t")
        return {
            "title": self.title,
            "model_filter": filter.chooses,
            "prior_knowledge": sampler.uses_prior_knowledge,
            "sampling": "nobody: the server's validation data" if self.at_server else sampler.notation,
            "objective": type(self.objective(options)).__name__.lower(),
            "averaging": "–" if self.at_server else f"{averaging}{', the server among them' * self.server_trains}",
            "source": self.source,
        }


def _uniform(options: Options) -> ClientSampler:
    return UniformSampler()


def _proportional(options: Options) -> ClientSampler:
    return ProportionalSampler()


def _ucb(options: Options) -> ClientSampler:
    return UCBSampler(refresh=options.refresh)


def _thompson(options: Options) -> ClientSampler:
    return ThompsonSampler(refresh=options.refresh)


def _plain(options: Options) -> Objective:
    return Plain()


def _proximal(options: Options) -> Objective:
    return Proximal(options.mu)


def _keep_all(options: Options) -> ModelFilter:
    return KeepAll()


def _best_subset(options: Options) -> ModelFilter:
    return CombinatorialFilter(options.score, options.scored_by, options.search)


def _learned(options: Options) -> ModelFilter:
    return LearnedAveraging()


def _fine_tuning(options: Options) -> ModelFilter:
    return FineTuning(rate=2 * options.lr)  # its batches are larger than a client's


def _learned_and_tuned(options: Options) -> ModelFilter:
    return FineTuning(LearnedAveraging(), rate=2 * options.lr)


def _fedavg(options: Options) -> Scheme:
    return fedavg


def _mean(options: Options) -> Scheme:
    return mean


def _fedpdp(options: Options) -> Scheme:
    if options.coefficients == "mean":
        return mean
    return partial(fedpdp, normalise=options.coefficients == "normalised")


PAPER = "Kim et al. 2020 (arXiv 2012.03270)"
OURS = "this project: weights learned on validation data"

ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": Algorithm("FedAvg", _uniform, _plain, _keep_all, _fedavg, "McMahan et al. 2017"),
    "fedprox": Algorithm("FedProx", _proportional, _proximal, _keep_all, _mean, "Li et al. 2020 (MLSys)"),
    "fedpdp": Algorithm("FedPdp", _uniform, _plain, _keep_all, _fedpdp, "Li et al. 2019 (arXiv 1907.02189)"),
    "fedca": Algorithm("FedCA", _uniform, _plain, _best_subset, _fedpdp, PAPER),
    "fedprox-ca": Algorithm("FedProx-CA", _proportional, _proximal, _best_subset, _mean, PAPER),
    "fedcm-ucb": Algorithm("FedCM-UCB", _ucb, _plain, _best_subset, _fedpdp, PAPER),
    "fedcm-ts": Algorithm("FedCM-TS", _thompson, _plain, _best_subset, _fedpdp, PAPER),
    "fedsieve": Algorithm("FedSieve", _uniform, _plain, _learned, _fedpdp, OURS),
    "fedsieve-ucb": Algorithm("FedSieve-UCB", _ucb, _plain, _learned, _fedpdp, OURS),
    "fedsieve-ts": Algorithm("FedSieve-TS", _thompson, _plain, _learned, _fedpdp, OURS),
    "fedsieve-finetune": Algorithm("FedSieve, fine-tuned", _uniform, _plain, _learned_and_tuned, _fedpdp, OURS),
    "server-only": Algorithm(
        "Server only", _uniform, _plain, _keep_all, _fedpdp, "what a validation set is worth without clients", True
    ),
    "fedpdp-finetune": Algorithm(
        "FedPdp, fine-tuned", _uniform, _plain, _fine_tuning, _fedpdp, "what it is worth to train on beside them"
    ),
    "fedpdp-server-client": Algorithm(
        "FedPdp with the server",
        _uniform,
        _plain,
        _keep_all,
        _fedpdp,
        "what it is worth as one more client",
        server_trains=True,
    ),
}


def find(name: str) -> Algorithm:
    """The algorithm called `name`."""
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def table() -> list[dict[str, Any]]:
    """Table 1, one row per algorithm."""
    return [{"name": name} | algorithm.row() for name, algorithm in ALGORITHMS.items()]


def _formula(scheme: Scheme, chosen: str) -> str:
    function = scheme.func if isinstance(scheme, partial) else scheme
    return {
        "fedavg": f"Σ_{{k∉{chosen}}} p_k w + Σ_{{k∈{chosen}}} p_k w_k",
        "mean": f"1/|{chosen}| Σ_{{k∈{chosen}}} w_k",
        "fedpdp": f"Σ_{{k∈{chosen}}} p_k |S|/|{chosen}| w_k, normalised",
    }[function.__name__]
