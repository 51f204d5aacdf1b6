"""Partitions: every example once or unused, repeatable, and as uneven as the Dirichlet distribution says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsieve.data import Partition, even_out, mislabel, partition, validation_split
from fedsieve.data.partition import SCHEMES, _draw_classes
from fedsieve.errors import InvalidSetting

Case = tuple[NDArray[np.int64], int, str, float, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    labels = draw(st.lists(st.integers(0, 6), min_size=2, max_size=120))
    scheme = draw(st.sampled_from(SCHEMES))
    clients = draw(st.integers(1, len(labels) // 2))
    alpha = draw(st.sampled_from([1e-300, 1e-6, 1e-3, 0.1, 1.0, 50.0, 1e300]))
    return np.array(labels), clients, scheme, alpha, draw(st.integers(0, 2**32))


def same(one: Partition, other: Partition) -> bool:
    pairs = ((one.indices, other.indices), (one.offsets, other.offsets), (one.unused, other.unused))
    return all(np.array_equal(a, b) for a, b in pairs)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_example_is_held_once_or_unused(case: Case) -> None:
    labels, clients, scheme, alpha, seed = case
    parts = partition(labels, clients, scheme, alpha=alpha, seed=seed)
    assert len(parts) == clients
    everything = np.concatenate([*parts, parts.unused])
    assert sorted(everything.tolist()) == list(range(len(labels)))
    assert parts.sizes.tolist() == [len(held) for held in parts]


@settings(max_examples=50, deadline=None)
@given(cases())
def test_sizes_are_those_the_scheme_promises(case: Case) -> None:
    labels, clients, scheme, alpha, seed = case
    parts = partition(labels, clients, scheme, alpha=alpha, seed=seed)
    if scheme == "class":
        assert set(parts.sizes.tolist()) == {len(labels) // clients}
        assert len(parts.unused) == len(labels) % clients
    else:
        assert len(parts.unused) == 0
    if scheme == "iid":
        assert np.ptp(parts.sizes) <= 1


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_same_seed_gives_the_same_partition(case: Case) -> None:
    labels, clients, scheme, alpha, seed = case
    first, second = (partition(labels, clients, scheme, alpha=alpha, seed=seed) for _ in range(2))
    assert same(first, second)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_class_counts_are_what_counting_one_by_one_gives(case: Case) -> None:
    labels, clients, scheme, alpha, seed = case
    parts = partition(labels, clients, scheme, alpha=alpha, seed=seed)
    by_hand = [[sum(labels[i] == c for i in held) for c in range(8)] for held in parts]
    assert parts.class_counts(labels, 8).tolist() == by_hand


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_only_candidates_are_handed_out_in_whatever_order_they_are_listed(case: Case, data: st.DataObject) -> None:
    labels, clients, scheme, alpha, seed = case
    chosen = data.draw(st.permutations(range(len(labels))))[: max(2 * clients, len(labels) // 2)]
    options: dict[str, Any] = {"alpha": alpha, "seed": seed}
    parts = partition(labels, clients, scheme, candidates=np.array(chosen), **options)
    assert sorted([*parts.indices.tolist(), *parts.unused.tolist()]) == sorted(chosen)
    assert same(parts, partition(labels, clients, scheme, candidates=np.array(sorted(chosen)), **options))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_seed_gives_another_partition(scheme: str) -> None:
    labels = np.repeat(np.arange(10), 50)
    first, second = (partition(labels, 10, scheme, alpha=0.5, seed=seed) for seed in (0, 1))
    assert not same(first, second)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_type_of_the_labels_changes_nothing(scheme: str, dtype: type[np.integer[Any]]) -> None:
    labels = np.arange(300) % 7
    usual = partition(labels, 9, scheme, alpha=0.3, seed=4)
    assert same(usual, partition(labels.astype(dtype), 9, scheme, alpha=0.3, seed=4))
    counts = usual.class_counts(labels.astype(dtype), 7)
    assert np.array_equal(counts, usual.class_counts(labels, 7))
    validation = validation_split(labels.astype(dtype), 5, 7, seed=4)[0]
    assert np.array_equal(validation, validation_split(labels, 5, 7, seed=4)[0])


def test_global_random_state_is_left_alone() -> None:
    before = repr(np.random.get_state())  # noqa: NPY002
    for scheme in SCHEMES:
        partition(np.arange(100) % 10, 10, scheme, seed=0)
    validation_split(np.arange(100) % 10, 5, 10, seed=0)
    assert repr(np.random.get_state()) == before  # noqa: NPY002


def largest_gap(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The Kolmogorov-Smirnov distance between two samples."""
    points = np.concatenate([one, other])
    below = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_client_shares_of_a_class_follow_the_dirichlet_distribution(alpha: float) -> None:
    clients, per_class, classes = 5, 5000, 40
    labels = np.repeat(np.arange(classes), per_class)
    seeds = range(12)
    parts = [partition(labels, clients, "client", alpha=alpha, seed=seed) for seed in seeds]
    counts = [held.class_counts(labels, classes) for held in parts]
    shares = np.concatenate([c.T for c in counts]) / per_class  # [classes × seeds, clients]
    expected_variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.mean(axis=0) == pytest.approx(1 / clients, abs=5 * (expected_variance / len(shares)) ** 0.5)
    assert shares.var(axis=0).mean() == pytest.approx(expected_variance, rel=0.12)
    reference = np.random.default_rng(0).dirichlet([alpha] * clients, 20_000)
    whole = np.floor(reference[:, 0] * per_class) / per_class  # what can't be told apart in whole examples
    assert largest_gap(np.floor(shares[:, 0] * per_class) / per_class, whole) < 0.09


def test_client_shares_are_never_a_whole_example_off() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    sizes = partition(labels, 300, "client", alpha=1e12, seed=0).sizes
    assert set(sizes.tolist()) <= {3, 4}


def test_few_examples_for_many_clients_favour_no_client() -> None:
    labels = np.zeros(10, dtype=np.int64)
    sizes = sum(partition(labels, 10, "client", alpha=0.3, seed=s).sizes for s in range(3000))
    # One share has mean 1 and variance 10²·0.1·0.9/(3 + 1), rounding adds at most 1/4.
    assert sizes / 3000 == pytest.approx(1, abs=5 * (2.5 / 3000) ** 0.5)


def test_class_mixtures_have_the_variance_of_draws_from_a_dirichlet_mixture() -> None:
    classes, size, alpha = 10, 500, 0.5
    labels = np.repeat(np.arange(classes), 1000)  # the first client can't meet a class that has run out
    first = np.array([partition(labels, 20, "class", alpha=alpha, seed=s)[0] for s in range(600)])
    shares = np.array([np.bincount(labels[held], minlength=classes) for held in first]) / size
    mean = 1 / classes
    spread = mean * (1 - mean) / (classes * alpha + 1)
    expected = spread + (mean - mean**2 - spread) / size
    assert shares.mean(axis=0) == pytest.approx(mean, abs=5 * (expected / 600) ** 0.5)
    assert shares.var(axis=0).mean() == pytest.approx(expected, rel=0.12)


def test_class_mixtures_are_near_uniform_for_large_alpha() -> None:
    labels = np.repeat(np.arange(10), 10_000)
    parts = partition(labels, 50, "class", alpha=1e5, seed=0)
    shares = parts.class_counts(labels, 10)[:40] / 2000
    assert np.abs(shares - 0.1).max() < 5 * (0.09 / 2000) ** 0.5


def test_tiny_alpha_gives_each_client_one_class_while_there_is_enough() -> None:
    labels = np.repeat(np.arange(10), 1000)
    parts = partition(labels, 100, "class", alpha=1e-6, seed=0)
    assert ((parts.class_counts(labels, 10) > 0).sum(axis=1)[:10] == 1).all()


def test_a_class_that_runs_out_worked_by_hand() -> None:
    """Three clients of four, class 0 has three examples, class 1 nine; a tiny alpha makes each want one class.

    The first client that wants class 0 gets all three of it and one of class 1; if the first two want class 1,
    the last gets what is left, which is the same. So it is client 0, 1, 2 in 1/2, 1/4, 1/4 of all cases.
    """
    labels = np.array([0] * 3 + [1] * 9)
    mixed = Counter[int]()
    for seed in range(800):
        counts = partition(labels, 3, "class", alpha=1e-6, seed=seed).class_counts(labels, 2).tolist()
        assert sorted(counts) == [[0, 4], [0, 4], [3, 1]]
        mixed[counts.index([3, 1])] += 1
    assert [mixed[client] / 800 for client in range(3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.08)


def test_missing_draws_go_to_the_classes_left_in_proportion_to_q() -> None:
    remaining = np.array([1000, 10**6, 10**6])
    counts = np.zeros((1, 3), dtype=np.int64)
    _draw_classes(np.log([[0.8, 0.15, 0.05]]), 100_000, remaining, counts, np.random.default_rng(0))
    assert counts.sum() == 100_000
    assert counts[0, 0] == 1000 and remaining[0] == 0
    assert counts[0, 1] == pytest.approx(99_000 * 0.75, abs=5 * (99_000 * 0.75 * 0.25) ** 0.5)


def test_class_scheme_agrees_with_drawing_one_example_at_a_time() -> None:
    stock, clients, alpha, trials = [3, 5, 8], 4, 0.5, 1500
    labels = np.repeat(np.arange(3), stock)
    fast = np.array(
        [partition(labels, clients, "class", alpha=alpha, seed=s).class_counts(labels, 3) for s in range(trials)]
    )
    draws = np.random.default_rng(0)
    slow = np.zeros_like(fast)
    for trial in range(trials):
        left = np.array(stock)
        for client in range(clients):
            q = draws.dirichlet([alpha] * 3)
            for _ in range(4):
                chances = np.cumsum(q * (left > 0))
                drawn = int(np.searchsorted(chances, draws.random() * chances[-1], side="right"))
                left[drawn] -= 1
                slow[trial, client, drawn] += 1
    noise = np.sqrt((fast.var(axis=0) + slow.var(axis=0)) / trials)
    assert (np.abs(fast.mean(axis=0) - slow.mean(axis=0)) < 4.5 * noise).all()
    spread = [np.square(counts - counts.mean(axis=0)).mean(axis=0) for counts in (fast, slow)]
    np.testing.assert_allclose(spread[0], spread[1], rtol=0.2)


def test_shards_give_each_client_few_classes() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    parts = partition(labels, 50, "shards", shards_per_client=2, seed=0)
    assert set(parts.sizes.tolist()) == {20}
    assert (parts.class_counts(labels, 10) > 0).sum(axis=1).max() <= 2


def test_a_million_clients_take_seconds() -> None:
    labels = np.zeros(2_000_000, dtype=np.uint8)
    parts = partition(labels, 1_000_000, "iid", seed=0)
    assert set(parts.sizes.tolist()) == {2}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"clients": 0}, "clients", 0),
        ({"clients": -3}, "clients", -3),
        ({"clients": 21}, "clients", 21),
        ({"alpha": 0.0}, "alpha", 0.0),
        ({"alpha": -1.0}, "alpha", -1.0),
        ({"alpha": float("inf")}, "alpha", float("inf")),
        ({"scheme": "dirichlet"}, "heterogeneity", "dirichlet"),
        ({"scheme": "shards", "shards_per_client": 0}, "shards_per_client", 0),
        ({"scheme": "shards", "shards_per_client": 6}, "shards_per_client", 6),
        ({"candidates": np.array([1, 2, 20, 3])}, "candidates", 20),
        ({"candidates": np.array([1, -2, 4, 3])}, "candidates", -2),
        ({"candidates": np.array([1, 1, 4, 3, 5])}, "candidates", "1 repeated"),
        ({"candidates": np.array([1.0, 2.0])}, "candidates", "float64 [2]"),
        ({"labels": np.array([0, -1, 2, 3])}, "labels", -1),
    ],
)
def test_unusable_settings_are_refused_by_name(changes: dict[str, Any], field: str, value: object) -> None:
    arguments: dict[str, Any] = {"labels": np.arange(20) % 4, "clients": 4, "scheme": "class", "seed": 0}
    with pytest.raises(InvalidSetting) as caught:
        partition(**(arguments | changes))
    assert (caught.value.field, caught.value.value) == (field, value)
    assert "\n" not in str(caught.value)


def test_an_alpha_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="alpha: nan"):
        partition(np.arange(10) % 2, 2, "client", alpha=float("nan"), seed=0)


def test_a_misspelt_scheme_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidSetting, match="'client' \\(nearest\\)"):
        partition(np.arange(10) % 2, 2, "clients", seed=0)


def test_a_client_that_is_not_there_is_an_index_error() -> None:
    parts = partition(np.arange(10) % 2, 2, "iid", seed=0)
    for client in (2, -1):
        with pytest.raises(IndexError):
            parts[client]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(0, 9), st.integers(0, 1000))
def test_validation_is_balanced_and_apart_from_the_rest(labels: list[int], per_class: int, seed: int) -> None:
    array = np.array(labels + [0, 1, 2, 3, 4] * 9)
    validation, remaining = validation_split(array, per_class, 5, seed)
    assert np.bincount(array[validation], minlength=5).tolist() == [per_class] * 5
    assert sorted([*validation.tolist(), *remaining.tolist()]) == list(range(len(array)))
    assert np.array_equal(validation, validation_split(array, per_class, 5, seed)[0])


def test_each_example_is_as_likely_as_any_other_of_its_class_to_be_in_validation() -> None:
    labels = np.array([0, 1, 0, 1, 0, 0])
    chosen = np.zeros(6)
    for seed in range(2000):
        chosen[validation_split(labels, 1, 2, seed)[0]] += 1
    assert chosen / 2000 == pytest.approx([0.25, 0.5, 0.25, 0.5, 0.25, 0.25], abs=0.05)


@pytest.mark.parametrize("per_class", [-1, 4])
def test_validation_of_more_than_a_class_has_is_refused(per_class: int) -> None:
    labels = np.array([0] * 8 + [1] * 3 + [2] * 5)
    with pytest.raises(InvalidSetting, match=r"validation_per_class: .* use 0 to 3, .* class 1"):
        validation_split(labels, per_class, 3, seed=0)


def test_validation_needs_every_class() -> None:
    with pytest.raises(InvalidSetting, match="class 2"):
        validation_split(np.array([0, 1, 0, 1]), 1, 3, seed=0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 12),
    st.floats(1, 100),
    st.integers(0, 1000),
    st.lists(st.integers(0, 7)).map(tuple),
)
def test_imbalanced_validation_falls_by_one_factor_and_keeps_the_total(
    classes: int, per_class: int, imbalance: float, seed: int, more: tuple[int, ...]
) -> None:
    labels = np.array([*np.repeat(np.arange(classes), classes * per_class), *(label % classes for label in more)])
    factors = np.array([imbalance ** (-rank / max(1, classes - 1)) for rank in range(classes)])
    exact = classes * per_class * factors / factors.sum()
    try:
        validation, rest = validation_split(labels, per_class, classes, seed, imbalance)
    except InvalidSetting as error:
        assert error.field == "validation_imbalance" and "no example" in str(error) and exact[-1] < 1
        return
    falling = np.sort(np.bincount(labels[validation], minlength=classes))[::-1]
    assert falling.sum() == classes * per_class and falling[-1] >= 1
    assert (np.abs(falling - exact) < 1).all()
    assert sorted([*validation.tolist(), *rest.tolist()]) == list(range(len(labels)))
    assert np.array_equal(validation, validation_split(labels, per_class, classes, seed, imbalance)[0])


def test_a_factor_of_ten_worked_by_hand() -> None:
    # 40 in all, a third of a power of ten from class to class: 40 · (1, 0.464, 0.215, 0.1) / 1.779 = 22.5, 10.4, 4.8,
    # 2.2; rounded down 38, and the two that lost most get one more.
    labels = np.repeat(np.arange(4), 50)
    counts = [np.bincount(labels[validation_split(labels, 10, 4, seed, 10.0)[0]]).tolist() for seed in range(40)]
    assert {tuple(sorted(one)) for one in counts} == {(2, 5, 10, 23)}
    assert len({tuple(one) for one in counts}) > 10  # which class is rare follows from the seed


def test_no_imbalance_is_the_split_as_it_was() -> None:
    labels = np.arange(200) % 7
    for one, other in zip(validation_split(labels, 5, 7, 3), validation_split(labels, 5, 7, 3, 1.0), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("per_class", "imbalance", "problem"),
    [
        (1, 10.0, "validation_imbalance: 10.0 is not allowed; use a smaller one, or more validation_per_class: "),
        (40, 10.0, "validation_imbalance: 10.0 is not allowed; use a smaller one: of class "),
        (5, 0.5, "validation_imbalance: 0.5 is not allowed; use a finite number of at least 1"),
        (5, float("inf"), "validation_imbalance: inf is not allowed; use a finite number of at least 1"),
    ],
)
def test_an_imbalance_that_the_data_can_not_give_is_one_line(per_class: int, imbalance: float, problem: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        validation_split(np.repeat(np.arange(10), 50), per_class, 10, 0, imbalance)
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60),
    st.floats(0, 1),
    st.integers(0, 1000),
    st.sampled_from([np.uint8, np.int64, np.uint64]),
    st.data(),
)
def test_so_many_labels_are_wrong_and_no_other(
    labels: list[int], share: float, seed: int, dtype: type[np.integer[Any]], data: st.DataObject
) -> None:
    right = np.array(labels, dtype=dtype)
    places = np.array(sorted(data.draw(st.sets(st.integers(0, len(labels) - 1)))), dtype=np.int64)
    wrong = mislabel(right, places, share, 6, seed)
    changed = np.flatnonzero(wrong != right)
    assert len(changed) == int(share * len(places) + 0.5)
    assert set(changed.tolist()) <= set(places.tolist())
    assert wrong.dtype == right.dtype and wrong.max() < 6
    assert right.tolist() == labels
    assert np.array_equal(wrong, mislabel(right, places, share, 6, seed))


def test_a_wrong_label_is_any_other_with_equal_chance() -> None:
    wrong = mislabel(np.full(9000, 1), np.arange(9000), 1.0, 4, seed=0)
    assert np.bincount(wrong, minlength=4) == pytest.approx([3000, 0, 3000, 3000], abs=5 * (9000 * 2 / 9) ** 0.5)


def test_one_class_has_no_wrong_labels() -> None:
    with pytest.raises(InvalidSetting, match=r"validation_errors: 0\.5 .* one class alone"):
        mislabel(np.zeros(4, dtype=np.int64), np.arange(4), 0.5, 1, seed=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 1000))
def test_evened_out_classes_come_up_as_often_and_their_examples_nearly_so(labels: list[int], seed: int) -> None:
    given_labels = np.array(labels)
    positions = even_out(given_labels, seed)
    most = Counter(labels).most_common(1)[0][1]
    assert Counter(given_labels[positions].tolist()) == dict.fromkeys(labels, most)
    times = Counter(positions.tolist())
    for label in set(labels):
        own = [times[position] for position in np.flatnonzero(given_labels == label).tolist()]
        assert min(own) >= 1 and max(own) - min(own) <= 1
    assert np.array_equal(positions, even_out(given_labels, seed))


def test_what_is_even_stays_as_it_is() -> None:
    assert even_out(np.array([2, 0, 2, 0]), seed=0).tolist() == [0, 1, 2, 3]


def test_only_labels_are_evened_out() -> None:
    with pytest.raises(InvalidSetting, match=r"labels: .*float64 \[2\].* is not allowed; use integers"):
        even_out(np.array([0.5, 1.0]), seed=0)
