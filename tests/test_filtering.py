"""The combinatorial filter against brute force in plain Python, subset by subset and example by example."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.averaging import Kept, combine, fedavg, fedpdp
from fedsieve.errors import InvalidSetting, TooManyModels
from fedsieve.filtering import (
    Candidates,
    CombinatorialFilter,
    KeepAll,
    Selection,
    accuracy,
    exhaustive,
    log_likelihood,
)
from fedsieve.filtering.scores import Score

Logits = list[list[list[int]]]  # [models][examples][classes]
Mean = list[list[Fraction]]  # [examples][classes]
both_scores = pytest.mark.parametrize("score", ["accuracy", "cross-entropy"])


def candidates(logits: Logits, labels: list[int], counts: list[int] | None = None) -> Candidates:
    return Candidates(
        logits=torch.tensor(logits, dtype=torch.float32),
        labels=torch.tensor(labels),
        weights=torch.full((len(logits),), 1 / len(logits)),
        counts=None if counts is None else torch.tensor(counts),
    )


# The oracle


def subsets(models: int) -> list[tuple[int, ...]]:
    """Every subset, the preferred of two equally good ones first: more models, then lower positions."""
    return [kept for size in range(models, 0, -1) for kept in combinations(range(models), size)]


def mean_of(logits: Logits, kept: tuple[int, ...], counts: list[int]) -> Mean:
    drawn = sum(counts[k] for k in kept)
    examples, classes = len(logits[0]), len(logits[0][0])
    return [
        [Fraction(sum(counts[k] * logits[k][i][c] for k in kept), drawn) for c in range(classes)]
        for i in range(examples)
    ]


def accuracy_of(mean: Mean, labels: list[int]) -> float:
    right = 0
    for outputs, label in zip(mean, labels, strict=True):
        if outputs.index(max(outputs)) == label:
            right += 1
    return right / len(labels)


def log_likelihood_of(mean: Mean, labels: list[int]) -> float:
    total = 0.0
    for outputs, label in zip(mean, labels, strict=True):
        highest = float(max(outputs))
        total += float(outputs[label]) - highest - math.log(sum(math.exp(float(o) - highest) for o in outputs))
    return total / len(labels)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Logits, list[int], list[int]]:
    """Small whole numbers, so that ties, equal models and constant models are frequent."""
    models, examples, classes = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    outputs = st.lists(
        st.lists(st.integers(-3, 3), min_size=classes, max_size=classes), min_size=examples, max_size=examples
    )
    logits = draw(st.lists(outputs, min_size=models, max_size=models))
    for model in range(1, models):
        kind = draw(st.sampled_from(["own", "own", "copy", "constant"]))
        if kind == "copy":
            logits[model] = logits[model - 1]
        elif kind == "constant":
            logits[model] = [[draw(st.integers(-3, 3))] * classes] * examples
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=examples, max_size=examples))
    counts = draw(st.lists(st.integers(1, 3), min_size=models, max_size=models))
    return logits, labels, counts


@given(rounds())
@settings(max_examples=150, deadline=None)
def test_accuracy_filter_keeps_what_brute_force_keeps(case: tuple[Logits, list[int], list[int]]) -> None:
    logits, labels, counts = case
    scores = {kept: accuracy_of(mean_of(logits, kept, counts), labels) for kept in subsets(len(logits))}
    best = max(scores, key=scores.__getitem__)  # the first of the best, so the preferred one
    selection = CombinatorialFilter("accuracy").select(candidates(logits, labels, counts))
    assert selection.kept == best
    everyone = tuple(range(len(logits)))
    single = max(score for kept, score in scores.items() if len(kept) == 1)
    how = {"looked_at": 2 ** len(logits) - 1, "optimal": True, "bound": scores[best]}
    assert selection == Selection(best, scores[best], **how, all=scores[everyone], single=single)
    assert selection.weights is None


@given(rounds())
@settings(max_examples=150, deadline=None)
def test_cross_entropy_filter_keeps_what_brute_force_keeps(case: tuple[Logits, list[int], list[int]]) -> None:
    logits, labels, counts = case
    means = {kept: mean_of(logits, kept, counts) for kept in subsets(len(logits))}
    scores = {kept: log_likelihood_of(mean, labels) for kept, mean in means.items()}
    highest = max(scores.values())
    best = [kept for kept, score in scores.items() if score > highest - 1e-9]
    selection = CombinatorialFilter("cross-entropy").select(candidates(logits, labels, counts))
    assert selection.kept == best[0]
    assert selection.score == pytest.approx(highest, abs=1e-9)
    assert selection.looked_at == 2 ** len(logits) - 1
    assert selection.optimal is True and selection.bound == selection.score
    assert selection.all == pytest.approx(scores[tuple(range(len(logits)))], abs=1e-9)
    assert selection.single == pytest.approx(max(score for kept, score in scores.items() if len(kept) == 1), abs=1e-9)


@both_scores
def test_drawn_once_is_the_default(score: Score) -> None:
    random = np.random.default_rng(1)
    logits, labels = random.integers(-5, 6, (5, 20, 3)).tolist(), random.integers(0, 3, 20).tolist()
    chosen = CombinatorialFilter(score).select(candidates(logits, labels))
    assert chosen == CombinatorialFilter(score).select(candidates(logits, labels, [1] * 5))


# Eq. 4 by hand. A is sure of the first example and slightly wrong on the second, B the other way round,
# C is surely wrong on both. Right are class 0, then class 1.

A, B, C = [[3, 0], [1, 0]], [[0, 1], [0, 3]], [[0, 9], [9, 0]]


def test_the_best_pair_beats_each_single_model() -> None:
    best_pair = Selection((0, 1), 1.0, looked_at=7, optimal=True, bound=1.0, all=0.0, single=0.5)
    assert CombinatorialFilter("accuracy").select(candidates([A, B, C], [0, 1])) == best_pair
    for single in (A, B):
        assert CombinatorialFilter("accuracy").select(candidates([single], [0, 1])).score == 0.5


def test_the_best_pair_by_cross_entropy() -> None:
    """The mean logits of A and B differ by 1 in favour of the label: -ln(1 + e⁻¹) = -0.31326."""
    selection = CombinatorialFilter("cross-entropy").select(candidates([A, B, C], [0, 1]))
    assert selection.kept == (0, 1)
    assert selection.score == pytest.approx(-0.3132617, abs=1e-6)
    # alone: (-ln(1 + e⁻³) - ln(1 + e)) / 2
    assert CombinatorialFilter("cross-entropy").select(candidates([A], [0, 1])).score == pytest.approx(
        -0.6809245, abs=1e-6
    )


def test_the_two_scores_can_disagree() -> None:
    """Right on two of three by a hair and on the third surely wrong, against wrong everywhere by a little."""
    bold, timid = [[1, 0], [1, 0], [0, 50]], [[0, 2], [0, 2], [0, 2]]
    assert CombinatorialFilter("accuracy").select(candidates([bold, timid], [0, 0, 0])).kept == (0,)
    assert CombinatorialFilter("cross-entropy").select(candidates([bold, timid], [0, 0, 0])).kept == (1,)


def test_a_client_drawn_twice_counts_twice_in_the_mean() -> None:
    """4·1 - 3 > 0 > 4 - 3·2: with the second model counted twice the first can't make up for it."""
    one, other = [[4, 0]], [[0, 3]]
    assert CombinatorialFilter("accuracy").select(candidates([one, other], [0], [1, 1])).kept == (0, 1)
    assert CombinatorialFilter("accuracy").select(candidates([one, other], [0], [1, 2])).kept == (0,)
    selection = CombinatorialFilter("cross-entropy").select(candidates([other, other], [1], [1, 2]))
    assert selection.score == pytest.approx(-math.log(1 + math.exp(-3)))


# Ties


@both_scores
def test_of_equally_good_subsets_the_one_that_drops_fewer_wins(score: Score) -> None:
    assert CombinatorialFilter(score).select(candidates([A, A, A, A], [0, 1])).kept == (0, 1, 2, 3)
    assert CombinatorialFilter(score).select(candidates([B, A, C, B, A], [0, 1])).kept == (0, 1, 3, 4)


@both_scores
def test_rounding_does_not_decide_between_equal_models(score: Score) -> None:
    """A third of three times a number need not be the number in floating point: all copies stay nevertheless."""
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        logits, labels = torch.randn(1, 100, 10, generator=random), torch.randint(10, (100,), generator=random)
        copies = Candidates(logits.repeat(5, 1, 1), labels, torch.full((5,), 0.2))
        assert CombinatorialFilter(score).select(copies).kept == (0, 1, 2, 3, 4)


def test_then_the_lowest_positions_win_by_accuracy() -> None:
    """5 - 2 - 2 > 0 > 5 - 2 - 2 - 2: two of the three wrong models may stay, and it is the first two."""
    right, wrong = [[5, 0]], [[0, 2]]
    assert CombinatorialFilter("accuracy").select(candidates([wrong, wrong, right, wrong], [0])).kept == (0, 1, 2)


def test_then_the_lowest_positions_win_by_cross_entropy() -> None:
    """The margins (4, -1) and (-1, 3) of two models balance best with one of each: (1.5, 1)."""
    one, other = [[4, 0], [0, 1]], [[0, 1], [3, 0]]
    assert CombinatorialFilter("cross-entropy").select(candidates([other, one, other], [0, 0])).kept == (0, 1)


@both_scores
def test_ties_are_settled_alike_however_many_examples_are_worked_on_at_once(
    monkeypatch: pytest.MonkeyPatch, score: Score
) -> None:
    random = np.random.default_rng(2)
    for _ in range(20):
        logits, labels = random.integers(-1, 2, (6, 4, 2)).tolist(), random.integers(0, 2, 4).tolist()
        at_once = CombinatorialFilter(score).select(candidates(logits, labels))
        with monkeypatch.context() as patch:
            patch.setattr(exhaustive, "_rows", lambda *_: 3)
            in_parts = CombinatorialFilter(score).select(candidates(logits, labels))
        assert in_parts.kept == at_once.kept
        assert in_parts.score == at_once.score


def test_the_preferred_subset_is_found_among_more_than_are_counted_at_once() -> None:
    """Four of the eight wrong models may stay beside the right one: 70 ways, and 64 subsets are counted at once.

    Where class 1 is right, four wrong models make a tie, which class 0 wins: all 70 are refused, and three may stay.
    """
    assert CombinatorialFilter().select(candidates([*[[[0, 2]]] * 8, [[9, 0]]], [0])).kept == (0, 1, 2, 3, 8)
    assert CombinatorialFilter().select(candidates([*[[[2, 0]]] * 8, [[0, 8]]], [1])).kept == (0, 1, 2, 8)


# Scores


def test_accuracy_by_hand() -> None:
    logits = torch.tensor([[[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 4.0]], [[0.0, 1.0]] * 4])
    assert accuracy(logits, torch.tensor([0, 1, 1, 0])).tolist() == [0.75, 0.5]


def test_log_likelihood_is_minus_the_cross_entropy_of_pytorch() -> None:
    random = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(50, 7, generator=random), torch.randint(7, (50,), generator=random)
    expected = -torch.nn.functional.cross_entropy(logits, labels)
    assert log_likelihood(logits, labels).item() == pytest.approx(expected.item(), abs=1e-6)


# Scored by the really averaged weights


def linear_candidates(weights: list[list[float]], counts: list[int]) -> tuple[Candidates, torch.Tensor]:
    """Models of one number each, logits (w·x, 0): right on x > 0 when w > 0. The labels say class 0 throughout."""
    inputs = torch.tensor([1.0, 2.0])
    models = torch.tensor(weights)
    share = torch.full((len(weights),), 1 / len(weights))

    def predict(model: torch.Tensor) -> torch.Tensor:
        return torch.stack([model * inputs, torch.zeros(2)], dim=1)

    def average(kept: object) -> torch.Tensor:
        positions = list(kept)  # type: ignore[call-overload]
        chosen = Kept(share[positions].double().numpy(), len(weights), np.array(counts)[positions])
        return combine(torch.zeros(1), models[positions], fedpdp(chosen))

    logits = torch.stack([predict(model) for model in models])
    return Candidates(logits, torch.tensor([0, 0]), share, torch.tensor(counts), models, average, predict), models


@both_scores
def test_scored_by_weights_agrees_with_logits_for_linear_models(score: Score) -> None:
    given, _ = linear_candidates([[0.5], [-0.25], [-4.0], [1.0]], [1, 1, 1, 1])
    by_weights = CombinatorialFilter(score, "weights").select(given)
    by_logits = CombinatorialFilter(score).select(given)
    assert by_weights.kept == by_logits.kept == ((0, 1, 3) if score == "accuracy" else (3,))
    assert by_weights.score == pytest.approx(by_logits.score)


def test_scored_by_weights_scores_the_average_the_run_would_make() -> None:
    """FedAvg keeps a share of the previous model (-1): 0.5·0.5 - 0.5 < 0 for one alone, 0.5·0.5 + 0.5·0.5 for both."""
    given, models = linear_candidates([[0.5], [0.5]], [1, 1])

    def average(kept: object) -> torch.Tensor:
        positions = list(kept)  # type: ignore[call-overload]
        return combine(torch.tensor([-1.0]), models[positions], fedavg(Kept(np.full(len(positions), 0.5), 2)))

    scored = Candidates(given.logits, given.labels, given.weights, given.counts, models, average, given.predict)
    selection = CombinatorialFilter("cross-entropy", "weights").select(scored)
    assert selection.kept == (0, 1)
    expected = -(math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-1))) / 2
    assert selection.score == pytest.approx(expected, abs=1e-6)


def test_only_scoring_by_weights_asks_for_models() -> None:
    assert not CombinatorialFilter().needs_models and CombinatorialFilter().needs_logits
    assert CombinatorialFilter(scored_by="weights").needs_models
    assert not KeepAll().needs_models and not KeepAll().needs_logits


# Bad input and bad luck


@pytest.mark.parametrize("half", [8, 10, 20])
@both_scores
def test_any_number_of_models_is_searched(half: int, score: Score) -> None:
    right, wrong = [[1, 0]], [[0, 20 * half]]
    selection = CombinatorialFilter(score).select(candidates([wrong] * half + [right] * half, [0]))
    assert set(selection.kept) <= set(range(half, 2 * half))
    assert selection.score == pytest.approx(1.0 if score == "accuracy" else -math.log(1 + math.exp(-1)), abs=1e-9)
    if half == 8:
        assert selection.kept == tuple(range(8, 16))


def test_more_models_than_the_exhaustive_search_can_take_are_refused_in_one_line() -> None:
    right = [[1, 0]]
    assert CombinatorialFilter(search="exhaustive").select(candidates([right] * 17, [0])).kept == tuple(range(17))
    with pytest.raises(TooManyModels) as caught:
        CombinatorialFilter(search="exhaustive").select(candidates([right] * 25, [0]))
    assert "25" in str(caught.value) and "24" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_models_than_can_be_averaged_are_refused_in_one_line() -> None:
    twelve, _ = linear_candidates([[1.0]] * 12, [1] * 12)
    assert CombinatorialFilter(scored_by="weights").select(twelve).kept == tuple(range(12))
    thirteen, _ = linear_candidates([[1.0]] * 13, [1] * 13)
    with pytest.raises(TooManyModels) as caught:
        CombinatorialFilter(scored_by="weights").select(thirteen)
    assert "13" in str(caught.value) and "12" in str(caught.value)
    assert "\n" not in str(caught.value)


@both_scores
def test_finite_logits_whose_sum_overflows_do_not_spoil_the_choice(score: Score) -> None:
    """Two models gone wild, to the edge of single precision: the sane one is still found."""
    wild, sane = [[-3e38, 3e38], [3e38, -3e38]], [[1.0, 0.0], [1.0, 0.0]]
    given = Candidates(torch.tensor([wild, sane, wild]), torch.tensor([0, 0]), torch.full((3,), 1 / 3))
    assert CombinatorialFilter(score).select(given).kept == (1,)


@both_scores
def test_something_is_kept_even_when_everything_is_hopeless(score: Score) -> None:
    wild = [[-3e38, 3e38], [3e38, -3e38]]
    given = Candidates(torch.tensor([wild, wild]), torch.tensor([0, 0]), torch.full((2,), 1 / 2))
    assert CombinatorialFilter(score).select(given).kept != ()


def test_no_models_at_all_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="candidates"):
        CombinatorialFilter().select(Candidates(torch.empty(0, 2, 2), torch.tensor([0, 1]), torch.empty(0)))


@pytest.mark.parametrize(("field", "value"), [("score", "acuracy"), ("scored_by", "weight"), ("search", "exaustive")])
def test_unknown_options_are_refused_with_the_nearest_name(field: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{field}: '{value}' is not allowed; use '.*' \(nearest\)"):
        CombinatorialFilter(**{field: value})  # type: ignore[arg-type]


# KeepAll


def test_keep_all_keeps_all_and_scores_nothing() -> None:
    selection = KeepAll().select(Candidates(torch.empty(3, 0, 0), torch.empty(0), torch.full((3,), 1 / 3)))
    assert selection.kept == (0, 1, 2)
    assert selection.score is None and selection.weights is None
