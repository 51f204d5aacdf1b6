"""The searches of the combinatorial filter against brute force: what they find, what they prove, what they never claim.

The oracle is plain Python: every subset, example by example, with sums that are exact up to one rounding (math.fsum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import InvalidSetting, TooManyModels
from fedsieve.filtering import (
    Candidates,
    CombinatorialFilter,
    Selection,
    beam_search,
    branch_and_bound,
    exhaustive,
    subsets,
)
from fedsieve.filtering.combinatorial import Search
from fedsieve.filtering.relaxation import Relaxation, newton_step, project
from fedsieve.filtering.scores import Score
from fedsieve.filtering.subsets import Found, Problem

Numbers = NDArray[np.float64]
Members = tuple[int, ...]

TIE = 1e-9
SCORES: tuple[Score, ...] = ("accuracy", "cross-entropy")
SEARCHES: tuple[Search, ...] = ("auto", "exhaustive", "branch-and-bound", "beam")
both_scores = pytest.mark.parametrize("score", SCORES)
every_search = pytest.mark.parametrize("search", SEARCHES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny problems are quicker on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases(number: int) -> settings:
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Random rounds


@dataclass(frozen=True)
class Round:
    """Logits [models, examples, classes], labels [examples], and how often each model was drawn [models]."""

    logits: Numbers
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def models(self) -> int:
        return len(self.logits)

    def problem(self, score: Score) -> Problem:
        return Problem(
            torch.from_numpy(self.logits), torch.from_numpy(self.labels), score, torch.from_numpy(self.counts)
        )

    def candidates(self) -> Candidates:
        return Candidates(
            torch.from_numpy(self.logits),
            torch.from_numpy(self.labels),
            torch.full((self.models,), 1 / self.models),
            torch.from_numpy(self.counts),
        )


NUMBERS: dict[str, Callable[[np.random.Generator, tuple[int, int, int]], Numbers]] = {
    "few": lambda random, shape: random.integers(-1, 2, shape).astype(float),
    "whole": lambda random, shape: random.integers(-3, 4, shape).astype(float),
    "tenths": lambda random, shape: random.integers(-5, 6, shape) / 10,  # whose sums round: 0.1 + 0.2 > 0.3
    "votes": lambda random, shape: np.eye(shape[2])[random.integers(0, shape[2], shape[:2])],
    "real": lambda random, shape: random.normal(size=shape) * random.choice([0.1, 1, 4]),
    "loud": lambda random, shape: random.normal(size=shape) * np.exp(3 * random.normal(size=(shape[0], 1, 1))),
}
WITH_TIES = ("few", "whole", "tenths", "votes")
MODELS = ("own", "own", "own", "copy", "opposite", "constant", "knowing")


@st.composite
def rounds(draw: st.DrawFn, most_models: int = 8, kinds: tuple[str, ...] = tuple(NUMBERS)) -> Round:
    """Up to `most_models` models with ties, among them copies of others, their opposites, and constant ones."""
    models, examples, classes = draw(st.integers(1, most_models)), draw(st.integers(1, 6)), draw(st.integers(2, 4))
    kind, drawn_often = draw(st.sampled_from(kinds)), draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = NUMBERS[kind](random, (models, examples, classes))
    labels = random.integers(0, classes, examples)
    for model in range(models):
        match MODELS[random.integers(len(MODELS))]:
            case "copy":
                logits[model] = logits[random.integers(model + 1)]
            case "opposite":
                logits[model] = -logits[random.integers(model + 1)]
            case "constant":
                logits[model] = random.integers(-2, 3)
            case "knowing":
                logits[model, np.arange(examples), labels] += 1
    counts = random.integers(1, 4, models) if drawn_often else np.ones(models, dtype=np.int64)
    return Round(logits, labels, counts)


def a_round(models: int, examples: int = 30, classes: int = 3, seed: int = 0, knowledge: float = 0.5) -> Round:
    """One of the size asked for, without ties: noise, and a little knowledge that differs from model to model."""
    random = np.random.default_rng(seed)
    logits, labels = random.normal(size=(models, examples, classes)), random.integers(0, classes, examples)
    logits[:, np.arange(examples), labels] += knowledge * random.normal(1, 2, (models, 1))
    return Round(logits, labels, np.ones(models, dtype=np.int64))


# The oracle


def all_subsets(models: int) -> list[Members]:
    """Every subset, the preferred of two equally good ones first: fewer dropped, then lower positions."""
    return [kept for size in range(models, 0, -1) for kept in combinations(range(models), size)]


def number_of(members: Members) -> int:
    return sum(1 << member for member in members)


def decided(clearly: bool) -> None:
    """Leave out cases at the very edge of a tie, where rounding may say either."""
    if currently_in_test_context():
        assume(clearly)
    else:
        assert clearly


def right_answers(margins: list[Numbers], wins_ties: NDArray[np.bool_], examples: int, others: int) -> int:
    """On how many examples the margins [examples, others], summed, are below a tie, or at one that the label wins."""
    right = 0
    for example in range(examples):
        for other in range(others):
            total = math.fsum(margin[example, other] for margin in margins)
            decided(abs(abs(total) - TIE) > 1e-3 * TIE)
            if total > TIE or (wins_ties[example, other] and total >= -TIE):
                break
        else:
            right += 1
    return right


def margins_of(case: Round) -> tuple[list[Numbers], NDArray[np.bool_]]:
    """By how much each other class leads the label [models][examples, classes - 1], and whether it wins a tie."""
    classes = case.logits.shape[2]
    others = np.array([[c for c in range(classes) if c != label] for label in case.labels])
    rows = np.arange(len(case.labels))
    margins = [
        count * logits[rows[:, None], others] - (count * logits[rows, case.labels])[:, None]
        for logits, count in zip(case.logits, case.counts, strict=True)
    ]
    return margins, others < case.labels[:, None]


def accuracies(case: Round) -> dict[Members, float]:
    margins, wins_ties = margins_of(case)
    shape = wins_ties.shape
    return {
        kept: right_answers([margins[model] for model in kept], wins_ties, *shape) / shape[0]
        for kept in all_subsets(case.models)
    }


def log_likelihood_of(case: Round, kept: Members) -> float:
    drawn = int(case.counts[list(kept)].sum())
    terms = []
    for example, label in enumerate(case.labels):
        mean = [
            math.fsum(case.counts[k] * case.logits[k, example, c] for k in kept) / drawn
            for c in range(case.logits.shape[2])
        ]
        highest = max(mean)
        terms.append(mean[label] - highest - math.log(math.fsum(math.exp(logit - highest) for logit in mean)))
    return math.fsum(terms) / len(terms)


def brute_force(case: Round, score: Score) -> dict[Members, float]:
    """The score of every subset, in the order of preference."""
    if score == "accuracy":
        return accuracies(case)
    return {kept: log_likelihood_of(case, kept) for kept in all_subsets(case.models)}


def best_of(scores: dict[Members, float]) -> Members:
    """The first, so the preferred, of those within the width of a tie of the highest."""
    highest = max(scores.values())
    decided(not any(abs(highest - TIE - score) < 1e-3 * TIE for score in scores.values()))
    return next(kept for kept, score in scores.items() if score >= highest - TIE)


def table(case: Round, score: Score) -> Numbers:
    """The score of every subset [2^models] (bit k is model k), by one matrix product: for the larger rounds."""
    every = np.arange(1, 2**case.models)
    shares = (every[:, None] >> np.arange(case.models) & 1) * case.counts
    means = np.einsum("sm,mec->sec", shares / shares.sum(1, keepdims=True), case.logits)
    of_label = means[:, np.arange(len(case.labels)), case.labels]
    if score == "accuracy":
        scores = (means.argmax(2) == case.labels).mean(1)
    else:
        scores = (of_label - np.log(np.exp(means).sum(2))).mean(1)
    return np.concatenate([[-np.inf], scores])


# All subsets


@given(rounds())
@cases(500)
def test_exhaustive_search_by_accuracy_is_brute_force(case: Round) -> None:
    scores = brute_force(case, "accuracy")
    best = best_of(scores)
    expected = Found(best, scores[best], looked_at=2**case.models - 1, optimal=True, bound=scores[best])
    assert exhaustive.search(case.problem("accuracy")) == expected


@given(rounds())
@cases(500)
def test_exhaustive_search_by_cross_entropy_is_brute_force(case: Round) -> None:
    scores = brute_force(case, "cross-entropy")
    best = best_of(scores)
    found = exhaustive.search(case.problem("cross-entropy"))
    assert found.members == best
    assert found.score == pytest.approx(scores[best], rel=1e-12, abs=TIE)
    assert found.looked_at == 2**case.models - 1
    assert found.optimal and found.bound == found.score


@both_scores
@pytest.mark.parametrize("models", [9, 13, 17, 18])
def test_exhaustive_search_of_more_models_is_brute_force(models: int, score: Score) -> None:
    """Sizes at which the halves are uneven, and with 17 and 18 the byte codes no longer hold all of the high half."""
    case = a_round(models, examples=7, seed=models)
    scores = table(case, score)
    found = exhaustive.search(case.problem(score))
    tied = np.flatnonzero(scores >= scores.max() - TIE)
    assert found.members == subsets.members_of(int(tied[subsets.preference(tied, models).argmax()]))
    assert found.score == pytest.approx(scores.max(), abs=TIE)


@both_scores
def test_exhaustive_search_is_the_same_however_many_examples_it_works_on_at_once(score: Score) -> None:
    for seed in range(10):
        case = a_round(6, examples=23, classes=4, seed=seed)
        at_once = exhaustive.search(case.problem(score))
        for rows in (1, 8, 11):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exhaustive, "_rows", lambda *_, rows=rows: rows)
                assert exhaustive.search(case.problem(score)) == at_once


def test_exhaustive_search_refuses_more_models_than_it_can_take_in_one_line() -> None:
    case = a_round(exhaustive.MOST_MODELS + 1, examples=1)
    with pytest.raises(TooManyModels, match=r"^candidates: 25 models .* at most 24, or another search$"):
        exhaustive.search(case.problem("accuracy"))


def test_preference_orders_subsets_like_the_tie_rule() -> None:
    """Fewer dropped first, then lowest positions: the order in which combinations come."""
    for models in (1, 2, 5, 8):
        by_rule = [number_of(kept) for kept in all_subsets(models)]
        by_preference = sorted(
            range(1, 2**models), key=lambda subset: -subsets.preference(np.array([subset]), models)[0]
        )
        assert by_preference == by_rule


def test_subset_sums_and_members_agree_on_what_a_number_means() -> None:
    values = torch.tensor([[1.0, 5.0], [10.0, 7.0], [100.0, 9.0]], dtype=torch.float64)
    sums = subsets.subset_sums(values)
    assert sums.shape == (8, 2)
    for subset in range(8):
        assert torch.equal(sums[subset], values[list(subsets.members_of(subset))].sum(0))
        assert number_of(subsets.members_of(subset)) == subset


# Counting in bytes


@st.composite
def scaled_margins(draw: st.DrawFn) -> tuple[list[Numbers], NDArray[np.bool_], Numbers]:
    """Margins, who wins ties, and a start: of one scale or of many, with sums that cancel."""
    models, examples, others = draw(st.integers(1, 8)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    scales = draw(st.sampled_from([(1.0,), (1e-6,), (1e6,), (1e-6, 1.0), (1.0, 1e6), (1e-6, 1.0, 1e6)]))
    whole, per_model = draw(st.booleans()), draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (models + 2, examples, others)
    numbers = random.integers(-2, 3, shape) if whole else random.normal(size=shape)
    numbers = numbers * random.choice(scales, (models + 2, 1, 1) if per_model else shape)
    for model in range(1, models + 2):
        if random.random() < 0.3:
            numbers[model] = random.choice([-1, 1]) * numbers[random.integers(model)]
    start = numbers[-1] + numbers[-2] if random.random() < 0.5 else np.zeros((examples, others))
    return list(numbers[:models]), random.random((examples, others)) < 0.5, start


@given(scaled_margins())
@cases(500)
def test_upper_counts_never_lie_below_the_exact_count(
    given_margins: tuple[list[Numbers], NDArray[np.bool_], Numbers],
) -> None:
    margins, wins_ties, start = given_margins
    examples, others = start.shape
    upper = exhaustive.upper_counts(
        torch.from_numpy(np.stack(margins)), torch.from_numpy(wins_ties), torch.from_numpy(start)
    )
    assert upper.shape == (2 ** len(margins),)
    assert int(upper.max()) <= examples
    for kept in [(), *all_subsets(len(margins))]:
        exact = right_answers([start, *(margins[model] for model in kept)], wins_ties, examples, others)
        assert int(upper[number_of(kept)]) >= exact, kept


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e8, 1e12])
def test_upper_counts_hold_where_loud_models_cancel(scale: float) -> None:
    """a + b - (a + b) = 0 in double precision too, and what quiet models say then counts."""
    random = np.random.default_rng(0)
    for _ in range(20):
        margins = random.choice([-1, 0, 1], (8, 20, 1)) / 1024
        margins[4:6] = random.integers(1, 1000, (2, 20, 1)) * scale / 1000
        margins[6] = -margins[4] - margins[5]
        wins_ties = np.zeros((20, 1), dtype=bool)
        exact = [
            right_answers([margins[model] for model in subsets.members_of(subset)], wins_ties, 20, 1)
            for subset in range(2**8)
        ]
        given_margins = torch.from_numpy(margins)
        upper = exhaustive.upper_counts(given_margins, torch.from_numpy(wins_ties), torch.zeros_like(given_margins[0]))
        assert (upper.numpy() >= exact).all()


@pytest.mark.parametrize("examples", [2039, 2040, 2041, 5000])
def test_upper_counts_of_many_examples_are_hardly_more_than_exact(examples: int) -> None:
    """255 · 8 = 2040 examples are what one run of byte additions can hold."""
    case = a_round(6, examples, classes=4, seed=examples)
    margins, wins_ties = case.problem("accuracy").margins()
    upper = exhaustive.upper_counts(margins, wins_ties, torch.zeros_like(margins[0])).numpy()
    exact = np.round(table(case, "accuracy")[1:] * examples)
    assert (upper[1:] >= exact).all()
    assert (upper[1:] - exact).max() <= examples / 50


def test_upper_counts_do_not_overflow_where_every_example_passes() -> None:
    """Examples that no subset settles, but on which nearly every subset is right: all lanes of the bytes are full."""
    examples = 10_000
    sure, doubtful = -torch.ones(examples, 2, dtype=torch.float64), torch.full((examples, 2), 0.5, dtype=torch.float64)
    margins, wins_ties = torch.stack([sure, doubtful, sure]), torch.zeros(examples, 2, dtype=torch.bool)
    upper = exhaustive.upper_counts(margins, wins_ties, torch.zeros_like(sure))
    assert upper.tolist() == [examples, examples, 0, *[examples] * 5]


@given(rounds(most_models=6), st.integers(-1, 6))
@cases(250)
def test_most_correct_reports_only_what_exceeds_the_count_asked_for(case: Round, at_least: int) -> None:
    scores = accuracies(case)
    best = best_of(scores)
    most = round(scores[best] * len(case.labels))
    subset, count = exhaustive.most_correct(*case.problem("accuracy").margins(), at_least=at_least)
    assert (subset, count) == ((number_of(best), most) if most > at_least else (0, at_least))


@given(rounds(most_models=6))
@cases(150)
def test_only_examples_that_no_subset_can_turn_are_left_out(case: Round) -> None:
    margins, wins_ties = case.problem("accuracy").margins()
    live, always_right = exhaustive.unsettled(margins, wins_ties, torch.zeros_like(margins[0]))
    chosen = live.any(1)
    for kept in all_subsets(case.models):
        sums = margins[list(kept)].sum(0)
        right = subsets.label_wins(sums, wins_ties)
        there = torch.where(live, subsets.label_wins(sums.unsqueeze(-1), wins_ties.unsqueeze(-1)), True).all(1)
        assert int(right.sum()) == always_right + int((there & chosen).sum())


# Log-likelihoods


@given(rounds(most_models=7), st.sampled_from([1e-3, 1.0, 10.0, 200.0, 1e4]))
@cases(300)
def test_log_likelihoods_are_those_of_the_definition(case: Round, scale: float) -> None:
    """On both sides of the size up to which products of exponentials are safe."""
    case = Round(case.logits * scale, case.labels, case.counts)
    all_scores = exhaustive.log_likelihoods(case.problem("cross-entropy"))
    for kept, score in brute_force(case, "cross-entropy").items():
        assert float(all_scores[number_of(kept)]) == pytest.approx(score, rel=1e-12, abs=TIE)


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("largest", [299.0, 301.0, 3e4, 3e38])
def test_log_likelihoods_of_huge_logits_neither_overflow_nor_vanish(largest: float, classes: int) -> None:
    """Surely right, surely wrong, and undecided models; the margins of each are as large as they can be."""
    logits = np.zeros((4, 3, classes))
    logits[0, :, 0] = logits[1, :, 1] = logits[2, :2, 0] = largest
    case = Round(logits, np.zeros(3, dtype=np.int64), np.ones(4, dtype=np.int64))
    all_scores = exhaustive.log_likelihoods(case.problem("cross-entropy"))
    for kept, score in brute_force(case, "cross-entropy").items():
        assert float(all_scores[number_of(kept)]) == pytest.approx(score, rel=1e-12, abs=TIE)


def test_log_likelihoods_of_many_examples_keep_nine_digits() -> None:
    case = a_round(8, examples=5000, classes=10, seed=1)
    all_scores = exhaustive.log_likelihoods(case.problem("cross-entropy")).numpy()
    assert np.abs(all_scores - table(case, "cross-entropy"))[1:].max() < TIE


# Branch and bound


@both_scores
@given(case=rounds(kinds=("few", "whole", "tenths", "real")))
@cases(75)
def test_branch_and_bound_scores_what_brute_force_scores(case: Round, score: Score) -> None:
    """With so small a leaf that accuracy is branched on too."""
    highest = max(brute_force(case, score).values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_and_bound, "LEAF_MODELS", 2)
        found = branch_and_bound.search(case.problem(score))
    assert found.score == pytest.approx(highest, abs=TIE)
    assert found.score == case.problem(score).score_of(found.members)
    assert found.optimal and found.bound == found.score
    assert found.looked_at >= 1


@both_scores
@given(case=rounds(kinds=("whole", "tenths", "real")))
@cases(60)
def test_branch_and_bound_does_not_need_a_good_beginning(case: Round, score: Score) -> None:
    """It starts from the worst subset instead of the beam's."""
    scores = brute_force(case, score)
    worst = min(scores, key=scores.__getitem__)
    begin = Found(worst, case.problem(score).score_of(worst), looked_at=1, optimal=False, bound=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_search, "search", lambda *_, **__: begin)
        patch.setattr(branch_and_bound, "LEAF_MODELS", 1)
        found = branch_and_bound.search(case.problem(score))
    assert found.score == pytest.approx(max(scores.values()), abs=TIE)
    assert found.optimal and found.bound == found.score


@both_scores
@pytest.mark.parametrize("nodes", [1, 3])
@given(case=rounds(most_models=6, kinds=("whole", "real")))
@cases(20)
def test_branch_and_bound_that_stops_early_claims_no_more_than_it_proved(case: Round, score: Score, nodes: int) -> None:
    highest = max(brute_force(case, score).values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_and_bound, "LEAF_MODELS", 1)
        found = branch_and_bound.search(case.problem(score), most_nodes=nodes)
    assert found.score == case.problem(score).score_of(found.members)
    assert found.score <= highest + TIE
    if found.optimal:
        assert found.score == pytest.approx(highest, abs=TIE)
    assert found.bound is not None or (score == "accuracy" and not found.optimal)
    if found.bound is not None:
        assert found.bound >= highest - TIE


@both_scores
def test_branch_and_bound_is_exact_where_leaves_are_as_large_as_usual(score: Score) -> None:
    case = a_round(15, examples=12, seed=4)
    found = branch_and_bound.search(case.problem(score))
    assert found.score == pytest.approx(table(case, score).max(), abs=TIE)
    assert found.optimal and found.bound == found.score


def test_branch_and_bound_by_cross_entropy_proves_more_models_than_can_be_tried() -> None:
    """2^26 subsets, of which it looks at a small share."""
    case = a_round(26, examples=200, classes=5, seed=5)
    found = branch_and_bound.search(case.problem("cross-entropy"))
    assert found.optimal and found.bound == found.score
    assert found.looked_at < 2**19


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("begin", [(0, 1), (2,)])
def test_rounding_in_the_sums_does_not_decide_a_tie(begin: Members, label: int) -> None:
    """0.1 + 0.2 - 0.3 and its opposite are ties, which the lower class wins, but in binary they are not zero.

    The first three models together are right on the other examples; the fourth has no say in the ties, and comes last.
    """
    margins, tie = [[-2, 0.9, 0.9, 0], [0.9, -2, 0.9, 0], [-0.2, -0.2, -0.2, 0.1]], np.array([0.1, 0.2, -0.3, 0])
    logits = np.zeros((4, 5, 2))
    logits[:, :, 1 - label] = np.stack([*margins, tie, -tie], axis=1)
    case = Round(logits, np.full(5, label), np.ones(4, dtype=np.int64))
    scores, problem = accuracies(case), case.problem("accuracy")
    best = best_of(scores)
    assert exhaustive.search(problem).members == best
    with pytest.MonkeyPatch.context() as patch:
        first = Found(begin, problem.score_of(begin), looked_at=1, optimal=False, bound=None)
        patch.setattr(beam_search, "search", lambda *_, **__: first)
        patch.setattr(branch_and_bound, "LEAF_MODELS", 1)
        found = branch_and_bound.search(problem)
    assert found.score == scores[found.members] == scores[best]


# The relaxation


def a_point(random: np.random.Generator, models: int) -> Numbers:
    return random.dirichlet(np.ones(models))


@given(rounds(), st.integers(0, 2**32 - 1))
@cases(250)
def test_a_tangent_bounds_every_subset(case: Round, seed: int) -> None:
    """No subset scores above the mean of its members' values, wherever the tangent touches."""
    here = Relaxation(case.problem("cross-entropy")).tangent(a_point(np.random.default_rng(seed), case.models))
    for kept, score in brute_force(case, "cross-entropy").items():
        members = list(kept)
        mean = case.counts[members] @ here.values[members] / case.counts[members].sum()
        assert mean >= score - TIE * max(1.0, abs(score))
        assert here.values.max() >= mean - TIE * max(1.0, abs(mean))


@given(rounds())
@cases(200)
def test_the_bound_of_the_relaxation_holds_for_every_subset(case: Round) -> None:
    problem = case.problem("cross-entropy")
    bound, point = Relaxation(problem).maximise()
    highest = max(brute_force(case, "cross-entropy").values())
    assert bound >= highest - TIE * max(1.0, abs(highest))
    assert point.min() >= 0 and point.sum() == pytest.approx(1)


@given(rounds(kinds=("few", "whole", "tenths", "votes", "real")))
@cases(150)
def test_the_relaxation_reaches_its_maximum(case: Round) -> None:
    """Its bound is hardly above the score at its point, and that is no lower than the best model's alone."""
    problem = case.problem("cross-entropy")
    of_the_problem = Relaxation(problem)
    bound, point = of_the_problem.maximise(tolerance=1e-4)
    reached = of_the_problem.tangent(point).score
    assert -TIE <= bound - reached <= 1e-3
    assert reached >= max(problem.score_of([model]) for model in range(case.models)) - 1e-3


def test_each_subset_is_a_point_of_the_relaxation() -> None:
    case = Round(a_round(5).logits, a_round(5).labels, np.array([1, 2, 3, 1, 1]))
    problem = case.problem("cross-entropy")
    for kept in all_subsets(5):
        point = np.zeros(5)
        point[list(kept)] = case.counts[list(kept)] / case.counts[list(kept)].sum()
        assert Relaxation(problem).tangent(point).score == pytest.approx(log_likelihood_of(case, kept), abs=1e-12)


@given(rounds(kinds=("whole", "real")), st.integers(0, 2**32 - 1))
@cases(100)
def test_gradient_and_curvature_are_those_of_finite_differences(case: Round, seed: int) -> None:
    of_the_problem = Relaxation(case.problem("cross-entropy"))
    point = a_point(np.random.default_rng(seed), case.models)
    here, curvature = of_the_problem.tangent(point), of_the_problem.curvature(point)
    width = 1e-5
    for model, direction in enumerate(np.eye(case.models)):
        ahead = of_the_problem.tangent(point + width * direction)
        behind = of_the_problem.tangent(point - width * direction)
        assert here.gradient[model] == pytest.approx((ahead.score - behind.score) / (2 * width), abs=1e-5)
        assert curvature[model] == pytest.approx((behind.gradient - ahead.gradient) / (2 * width), abs=1e-5)
    assert here.values == pytest.approx(here.score + here.gradient - here.gradient @ point)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Numbers, Numbers, np.random.Generator]:
    """Lower and upper ends of weights that can add up to one; often equal or zero, as under a node."""
    size = draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inside = a_point(random, size)
    low = inside * random.choice([0, 0.5, 1], size)
    high = np.maximum(inside, random.choice([0, 1 / size, 1], size))
    return low, high, random


def farthest_along(direction: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """The feasible point that goes farthest in a direction: fill up to `high`, the steepest first."""
    point, left = low.copy(), 1 - low.sum()
    for place in np.argsort(-direction):
        step = min(high[place] - low[place], left)
        point[place] += step
        left -= step
    return point


@given(boxes(), st.sampled_from([0.01, 1.0, 100.0]))
@cases(500)
def test_project_finds_the_nearest_feasible_point(
    box: tuple[Numbers, Numbers, np.random.Generator], scale: float
) -> None:
    """Nearest is what no feasible point lies on the same side as the point projected (a linear program)."""
    low, high, random = box
    point = scale * random.normal(size=len(low)).round(random.choice([0, 1, 12]))  # few digits: equal coordinates
    nearest = project(point, low, high)
    assert (nearest >= low).all() and (nearest <= high).all()
    assert nearest.sum() == pytest.approx(1, abs=1e-9)
    away = point - nearest
    assert away @ (farthest_along(away, low, high) - nearest) <= 1e-9 * max(1, scale)
    for _ in range(5):
        other = farthest_along(random.normal(size=len(low)), low, high)
        assert np.linalg.norm(point - nearest) <= np.linalg.norm(point - other) + 1e-9
    assert project(nearest, low, high) == pytest.approx(nearest, abs=1e-9)


@given(boxes())
@cases(150)
def test_a_newton_step_goes_to_the_top_of_the_quadratic_model(
    box: tuple[Numbers, Numbers, np.random.Generator],
) -> None:
    low, high, random = box
    roots = random.normal(size=(len(low), len(low)))
    gradient, curvature = random.normal(size=len(low)), roots @ roots.T
    point = project(a_point(random, len(low)), low, high)

    def gain(to: Numbers) -> float:
        return float(gradient @ (to - point) - (to - point) @ curvature @ (to - point) / 2)

    step = newton_step(gradient, curvature, point, low, high)
    assert (step >= low).all() and (step <= high).all() and step.sum() == pytest.approx(1, abs=1e-9)
    assert gain(step) >= -1e-9
    for _ in range(5):
        assert gain(step) >= gain(farthest_along(random.normal(size=len(low)), low, high)) - 1e-3


# The beam


@both_scores
@given(case=rounds())
@cases(75)
def test_beam_search_returns_a_subset_with_its_own_score_and_a_bound_that_holds(case: Round, score: Score) -> None:
    problem, scores = case.problem(score), brute_force(case, score)
    highest = max(scores.values())
    found = beam_search.search(problem)
    assert found.members in scores
    assert found.score == problem.score_of(found.members) == pytest.approx(scores[found.members], rel=1e-12, abs=TIE)
    assert found.looked_at >= 1
    if found.optimal:
        assert found.score >= highest - 2 * TIE * max(1.0, abs(highest))
    if score == "cross-entropy":
        assert found.bound is not None
        assert found.bound >= max(found.score, highest - TIE * max(1.0, abs(highest)))


@both_scores
@given(case=rounds(most_models=6))
@cases(100)
def test_beam_search_of_a_handful_of_models_finds_the_best(case: Round, score: Score) -> None:
    """A beam then holds all subsets and all are scored on all examples: only single precision could mislead it."""
    highest = max(brute_force(case, score).values())
    assert beam_search.search(case.problem(score)).score == pytest.approx(highest, rel=1e-5, abs=1e-6)


def test_beam_search_is_not_misled_by_ties_that_single_precision_breaks() -> None:
    model = np.array([[110.0, 47.0, 12.0], [-33.0, -50.0, -123.0]]) * 1024  # a millionth is lost beside it
    decent = np.array([[0.0, 1e6, -1e6], [3e6, 2e6, 0.0]])  # right about the first example
    case = Round(np.stack([model, -model, decent]), np.array([1, 1]), np.ones(3, dtype=np.int64))
    # The first two are wrong, and cancel out: the lowest class wins the tie, and is wrong too.
    scores = brute_force(case, "accuracy")
    assert scores[0, 1] == 0 and max(scores.values()) == 0.5
    assert beam_search.search(case.problem("accuracy")).score == 0.5


@both_scores
def test_beam_search_of_more_models_than_its_beam_holds_finds_the_best_nearly_always(score: Score) -> None:
    gaps = []
    for seed in range(8):
        case = a_round(13, examples=40, seed=seed)
        gaps.append(table(case, score).max() - beam_search.search(case.problem(score)).score)
    assert min(gaps) >= -TIE
    assert sum(gap > TIE for gap in gaps) <= 1
    assert max(gaps) <= 0.026  # an example in forty


@both_scores
@pytest.mark.parametrize("models", [1, 2, 25])
def test_beam_search_is_repeatable(models: int, score: Score) -> None:
    case = a_round(models, examples=20, classes=4, seed=models)
    assert beam_search.search(case.problem(score)) == beam_search.search(case.problem(score))


@both_scores
@pytest.mark.parametrize("models", [1, 2, 40, 150])
def test_beam_search_takes_any_number_of_models(models: int, score: Score) -> None:
    problem = a_round(models, examples=10, seed=models).problem(score)
    found = beam_search.search(problem)
    assert found.score == problem.score_of(found.members)
    assert found.score >= max(problem.score_of([model]) for model in range(models))
    assert found.score >= problem.score_of(range(models))
    if score == "cross-entropy":
        assert found.bound is not None and found.bound >= found.score


def test_beam_search_leaves_the_generators_of_the_process_alone() -> None:
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    beam_search.search(a_round(20).problem("accuracy"))
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002


@both_scores
def test_beam_search_counts_a_client_as_often_as_it_was_drawn(score: Score) -> None:
    """Drawn n times is like n copies that stay together."""
    case = a_round(20, examples=40, seed=8)
    often = Round(case.logits, case.labels, np.random.default_rng(8).integers(1, 4, 20))
    found = beam_search.search(often.problem(score))
    copies = [model for model in found.members for _ in range(often.counts[model])]
    as_copies = Round(case.logits[copies], case.labels, np.ones(len(copies), dtype=np.int64))
    assert found.score == pytest.approx(as_copies.problem(score).score_of(range(len(copies))), abs=TIE)


def test_beam_search_by_accuracy_is_not_taken_in_by_a_model_without_opinion() -> None:
    """All logits equal is a tie of all classes: a prediction of class 0, not a right one."""
    case = a_round(20, examples=200, classes=10, seed=6, knowledge=0.05)
    case.logits[7] = 0.0
    without = Round(np.delete(case.logits, 7, axis=0), case.labels, case.counts[1:])
    found = beam_search.search(case.problem("accuracy"))
    assert found.score >= beam_search.search(without.problem("accuracy")).score - 0.01


@both_scores
@pytest.mark.parametrize("wild", [1e10, 3e38])
def test_a_model_gone_wild_does_not_spoil_the_beam(wild: float, score: Score) -> None:
    """Finite, but so large that single precision can't hold the margins: it is dropped, and the others are searched."""
    case = a_round(20, examples=60, classes=5, seed=7)
    tame = Round(case.logits[:-1], case.labels, case.counts[:-1])
    random = np.random.default_rng(7)
    case.logits[-1] = wild * random.choice([-1.0, 1.0], case.logits[-1].shape)
    found, without = beam_search.search(case.problem(score)), beam_search.search(tame.problem(score))
    assert found.score >= without.score - 0.02
    if score == "cross-entropy":
        assert found.bound is not None and found.bound >= without.score


# The filter


@both_scores
@pytest.mark.parametrize("models", [4, 8, 12])
def test_the_sizes_of_the_paper_are_exact_by_default(models: int, score: Score) -> None:
    for seed in range(3):
        case = a_round(models, examples=25, seed=seed)
        scores = table(case, score)
        selection = CombinatorialFilter(score).select(case.candidates())
        assert selection.optimal is True
        assert selection.score == selection.bound == pytest.approx(scores.max(), abs=TIE)
        assert scores[number_of(selection.kept)] >= scores.max() - TIE
        assert selection.looked_at == 2**models - 1


@both_scores
@pytest.mark.parametrize("models", [17, 33, 120])
def test_auto_works_beyond_what_can_be_tried(models: int, score: Score) -> None:
    case = a_round(models, examples=12, seed=models)
    selection = CombinatorialFilter(score).select(case.candidates())
    check_selection(selection, case, score)
    assert selection.score is not None and selection.score >= case.problem(score).score_of(range(models))
    if score == "cross-entropy" or selection.optimal:
        assert selection.bound is not None
    if score == "cross-entropy" and models == 17:
        assert selection.score == pytest.approx(table(case, score).max(), abs=TIE)
        assert selection.optimal is True


def check_selection(selection: Selection, case: Round, score: Score) -> None:
    """What every result must be: ascending, its own score, and its claims filled in."""
    assert selection.kept and list(selection.kept) == sorted(set(selection.kept))
    assert set(selection.kept) <= set(range(case.models))
    assert selection.score == case.problem(score).score_of(selection.kept)
    assert selection.weights is None
    assert type(selection.looked_at) is int and selection.looked_at >= 1
    assert type(selection.optimal) is bool
    assert type(selection.score) is float
    assert all(type(position) is int for position in selection.kept)
    if selection.bound is not None:
        assert type(selection.bound) is float and selection.bound >= selection.score
    if selection.optimal:
        assert selection.bound is not None and selection.bound <= selection.score + 1e-6


@every_search
@both_scores
@given(case=rounds(kinds=("whole", "real")))
@cases(10)
def test_every_search_says_what_it_did(case: Round, score: Score, search: Search) -> None:
    selection = CombinatorialFilter(score, search=search).select(case.candidates())
    check_selection(selection, case, score)
    highest = max(brute_force(case, score).values())
    if search != "beam":
        assert selection.optimal is True
        assert selection.score == pytest.approx(highest, abs=TIE)
    if score == "cross-entropy":
        assert selection.bound is not None and selection.bound >= highest - TIE


@pytest.mark.parametrize(("given_name", "nearest"), [("bem", "beam"), ("exhaust", "exhaustive"), ("branch", "branch-")])
def test_an_unknown_search_is_refused_with_the_nearest_name(given_name: str, nearest: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"^search: '{given_name}' is not allowed; use '{nearest}.*' \(nearest\)"):
        CombinatorialFilter(search=given_name)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, 0.0, -1.0, math.nan])
def test_no_time_at_all_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidSetting, match=r"^seconds: .* above 0$"):
        CombinatorialFilter(seconds=seconds)


@both_scores
@every_search
@pytest.mark.parametrize("models", [3, 20, 60])
def test_a_tiny_time_budget_still_gives_a_subset(models: int, search: Search, score: Score) -> None:
    case = a_round(models, examples=20, seed=models)
    if search == "exhaustive" and models > exhaustive.MOST_MODELS:
        return
    selection = CombinatorialFilter(score, search=search, seconds=1e-9).select(case.candidates())
    check_selection(selection, case, score)


@pytest.mark.parametrize("search", ["branch-and-bound", "beam"])
@both_scores
def test_time_enough_changes_nothing(score: Score, search: Search) -> None:
    case = a_round(13, examples=20, seed=9)
    without = CombinatorialFilter(score, search=search).select(case.candidates())
    assert CombinatorialFilter(score, search=search, seconds=600).select(case.candidates()) == without


@every_search
@both_scores
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_models_with_logits_that_are_not_finite_are_never_kept(bad: float, score: Score, search: Search) -> None:
    """One bad number among many is enough; positions are those of the candidates as given."""
    fine = a_round(6, examples=15, seed=10)
    expected = CombinatorialFilter(score, search=search).select(fine.candidates())
    places = [1, 2, 4, 5, 7, 8]  # of the fine ones among nine
    logits, counts = np.ones((9, 15, 3)), np.ones(9, dtype=np.int64)
    logits[places] = fine.logits
    for spoilt in (0, 3, 6):
        logits[spoilt, 7, 1] = bad
    selection = CombinatorialFilter(score, search=search).select(Round(logits, fine.labels, counts).candidates())
    assert selection.kept == tuple(places[member] for member in expected.kept)
    assert (selection.score, selection.looked_at, selection.optimal, selection.bound) == (
        expected.score,
        expected.looked_at,
        expected.optimal,
        expected.bound,
    )


@both_scores
def test_the_counts_of_models_left_out_are_left_out_with_them(score: Score) -> None:
    """With the spoilt model's count the second one would outvote the third, and both could stay."""
    logits = np.array([[[np.nan, 0.0]], [[4.0, 0.0]], [[0.0, 3.0]]])
    case = Round(logits, np.array([0]), np.array([5, 1, 2]))
    finite = Round(logits[1:], case.labels, case.counts[1:])
    selection = CombinatorialFilter(score).select(case.candidates())
    assert selection.kept == (1,)
    assert selection.score == finite.problem(score).score_of([0])


@every_search
def test_only_spoilt_models_are_refused(search: Search) -> None:
    case = Round(np.full((3, 2, 2), np.nan), np.array([0, 1]), np.ones(3, dtype=np.int64))
    with pytest.raises(InvalidSetting, match=r"^candidates: 3 is not allowed; .* finite logits$"):
        CombinatorialFilter(search=search).select(case.candidates())


@every_search
@both_scores
@pytest.mark.parametrize(("examples", "classes"), [(1, 2), (1, 10), (7, 2), (7, 10), (7, 100), (3, 1000)])
def test_any_number_of_classes_and_examples(examples: int, classes: int, score: Score, search: Search) -> None:
    case = a_round(4, examples, classes, seed=classes)
    scores = table(case, score)
    selection = CombinatorialFilter(score, search=search).select(case.candidates())
    check_selection(selection, case, score)
    assert selection.score == pytest.approx(scores.max(), abs=1e-6)


@every_search
@both_scores
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_any_precision_are_compared_in_double(kind: torch.dtype, score: Score, search: Search) -> None:
    case = a_round(6, seed=11)
    logits = torch.from_numpy(case.logits).to(kind)
    rounded = Round(logits.double().numpy(), case.labels, case.counts)
    given_logits = Candidates(logits, torch.from_numpy(case.labels), torch.full((6,), 1 / 6))
    expected = CombinatorialFilter(score, search=search).select(rounded.candidates())
    assert CombinatorialFilter(score, search=search).select(given_logits) == expected


@every_search
@both_scores
def test_the_candidates_are_not_changed(score: Score, search: Search) -> None:
    case = a_round(8, seed=12)
    before = case.logits.copy(), case.labels.copy(), case.counts.copy()
    CombinatorialFilter(score, search=search).select(case.candidates())
    for now, then in zip((case.logits, case.labels, case.counts), before, strict=True):
        assert np.array_equal(now, then)


@both_scores
def test_scoring_by_weights_says_what_it_did_too(score: Score) -> None:
    """Models that are their own logits, so that averaged weights are averaged logits; the spoilt one is left out."""
    case = a_round(4, examples=6, seed=13)
    logits = torch.from_numpy(case.logits)
    logits[2, 0, 0] = torch.nan
    flat = logits.flatten(1)
    given_models = Candidates(
        logits,
        torch.from_numpy(case.labels),
        torch.full((4,), 1 / 4),
        models=flat,
        average=lambda kept: flat[list(kept)].mean(0),
        predict=lambda model: model.view(6, 3),
    )
    by_weights = CombinatorialFilter(score, "weights").select(given_models)
    by_logits = CombinatorialFilter(score).select(given_models)
    assert by_weights.kept == by_logits.kept and 2 not in by_weights.kept
    assert by_weights.score == by_weights.bound == pytest.approx(by_logits.score)
    assert by_weights.looked_at == 7 and by_weights.optimal is True


# On the GPU


def on_cuda(case: Round) -> Candidates:
    here = case.candidates()
    assert here.counts is not None
    return Candidates(here.logits.cuda(), here.labels.cuda(), here.weights.cuda(), here.counts.cuda())


@pytest.mark.cuda
@both_scores
@pytest.mark.parametrize("search", ["auto", "exhaustive", "branch-and-bound"])
@pytest.mark.parametrize("models", [1, 8, 14])
def test_exact_results_on_cuda_are_those_on_the_cpu(models: int, search: Search, score: Score) -> None:
    case = a_round(models, examples=80, classes=5, seed=models)
    here = CombinatorialFilter(score, search=search).select(case.candidates())
    there = CombinatorialFilter(score, search=search).select(on_cuda(case))
    assert there.optimal and here.optimal
    assert there.score == there.bound == pytest.approx(here.score, abs=TIE)
    if search != "branch-and-bound":  # which of equals that one finds may depend on rounding
        assert (there.kept, there.looked_at) == (here.kept, here.looked_at)


@pytest.mark.cuda
@both_scores
def test_exhaustive_search_of_many_models_on_cuda_is_brute_force(score: Score) -> None:
    """More models than the byte codes hold at once there."""
    case = a_round(22, examples=3, classes=2, seed=16)
    there = CombinatorialFilter(score, search="exhaustive").select(on_cuda(case))
    assert there.score == pytest.approx(table(case, score).max(), abs=TIE)


@pytest.mark.cuda
@both_scores
@pytest.mark.parametrize("models", [1, 8, 40])
def test_beam_search_on_cuda_is_as_good_as_on_the_cpu(models: int, score: Score) -> None:
    case = a_round(models, examples=80, classes=5, seed=models)
    here = CombinatorialFilter(score, search="beam").select(case.candidates())
    there = CombinatorialFilter(score, search="beam").select(on_cuda(case))
    assert there.score == pytest.approx(case.problem(score).score_of(there.kept), abs=TIE)
    assert there.score == pytest.approx(here.score, abs=0.026)  # two examples of eighty
    assert there.bound == pytest.approx(here.bound, abs=2e-3)
    assert CombinatorialFilter(score, search="beam").select(on_cuda(case)) == there


@pytest.mark.cuda
@both_scores
def test_spoilt_models_are_left_out_on_cuda(score: Score) -> None:
    case = a_round(6, seed=14)
    case.logits[2, 3, 1] = np.nan
    here = CombinatorialFilter(score).select(case.candidates())
    there = CombinatorialFilter(score).select(on_cuda(case))
    assert there.kept == here.kept and 2 not in there.kept
    assert there.score == pytest.approx(here.score, abs=TIE)


@pytest.mark.cuda
@given(case=rounds(kinds=WITH_TIES))
@cases(100)
def test_ties_are_settled_on_cuda_as_on_the_cpu(case: Round) -> None:
    for score in SCORES:
        there = CombinatorialFilter(score, search="exhaustive").select(on_cuda(case))
        here = CombinatorialFilter(score, search="exhaustive").select(case.candidates())
        assert there.kept == here.kept
        assert there.score == pytest.approx(here.score, abs=TIE)


@pytest.mark.cuda
def test_work_stays_on_the_device_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor made on the way is on the device, and what comes back to the CPU is small."""
    case = a_round(12, examples=4000, classes=10, seed=15)
    given_logits = on_cuda(case)
    problem = Problem(given_logits.logits, given_logits.labels, "cross-entropy", given_logits.counts)
    margins, wins_ties = problem.margins()
    assert problem.device.type == margins.device.type == wins_ties.device.type == "cuda"
    assert exhaustive.log_likelihoods(problem).device.type == "cuda"
    assert exhaustive.upper_counts(margins, wins_ties, torch.zeros_like(margins[0])).device.type == "cuda"
    assert Relaxation(problem).flat.device.type == "cuda"

    brought_back: list[int] = []
    to_cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        brought_back.append(tensor.numel())
        return to_cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    for score in SCORES:
        for search in SEARCHES:
            CombinatorialFilter(score, search=search).select(given_logits)
    assert max(brought_back) <= 2**12


@pytest.mark.parametrize("seed", range(6))
def test_beam_search_is_no_worse_than_greedy_where_clients_were_drawn_often(seed: int) -> None:
    """20 models, some drawn two or three times; greedy adds the best model as long as that helps."""
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=200)
    logits = random.normal(size=(20, 200, 10)) * 2
    logits[:, np.arange(200), labels] += random.uniform(0, 3, size=(20, 1))
    counts = torch.from_numpy(random.integers(1, 4, size=20))
    problem = Problem(torch.from_numpy(logits), torch.from_numpy(labels), "cross-entropy", counts)
    chosen: list[int] = []
    best = -math.inf
    while len(chosen) < 20:
        score, model = max((problem.score_of((*chosen, m)), m) for m in range(20) if m not in chosen)
        if score <= best:
            break
        best, chosen = score, [*chosen, model]
    assert beam_search.search(problem).score >= best - 1e-9
