"""The loop of Algorithm 1: each algorithm's round by hand, clients that fail, and filters that ask for more."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedsieve.algorithms import ALGORITHMS, Options, find, table
from fedsieve.averaging import Coefficients, Kept, Scheme, fedavg, fedpdp
from fedsieve.engines import Engine, SequentialEngine, Update
from fedsieve.engines.base import problem_of
from fedsieve.errors import InvalidSetting, TooFewUpdates, TooManyModels
from fedsieve.federation import Federation, ServerClient
from fedsieve.filtering import Candidates, CombinatorialFilter, KeepAll, Krum, ModelFilter, Selection
from fedsieve.runs import Config
from fedsieve.runs.assembly import assemble
from fedsieve.sampling import (
    ClientSampler,
    Feedback,
    ProportionalSampler,
    ThompsonSampler,
    UCBSampler,
    UniformSampler,
)
from fedsieve.vector import Layout

# Clients 10, 20, 30, 40 with p = 0.1, 0.2, 0.3, 0.4. A model is two numbers (u, v); on the two validation examples,
# both of class 0, its logits are (u, 0) and (v, 0). So 10 and 20 are each right once, together twice, and 30 never.
CLIENTS = np.array([10, 20, 30, 40])
SIZES = np.array([1.0, 2.0, 3.0, 4.0])
PREVIOUS = [10.0, 10.0]
RETURNED: dict[int, list[float]] = {10: [3, -1], 20: [-1, 3], 30: [-9, -9], 40: [1, -1]}
LOSSES = {10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}


class TinyEngine(Engine):
    """Clients that return the model they are told to, whatever they were sent."""

    def __init__(self) -> None:
        self.layout = Layout.of(nn.Linear(2, 1, bias=False))
        self.updates = {
            client: Update(client, torch.tensor(model, dtype=torch.float32), LOSSES[client])
            for client, model in RETURNED.items()
        }
        self.asked: list[tuple[list[float], list[int], int]] = []
        self.backwards = False

    def initial_model(self) -> Tensor:
        return torch.tensor(PREVIOUS)

    def train(self, model: Tensor, clients: Sequence[int], round: int) -> Sequence[Update]:
        self.asked.append((model.tolist(), list(clients), round))
        updates = [self.updates[client] for client in clients]
        return updates[::-1] if self.backwards else updates

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        first = torch.stack(list(models)) * 1e10  # so that a huge model has infinite logits
        return torch.stack([first, torch.zeros_like(first)], dim=2)

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        return torch.tensor([0, 0])

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        return -(model @ model) / 2, -model


class Ask(ClientSampler):
    """Asks the same clients in every round, and remembers what it was told."""

    def __init__(self, *clients: int) -> None:
        self.always = np.array(clients)
        self.told: list[Feedback] = []

    def sample(self, round: int, clients: ArrayLike, count: int) -> NDArray[np.int64]:
        return self.always

    def observe(self, feedback: Feedback) -> None:
        self.told.append(feedback)


class Keep(ModelFilter):
    """Keeps given positions, with given weights, after a look at the candidates."""

    needs_models = True

    def __init__(
        self,
        *kept: int,
        weights: list[float] | None = None,
        look: Callable[[Candidates], None] = lambda candidates: None,
    ) -> None:
        self.kept = kept
        self.weights = weights
        self.look = look

    def select(self, candidates: Candidates) -> Selection:
        self.look(candidates)
        return Selection(self.kept, 0.5, None if self.weights is None else torch.tensor(self.weights))


def federation(
    sampler: ClientSampler,
    filter: ModelFilter | None = None,
    averaging: Scheme = fedpdp,
    engine: TinyEngine | None = None,
    **settings: Any,
) -> Federation:
    parts: dict[str, Any] = {"ratio": 0.75, "seed": 0} | settings
    return Federation(
        clients=CLIENTS,
        weights=SIZES,
        sampler=sampler,
        engine=engine or TinyEngine(),
        filter=filter or KeepAll(),
        averaging=averaging,
        **parts,
    )


# One round of each algorithm by hand


@pytest.mark.parametrize(
    ("name", "asked", "kept", "previous", "coefficients", "model", "score"),
    [
        # 0.4·10 + 0.1·3 - 0.2·1 - 0.3·9 and 0.4·10 - 0.1·1 + 0.2·3 - 0.3·9
        ("fedavg", [10, 20, 30], [10, 20, 30], 0.4, [0.1, 0.2, 0.3], [1.4, 1.8], None),
        # (3 + 3 - 1 - 9) / 4 and (-1 - 1 + 3 - 9) / 4
        ("fedprox", [10, 10, 20, 30], [10, 20, 30], 0, [1 / 2, 1 / 4, 1 / 4], [-1.0, -2.0], None),
        # 3/6 - 1/3 - 9/2 and -1/6 + 3/3 - 9/2
        ("fedpdp", [10, 20, 30], [10, 20, 30], 0, [1 / 6, 1 / 3, 1 / 2], [-13 / 3, -11 / 3], None),
        # 3/3 - 2/3 and -1/3 + 6/3
        ("fedca", [10, 20, 30], [10, 20], 0, [1 / 3, 2 / 3], [1 / 3, 5 / 3], 1.0),
        # 10 counts twice: 6/3 - 1/3 and -2/3 + 3/3
        ("fedprox-ca", [10, 10, 20, 30], [10, 20], 0, [2 / 3, 1 / 3], [5 / 3, 1 / 3], 1.0),
        ("fedcm-ucb", [10, 20, 30], [10, 20], 0, [1 / 3, 2 / 3], [1 / 3, 5 / 3], 1.0),
        ("fedcm-ts", [10, 20, 30], [10, 20], 0, [1 / 3, 2 / 3], [1 / 3, 5 / 3], 1.0),
    ],
)
def test_one_round_of_each_algorithm_by_hand(
    name: str,
    asked: list[int],
    kept: list[int],
    previous: float,
    coefficients: list[float],
    model: list[float],
    score: float | None,
) -> None:
    algorithm = find(name)
    sampler, engine = Ask(*asked), TinyEngine()
    here = federation(sampler, algorithm.filter(Options()), algorithm.averaging(Options()), engine)
    played = here.play(1)

    assert engine.asked == [(PREVIOUS, [10, 20, 30], 1)]  # who was drawn twice trains once
    assert (played.round, played.sampled, played.kept) == (1, asked, kept)
    assert played.coefficients.previous == pytest.approx(previous)
    assert played.coefficients.clients.tolist() == pytest.approx(coefficients)
    assert here.model.tolist() == pytest.approx(model)
    assert played.score == score
    assert played.train_loss == pytest.approx(0.2)
    assert played.excluded == {}
    assert sampler.told == [Feedback(1, asked, kept, {10: 0.1, 20: 0.2, 30: 0.3})]


def test_the_plain_mean_is_an_option_and_counts_who_is_drawn_twice() -> None:
    kept = Kept(np.array([0.1, 0.7]), 20, np.array([2, 1]))
    assert find("fedpdp").averaging(Options(coefficients="mean"))(kept).clients.tolist() == [2 / 3, 1 / 3]
    assert find("fedpdp").averaging(Options())(kept).clients.tolist() == pytest.approx([1 / 8, 7 / 8])


def test_the_literal_formula_is_an_option() -> None:
    """p_k·4/2 for the two kept: 0.2·3 - 0.4·1 and -0.2·1 + 0.4·3."""
    options = Options(coefficients="literal")
    here = federation(Ask(10, 20, 30), find("fedca").filter(options), find("fedca").averaging(options))
    played = here.play(1)
    assert played.coefficients.clients.tolist() == pytest.approx([0.2, 0.4])
    assert here.model.tolist() == pytest.approx([0.2, 1.0])


def test_every_option_reaches_its_part() -> None:
    options = Options(mu=0.7, score="cross-entropy", scored_by="weights", coefficients="literal", refresh="stale")
    for name, algorithm in ALGORITHMS.items():
        sampler, filter = algorithm.sampler(options), algorithm.filter(options)
        if isinstance(sampler, UCBSampler | ThompsonSampler):
            assert sampler.refresh == "stale"
        if isinstance(filter, CombinatorialFilter):
            assert (filter.score, filter.scored_by) == ("cross-entropy", "weights")
        if "prox" in name:
            assert getattr(algorithm.objective(options), "mu", None) == 0.7


def test_table_1_lists_the_parts_of_each_algorithm() -> None:
    uniform, proportional = "uniform, without replacement", "p_k, with replacement"
    rows = {
        row["name"]: (row["model_filter"], row["prior_knowledge"], row["sampling"], row["objective"]) for row in table()
    }
    assert rows == {
        "fedavg": (False, False, uniform, "plain"),
        "fedprox": (False, False, proportional, "proximal"),
        "fedpdp": (False, False, uniform, "plain"),
        "fedca": (True, False, uniform, "plain"),
        "fedprox-ca": (True, False, proportional, "proximal"),
        "fedcm-ucb": (True, True, "bandit (UCB), without replacement", "plain"),
        "fedcm-ts": (True, True, "bandit (Thompson), without replacement", "plain"),
        "fedsieve": (True, False, uniform, "plain"),
        "fedsieve-ucb": (True, True, "bandit (UCB), without replacement", "plain"),
        "fedsieve-ts": (True, True, "bandit (Thompson), without replacement", "plain"),
        "fedsieve-finetune": (True, False, uniform, "plain"),
        "server-only": (False, False, "nobody: the server's validation data", "plain"),
        "fedpdp-finetune": (False, False, uniform, "plain"),
        "fedpdp-server-client": (False, False, uniform, "plain"),
    }
    assert json.dumps(table())


def test_the_second_round_starts_from_the_first_ones_model() -> None:
    engine = TinyEngine()
    here = federation(Ask(10), engine=engine, averaging=fedavg)
    here.play(1)
    here.play(2)
    (sent, _, _), (sent_next, _, round) = engine.asked
    assert sent == PREVIOUS and round == 2
    assert sent_next == pytest.approx([0.9 * 10 + 0.1 * 3, 0.9 * 10 - 0.1 * 1])
    assert here.model.tolist() == pytest.approx([0.9 * 9.3 + 0.3, 0.9 * 8.9 - 0.1])


@pytest.mark.parametrize(("ratio", "asked"), [(0.01, 1), (0.25, 1), (0.4, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_a_round_asks_the_nearest_number_of_clients_but_at_least_one(ratio: float, asked: int) -> None:
    assert len(federation(UniformSampler(), ratio=ratio).play(1).sampled) == asked


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_clients_and_of_their_answers_does_not_matter(name: str) -> None:
    algorithm = find(name)

    def played(order: list[int], backwards: bool) -> tuple[Any, ...]:
        engine = TinyEngine()
        engine.backwards = backwards
        here = Federation(
            clients=CLIENTS[order],
            weights=SIZES[order],
            ratio=0.75,
            sampler=algorithm.sampler(Options()),
            engine=engine,
            filter=algorithm.filter(Options()),
            averaging=algorithm.averaging(Options()),
            seed=3,
        )
        rounds = [here.play(round) for round in range(1, 6)]
        return here.model.tolist(), here.sampler.state_dict(), [(one.sampled, one.kept) for one in rounds]

    assert played([0, 1, 2, 3], False) == played([2, 0, 3, 1], True)


# Clients that fail


class Gives(KeepAll):
    """A filter that has decided."""

    needs_models = True

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def select(self, candidates: Candidates) -> Selection:
        return self.selection


class Attentive(UCBSampler):
    """UCB that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Feedback] = []

    def observe(self, feedback: Feedback) -> None:
        self.told.append(feedback)
        super().observe(feedback)


def broken(client: int, kind: str) -> Update:
    inf, nan = float("inf"), float("nan")
    return {
        "nan": Update(client, torch.tensor([nan, 0.0]), 0.1),
        "infinity": Update(client, torch.tensor([0.0, -inf]), 0.1),
        "shape": Update(client, torch.zeros(3), 0.1),
        "scalar": Update(client, torch.tensor(1.0), 0.1),
        "exception": Update(client, None, error="ValueError: no such file"),
        "nothing": Update(client, None),
        "loss": Update(client, torch.zeros(2), nan),
        "logits": Update(client, torch.tensor([1e30, 0.0]), 0.1),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", "model with NaN or infinity"),
        ("infinity", "model with NaN or infinity"),
        ("shape", "model of shape (3,), expected (2,)"),
        ("scalar", "model of shape (), expected (2,)"),
        ("exception", "ValueError: no such file"),
        ("nothing", "returned no model"),
        ("loss", "training loss nan"),
        ("logits", "validation logits with NaN or infinity"),
    ],
)
def test_a_bad_client_is_left_out_with_a_reason_and_not_rewarded(kind: str, reason: str) -> None:
    engine = TinyEngine()
    engine.updates[20] = broken(20, kind)
    sampler = Attentive()
    here = federation(sampler, CombinatorialFilter(), engine=engine, ratio=1.0)
    first = dict(zip(CLIENTS.tolist(), sampler.start(CLIENTS)["mean"].tolist(), strict=True))

    played = here.play(1)
    assert played.excluded == {20: reason}
    assert played.sampled == [10, 20, 30, 40]
    assert played.kept == [10, 40]  # (3, -1) and (1, -1): half right, and no subset of the rest is better
    assert played.coefficients.clients.tolist() == pytest.approx([0.2, 0.8])
    assert here.model.tolist() == pytest.approx([0.2 * 3 + 0.8 * 1, -1.0])
    assert played.train_loss == pytest.approx((0.1 + 0.3 + 0.4) / 3)
    assert set(sampler.told[0].losses) == {10, 30, 40} and not sampler.told[0].durations
    learnt = dict(zip(sampler.state_dict()["clients"], sampler.state_dict()["mean"], strict=True))
    assert learnt == {k: (first[k] + (k in (10, 40))) / 2 for k in CLIENTS.tolist()}


def test_without_a_filter_bad_clients_are_left_out_as_well() -> None:
    engine = TinyEngine()
    engine.updates[10], engine.updates[30] = broken(10, "nan"), broken(30, "exception")
    here = federation(Ask(10, 20, 30, 40), averaging=fedavg, engine=engine)
    played = here.play(1)
    assert played.excluded == {10: "model with NaN or infinity", 30: "ValueError: no such file"}
    assert played.kept == [20, 40]
    assert here.model.tolist() == pytest.approx([0.4 * 10 - 0.2 + 0.4, 0.4 * 10 + 0.6 - 0.4])


SAMPLERS: dict[str, Callable[[], ClientSampler]] = {
    "uniform": UniformSampler,
    "proportional": ProportionalSampler,
    "ucb fresh": UCBSampler,
    "ucb stale": lambda: UCBSampler("stale"),
    "thompson fresh": ThompsonSampler,
    "thompson stale": lambda: ThompsonSampler("stale"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_lost_round_changes_nothing_but_what_the_sampler_knows_of_those_who_failed(name: str) -> None:
    def halfway(engine: TinyEngine) -> Federation:
        here = federation(SAMPLERS[name](), CombinatorialFilter(), engine=engine, ratio=0.5, min_updates=1)
        for round in (1, 2, 3):
            here.play(round)
        return here

    engine = TinyEngine()
    disturbed, expected = halfway(engine), halfway(TinyEngine()).sampler
    model, healthy = disturbed.model.clone(), dict(engine.updates)
    expected.observe(Feedback(4, expected.sample(4, CLIENTS, 2), kept=[]))
    engine.updates = {client: broken(client, "exception") for client in healthy}
    with pytest.raises(TooFewUpdates) as caught:
        disturbed.play(4)
    assert "round 4: 0 usable models" in str(caught.value)
    assert "ValueError: no such file" in str(caught.value) and "\n" not in str(caught.value)
    assert torch.equal(disturbed.model, model)
    assert disturbed.sampler.state_dict() == expected.state_dict()

    engine.updates = healthy
    assert disturbed.play(5).sampled == expected.sample(5, CLIENTS, 2).tolist()


def test_a_bandit_turns_away_from_a_client_whose_rounds_are_lost() -> None:
    engine = TinyEngine()
    engine.updates[20] = broken(20, "exception")
    here = federation(UCBSampler(), engine=engine, ratio=0.25)
    asked = []
    for round in range(1, 41):
        with suppress(TooFewUpdates):
            here.play(round)
        asked.append(engine.asked[-1][1][0])
    times = Counter(asked)
    assert times[20] < min(times[10], times[30], times[40])
    assert max(len(list(same)) for client, same in groupby(asked) if client == 20) < 10


def test_only_those_who_failed_are_blamed_for_a_lost_round() -> None:
    engine, sampler = TinyEngine(), Ask(10, 20, 30)
    engine.updates[30] = broken(30, "nan")
    with pytest.raises(TooFewUpdates):
        federation(sampler, engine=engine, min_updates=3).play(1)
    assert sampler.told == [Feedback(1, [30], [])]


@pytest.mark.parametrize("kind", ["nan", "logits"])
def test_the_minimum_counts_usable_models(kind: str) -> None:
    engine = TinyEngine()
    engine.updates[30] = broken(30, kind)
    here = federation(Ask(10, 20, 30), CombinatorialFilter(), engine=engine, min_updates=2)
    assert here.play(1).kept == [10, 20]
    here = federation(Ask(10, 20, 30), CombinatorialFilter(), engine=engine, min_updates=3)
    with pytest.raises(TooFewUpdates, match="round 1: 2 usable models of 3, at least 3 needed"):
        here.play(1)


def test_a_round_with_too_few_models_for_its_filter_leaves_the_model_as_it_was() -> None:
    """Krum needs 2·0 + 3 models; in the second round two come back, which is enough for the run."""
    engine, sampler = TinyEngine(), Ask(10, 20, 30)
    here = federation(sampler, Krum(0), engine=engine)
    here.play(1)
    model = here.model.clone()
    engine.updates[20] = Update(20, None, error="dropped out")
    with pytest.raises(TooFewUpdates) as caught:
        here.play(2)
    assert str(caught.value) == (
        "round 2: Krum has 2 usable models, n ≥ 2f + 3 needed with f = byzantine = 0 (client 20: dropped out)"
    )
    assert caught.value.excluded == {20: "dropped out"}
    assert torch.equal(here.model, model) and sampler.told[1:] == [Feedback(2, [20], [])]


# Filters and schemes of one's own


def test_weights_of_a_selection_replace_the_averaging_scheme() -> None:
    """0.25·3 + 0.75·(-9) and 0.25·(-1) + 0.75·(-9); the weight of a model left out is not used."""
    here = federation(Ask(10, 20, 30), Keep(0, 2, weights=[0.25, 99.0, 0.75]), fedavg)
    played = here.play(1)
    assert played.kept == [10, 30]
    assert played.coefficients.previous == 0
    assert played.coefficients.clients.tolist() == [0.25, 0.75]
    assert here.model.tolist() == pytest.approx([-6.0, -7.0])
    assert played.score == 0.5


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (
            Selection((0,), weights=torch.tensor([1.0])),
            r"^weights: \(1,\) is not allowed; use one for each of 3 models",
        ),
        (Selection((0.0,)), r"^kept: \(0\.0,\) is not allowed; use positions"),  # type: ignore[arg-type]
        (Selection((0,), score="high"), r"^score: 'high' is not allowed; use a number"),  # type: ignore[arg-type]
        (Selection((0,), model=torch.zeros(5)), r"^model: \(5,\) is not allowed; use one of shape \(2,\), from"),
    ],
)
def test_a_filter_that_gives_what_is_no_model_or_weights_is_named(selection: Selection, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        federation(Ask(10, 20, 30), Gives(selection)).play(1)


@pytest.mark.parametrize(
    "selection",
    [
        Selection((0, 1), weights=torch.tensor([math.nan, 1.0, 0.0])),
        Selection((0, 1), model=torch.tensor([math.inf, 0.0])),
    ],
)
def test_a_new_model_that_is_not_finite_costs_the_round_and_not_the_model(selection: Selection) -> None:
    here = federation(Ask(10, 20, 30), Gives(selection))
    with pytest.raises(TooFewUpdates, match="round 1: the new model has NaN or infinity, after Gives"):
        here.play(1)
    assert here.model.tolist() == PREVIOUS


def test_a_server_whose_own_training_diverges_is_left_out() -> None:
    engine = TinyEngine()
    engine.updates[99] = Update(99, torch.full((2,), math.nan), 0.1)
    with_server = federation(Ask(10, 20, 30), engine=engine, server=ServerClient(99, 1.0))
    without = federation(Ask(10, 20, 30))
    for here in (with_server, without):
        here.play(1)
    assert torch.equal(with_server.model, without.model)


def test_candidates_tell_who_they_are() -> None:
    seen: list[Candidates] = []
    federation(Ask(40, 10, 40, 20), Keep(0, look=seen.append)).play(1)
    (candidates,) = seen
    assert candidates.weights.tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert candidates.counts is not None and candidates.counts.tolist() == [1, 1, 2]
    assert candidates.models is not None
    assert [model.tolist() for model in candidates.models] == [RETURNED[10], RETURNED[20], RETURNED[40]]
    logits = [[[u * 1e10, 0], [v * 1e10, 0]] for u, v in (RETURNED[10], RETURNED[20], RETURNED[40])]
    torch.testing.assert_close(candidates.logits, torch.tensor(logits))


def test_average_is_what_the_runs_scheme_would_make() -> None:
    """FedAvg of 10 and 30: 0.6·10 + 0.1·3 - 0.3·9 and 0.6·10 - 0.1·1 - 0.3·9."""

    def look(candidates: Candidates) -> None:
        assert candidates.average is not None
        assert candidates.average([0, 2]).tolist() == pytest.approx([3.6, 3.2])

    here = federation(Ask(10, 20, 30), Keep(0, 2, look=look), fedavg)
    here.play(1)
    assert here.model.tolist() == pytest.approx([3.6, 3.2])


def test_a_scheme_sees_weights_population_counts_and_losses() -> None:
    seen: list[Kept] = []

    def scheme(kept: Kept) -> Coefficients:
        seen.append(kept)
        return Coefficients(0.0, np.array([0.5, 0.5]))

    federation(Ask(20, 40, 40), averaging=scheme).play(1)
    (kept,) = seen
    assert kept.weights.tolist() == pytest.approx([0.2, 0.4])
    assert kept.population == 4
    assert kept.counts.tolist() == [1, 2]
    assert kept.losses.tolist() == [0.2, 0.4]


@pytest.mark.parametrize("clients", [[1, 0], (1.0, 0.0), torch.tensor([1, 0]), np.array([1, 0])])
def test_a_scheme_may_give_its_numbers_as_it_likes(clients: Any) -> None:
    here = federation(Ask(20, 40), averaging=lambda kept: Coefficients(0, clients))
    assert here.play(1).coefficients.clients.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("clients", [[1], [[1, 0]], ["one", "none"], None])
def test_a_scheme_that_gives_no_numbers_is_named(clients: Any) -> None:
    here = federation(Ask(20, 40), averaging=lambda kept: Coefficients(0.0, clients))
    with pytest.raises(InvalidSetting, match=r"^averaging: .*Coefficients with one number for each of 2 models"):
        here.play(1)


def test_what_a_filter_says_is_kept_as_plain_numbers() -> None:
    played = federation(Ask(10, 20), Gives(Selection((np.int64(0),), score=torch.tensor(0.5)))).play(1)  # type: ignore[arg-type]
    assert played.kept == [10] and played.score == 0.5 and type(played.score) is float


def test_a_filter_that_keeps_nobody_is_refused_and_nothing_changes() -> None:
    sampler = Ask(10, 20)
    here = federation(sampler, Keep())
    with pytest.raises(InvalidSetting, match=r"^kept: \(\) is not allowed; use at least one model kept by Keep$"):
        here.play(1)
    assert here.model.tolist() == PREVIOUS and sampler.told == []


def test_more_models_than_the_filter_can_search_change_nothing() -> None:
    clients = np.arange(25)

    class Many(TinyEngine):
        def train(self, model: Tensor, clients: Sequence[int], round: int) -> Sequence[Update]:
            return [Update(client, torch.ones(2), 0.1) for client in clients]

    sampler = UCBSampler()
    here = Federation(
        clients=clients,
        weights=np.ones(25),
        ratio=1.0,
        sampler=sampler,
        engine=Many(),
        filter=CombinatorialFilter(search="exhaustive"),
        averaging=fedpdp,
        seed=0,
    )
    before = sampler.state_dict()
    with pytest.raises(TooManyModels):
        here.play(1)
    assert here.model.tolist() == PREVIOUS and sampler.state_dict() == before


# The real engine, on digits


class Smooth(nn.Module):
    """In double precision and without kinks, so that finite differences are sharp."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), middle, nn.Tanh(), nn.Linear(6, 10)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs.double())
        return outputs


def config(**changes: Any) -> Config:
    settings = {
        "algorithm": "fedca",
        "clients": 6,
        "ratio": 0.5,
        "rounds": 2,
        "local_epochs": 1,
        "lr": 0.1,
        "batch_size": 64,
    }
    return Config(**(settings | {"device": "cpu", "heterogeneity": "client", "alpha": 1.0} | changes))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_filter_gets_working_averages_predictions_and_gradients(batch_norm: bool) -> None:
    looked = []

    def look(candidates: Candidates) -> None:
        models, average, predict = candidates.models, candidates.average, candidates.predict
        ascend, labels = candidates.score_and_gradient, candidates.labels
        assert models is not None and average is not None and predict is not None and ascend is not None
        assert len(models) == len(candidates.weights) == 3
        for model, logits in zip(models, candidates.logits, strict=True):
            assert torch.equal(predict(model), logits)

        by_hand = (candidates.weights[0] * models[0] + candidates.weights[2] * models[2]) / (
            candidates.weights[0] + candidates.weights[2]
        )
        point = average([0, 2])
        torch.testing.assert_close(point, by_hand)

        def score(model: Tensor, examples: list[int]) -> float:
            outputs = predict(model)
            total = 0.0
            for example in examples:
                row = outputs[example].tolist()
                total += row[int(labels[example])] - math.log(sum(math.exp(value) for value in row))
            return total / len(examples)

        parameters = sum(parameter.numel() for parameter in Smooth(batch_norm).parameters())
        random = torch.Generator().manual_seed(0)
        for positions in (None, torch.tensor([3, 0, 7, 550])):
            examples = list(range(len(labels))) if positions is None else positions.tolist()
            value, gradient = ascend(point) if positions is None else ascend(point, positions)
            assert float(value) == pytest.approx(score(point, examples), abs=1e-9)
            assert gradient.shape == point.shape and (gradient[parameters:] == 0).all()
            for _ in range(3):
                way = torch.zeros_like(point)
                way[:parameters] = torch.randn(parameters, generator=random, dtype=torch.float64)
                h = 1e-5
                slope = (score(point + h * way, examples) - score(point - h * way, examples)) / (2 * h)
                assert float(gradient @ way) == pytest.approx(slope, abs=1e-7, rel=1e-6)
        looked.append(True)

    filter = Keep(0, 2, look=look)
    more_than_one_batch = config(validation_per_class=60)
    here, engine = assemble(more_than_one_batch, filter=filter, model=partial(Smooth, batch_norm))
    here.play(1)
    assert looked
    assert here.model.dtype == torch.float64
    assert engine.logits([here.model], "test")[0].shape == (len(engine.labels("test")), 10)


def test_score_and_gradient_leaves_the_model_alone() -> None:
    _, engine = assemble(config(), model=Smooth)
    model = engine.initial_model()
    before = model.clone()
    first, gradient = engine.score_and_gradient(model)
    again, gradient_again = engine.score_and_gradient(model)
    assert first == again and torch.equal(gradient, gradient_again)
    assert torch.equal(model, before) and not model.requires_grad


def test_what_a_client_learns_does_not_depend_on_who_else_is_asked() -> None:
    _, engine = assemble(config())
    model = engine.initial_model()
    together = engine.train(model, [0, 3, 5], round=2)
    engine.logits([model], "test")
    alone = engine.train(model, [3], round=2)
    assert [update.client for update in together] == [0, 3, 5]
    assert together[1].model is not None and alone[0].model is not None
    assert torch.equal(together[1].model, alone[0].model)
    assert together[1].loss == alone[0].loss
    assert torch.equal(model, engine.initial_model())


def test_an_exception_in_one_client_is_its_own() -> None:
    here, engine = assemble(config(), model=Smooth)
    assert isinstance(engine, SequentialEngine)

    class Shy(Smooth):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training and len(inputs) == last_batch:
                raise RuntimeError("something\n  went wrong")
            return super().forward(inputs)

    sizes = {int(client): len(engine.partition[int(client)]) % 64 for client in here.clients}
    last_batch = sizes[2]
    others = [client for client, size in sizes.items() if size != last_batch]
    _, shy = assemble(config(), model=Shy)
    updates = shy.train(shy.initial_model(), [others[0], 2, others[1]], round=1)
    assert [update.error for update in updates] == [None, "RuntimeError: something went wrong", None]
    assert updates[1].model is None
    whole = engine.train(engine.initial_model(), [others[1]], round=1)
    assert updates[2].model is not None and whole[0].model is not None
    assert torch.equal(updates[2].model, whole[0].model)


def test_diverging_clients_fail_the_round_not_the_federation() -> None:
    here, engine = assemble(config(lr=1e30))
    with pytest.raises(TooFewUpdates, match="NaN"):
        here.play(1)
    assert torch.equal(here.model, engine.initial_model())


@pytest.mark.parametrize(
    ("values", "finite"),
    [([3e38, 3e38], True), ([-3e38, -3e38, 1.0], True), ([1.0, math.nan], False), ([math.inf, -math.inf], False)],
)
def test_large_numbers_are_not_taken_for_infinite_ones(values: list[float], finite: bool) -> None:
    model = torch.tensor(values)
    assert problem_of(model, 0.0, like=model) == (None if finite else "model with NaN or infinity")
