"""Samplers and filters by name, to put in place of an algorithm's own: where each comes from and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsieve.algorithms import OURS, PAPER, Options
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import (
    Bulyan,
    CombinatorialFilter,
    CoordinateMedian,
    ErrorRejection,
    FLTrust,
    GeometricMedian,
    KeepAll,
    Krum,
    LearnedAveraging,
    LossRejection,
    ModelFilter,
    MultiKrum,
    NormClipping,
    TrimmedMean,
    UnionRejection,
)
from fedsieve.sampling import (
    AgnosticSampler,
    ClientSampler,
    CSUCBQSampler,
    CSUCBSampler,
    FavorSampler,
    FedCSSampler,
    Memory,
    OortSampler,
    PowerOfChoiceSampler,
    ProportionalSampler,
    ThompsonSampler,
    UCBSampler,
    UniformSampler,
)
from fedsieve.sampling.favor import MAKE_ONE, Agent

Kind = TypeVar("Kind", ClientSampler, ModelFilter)


def _fedcs(options: Options) -> ClientSampler:
    if options.deadline is None:
        raise InvalidSetting("deadline", None, "a number of seconds with fedcs")
    return FedCSSampler(options.deadline)


def _favor(options: Options) -> ClientSampler:
    if options.favor_agent is None:
        raise InvalidSetting("favor_agent", None, f"with favor {MAKE_ONE}")
    return FavorSampler(Agent.load(options.favor_agent))


DISCOUNT, WINDOW = 0.95, 20  # of bandits that forget: about 20 rounds count


@dataclass(frozen=True)
class Part(Generic[Kind]):
    """How to make a sampler or filter, and what it needs.

    With a sampler that goes `by_size` the plain mean of models is the average its source means: with weights p_k, large
    clients would count twice.
    `times` needs a system model, `deadline` a round's, `losses` clients that say how well the current model does on
    their data, `validation` examples at the server, `agent` a file made by pre-training; `models` is how many have to
    come back for one that is assumed to lie and how many more: (2, 3) is 2f + 3.
    """

    make: Callable[[Options], Kind]
    source: str
    times: bool = False
    deadline: bool = False
    losses: bool = False
    validation: bool = False
    agent: bool = False
    models: tuple[int, int] = (0, 1)
    by_size: bool = False

    @property
    def assumes_liars(self) -> bool:
        """Whether it has to be told how many may lie in a round."""
        return self.models[0] > 0

    @property
    def needs(self) -> str:
        """In words."""
        per_liar, more = self.models
        count = f"{per_liar if per_liar > 1 else ''}f + {more} models" if per_liar else ""
        said = {
            "--system": self.times,
            "--deadline": self.deadline,
            "losses from clients": self.losses,
            "validation data": self.validation,
            "--favor-agent": self.agent,
            count: count,
        }
        return ", ".join(name for name, needed in said.items() if needed) or "–"


SAMPLERS: dict[str, Part[ClientSampler]] = {
    "uniform": Part(lambda options: UniformSampler(), "McMahan et al. 2017"),
    "proportional": Part(lambda options: ProportionalSampler(), "Li et al. 2020 (MLSys)", by_size=True),
    "ucb": Part(lambda options: UCBSampler(refresh=options.refresh), PAPER),
    "thompson": Part(lambda options: ThompsonSampler(refresh=options.refresh), PAPER),
    "discounted-ucb": Part(
        lambda options: UCBSampler(options.refresh, memory=Memory(DISCOUNT)), "Garivier & Moulines 2011"
    ),
    "window-ucb": Part(
        lambda options: UCBSampler(options.refresh, memory=Memory(window=WINDOW)), "Garivier & Moulines 2011"
    ),
    "discounted-thompson": Part(
        lambda options: ThompsonSampler(options.refresh, memory=Memory(DISCOUNT)), "Raj & Kalyani 2017"
    ),
    "window-thompson": Part(
        lambda options: ThompsonSampler(options.refresh, memory=Memory(window=WINDOW)), "Trovò et al. 2020"
    ),
    "power-of-choice": Part(lambda options: PowerOfChoiceSampler(), "Cho et al. 2020", by_size=True),
    "power-of-choice-exact": Part(
        lambda options: PowerOfChoiceSampler(losses="exact"), "Cho et al. 2020", losses=True, by_size=True
    ),
    "power-of-choice-batch": Part(
        lambda options: PowerOfChoiceSampler(losses="mini-batch"), "Cho et al. 2020", losses=True, by_size=True
    ),
    "oort": Part(lambda options: OortSampler(), "Lai et al. 2021", times=True),
    "fedcs": Part(_fedcs, "Nishio & Yonetani 2019", times=True, deadline=True),
    "cs-ucb": Part(lambda options: CSUCBSampler(), "Xia et al. 2020", times=True),
    "cs-ucb-q": Part(lambda options: CSUCBQSampler(options.ratio / 2), "Xia et al. 2020", times=True),
    "agnostic": Part(lambda options: AgnosticSampler(), "Mohri et al. 2019", by_size=True),
    "favor": Part(_favor, "Wang et al. 2020", agent=True),
}

FILTERS: dict[str, Part[ModelFilter]] = {
    "all": Part(lambda options: KeepAll(), "–"),
    "combinatorial": Part(
        lambda options: CombinatorialFilter(options.score, options.scored_by, options.search), PAPER, validation=True
    ),
    "learned": Part(lambda options: LearnedAveraging(), OURS, validation=True),
    "krum": Part(lambda options: Krum(options.byzantine), "Blanchard et al. 2017", models=(2, 3)),
    "multi-krum": Part(lambda options: MultiKrum(options.byzantine), "Blanchard et al. 2017", models=(2, 3)),
    "bulyan": Part(lambda options: Bulyan(options.byzantine), "El Mhamdi et al. 2018", models=(4, 3)),
    "median": Part(lambda options: CoordinateMedian(), "Yin et al. 2018"),
    "trimmed-mean": Part(
        lambda options: TrimmedMean(options.byzantine / options.per_round), "Yin et al. 2018", models=(2, 1)
    ),
    "geometric-median": Part(lambda options: GeometricMedian(), "Pillutla et al. 2019"),
    "norm-clipping": Part(lambda options: NormClipping(), "Sun et al. 2019"),
    "fltrust": Part(lambda options: FLTrust(rate=options.lr), "Cao et al. 2021", validation=True),
    "loss-rejection": Part(
        lambda options: LossRejection(options.byzantine), "Fang et al. 2020", validation=True, models=(1, 1)
    ),
    "error-rejection": Part(
        lambda options: ErrorRejection(options.byzantine), "Fang et al. 2020", validation=True, models=(1, 1)
    ),
    "union-rejection": Part(
        lambda options: UnionRejection(options.byzantine), "Fang et al. 2020", validation=True, models=(2, 1)
    ),
}


def check_needs(field: str, name: str, part: Part[Kind], options: Options, system: bool, validation: int) -> None:
    """Raise, before a run begins, if a part can't have what it needs."""
    if part.times and not system:
        raise InvalidSetting(field, name, "it with --system drawn or a CSV file: it looks at times")
    if part.validation and not validation:
        raise InvalidSetting("validation_per_class", 0, f"at least 1 with {name}, which needs them")
    per_liar, more = part.models
    if options.per_round < per_liar * options.byzantine + more:
        why = f"{name} needs {part.needs.split(', ')[-1]}, and {options.per_round} are asked for"
        if options.per_round < more:
            raise InvalidSetting(field, name, f"another, or a higher ratio: {why}")
        most = (options.per_round - more) // per_liar
        raise InvalidSetting("byzantine", options.byzantine, f"{f'at most {most}' if most else '0'}: {why}")


def check_own(sampler: object, filter: object, averaging: object) -> None:
    """Raise if what was given in place of a part can't be one; None stands for nothing given."""
    if not isinstance(sampler, ClientSampler | None):
        raise InvalidSetting("sampler", sampler, "a ClientSampler, such as fedsieve.sampling.UniformSampler()")
    if not isinstance(filter, ModelFilter | None):
        raise InvalidSetting("filter", filter, "a ModelFilter, such as fedsieve.filtering.KeepAll()")
    if averaging is not None and not callable(averaging):
        raise InvalidSetting("averaging", averaging, "a function of Kept to Coefficients, such as averaging.fedpdp")
