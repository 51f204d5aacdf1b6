"""Flower strategies: the simulator's choices in real federations, whatever nodes do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flower_simulation import STRATEGIES, config
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedsieve as fs
from fedsieve.averaging import Coefficients, Kept
from fedsieve.clients import crop_and_flip, draw_crops_and_flips
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import Candidates, FineTuning, KeepAll, Krum, ModelFilter, Selection
from fedsieve.flower import FedCA, FedCM, FedPdp, FedSieve, SieveStrategy, client_app
from fedsieve.flower.arrays import ArrayLayout, piece_names
from fedsieve.flower.roster import NAMED, Roster, arm_of
from fedsieve.sampling import (
    AgnosticSampler,
    ClientSampler,
    CSUCBQSampler,
    CSUCBSampler,
    FedCSSampler,
    OortSampler,
    PowerOfChoiceSampler,
    ProportionalSampler,
    UCBSampler,
    UniformSampler,
)
from fedsieve.vector import Layout

Answer = Callable[[Message], Message | None]


class LocalGrid(Grid):
    """Nodes that answer at once, in this process."""

    def __init__(self, nodes: dict[int, Answer]) -> None:
        self.nodes = nodes
        self.sent: list[list[int]] = []
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train":
            self.sent.append(sorted(message.metadata.dst_node_id for message in messages))
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"to {message.metadata.dst_node_id}"
        return [
            reply for message in messages if (reply := self.nodes[message.metadata.dst_node_id](message)) is not None
        ]


class Line(nn.Module):
    """Two classes told apart by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * self.weight


X = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
Y = (X[:, 0] > 0).astype(np.int64)
START = ArrayRecord({"weight": Array(np.zeros(2, np.float32)), "count": Array(np.array(0))})
GOOD, BAD = (-1.0, 1.0), (1.0, -1.0)


def reply(message: Message, weight: Any = GOOD, examples: Any = 10, **more: Any) -> Message:
    arrays = ArrayRecord({"weight": Array(np.array(weight, np.float32)), "count": Array(np.array(4))})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": examples, "train_loss": 0.5})})
    for name, record in more.items():
        content[name] = record
    return Message(content, reply_to=message)


def node(weight: Any = GOOD, examples: Any = 10, client: str | None = None) -> Answer:
    """A node that always sends the same."""

    def answer(message: Message) -> Message | None:
        who = {} if client is None else {"who": ConfigRecord({"client-id": client})}
        kind = message.metadata.message_type
        if kind == "query.client_id":
            return Message(RecordDict({"who": who.get("who", ConfigRecord())}), reply_to=message)
        if kind == "evaluate":
            return Message(
                RecordDict({"metrics": MetricRecord({"num-examples": examples, "accuracy": 0.5})}), reply_to=message
            )
        return reply(message, weight, examples, **who)

    return answer


def weight_of(arrays: ArrayRecord) -> list[float]:
    return [float(value) for value in arrays["weight"].numpy()]


def numbers(record: MetricRecord, name: str) -> list[int]:
    return cast(list[int], list(cast(Iterable[int], record[name])))


def thompson(**settings: Any) -> FedCM:
    return FedCM(model=Line, validation=(X, Y), fraction_evaluate=0.0, device="cpu", **settings)


shapes = st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=5)


@given(shapes, st.randoms(use_true_random=False))
def test_arrays_go_to_a_vector_and_back(sizes: list[list[int]], random: Any) -> None:
    kinds = [random.choice([np.float32, np.float64, np.int64, np.float16]) for _ in sizes]
    values = [
        np.asarray(np.array(random.randint(-9, 9)) * np.ones(shape) + np.arange(int(np.prod(shape))).reshape(shape))
        for shape in sizes
    ]
    record = ArrayRecord(
        {
            f"a{n}": Array(np.asarray(value.astype(kind)))
            for n, (value, kind) in enumerate(zip(values, kinds, strict=True))
        }
    )
    layout = ArrayLayout.of(record)
    back = layout.write(layout.read(record))
    assert list(back) == list(record)
    for name in record:
        assert back[name].numpy().dtype == record[name].numpy().dtype
        assert np.array_equal(back[name].numpy(), record[name].numpy())


def test_whole_numbers_lie_after_what_is_trained() -> None:
    kinds = (np.int64, np.float32, np.bool_, np.float16)
    record = ArrayRecord([np.full(2, number, kind) for number, kind in enumerate(kinds)])
    layout = ArrayLayout.of(record)
    assert layout.read(record).tolist() == [1, 1, 3, 3, 0, 0, 1, 1]
    assert layout.layout.parameters == 4


def test_arrays_of_a_module_lie_as_the_simulator_has_them() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    layout, names = Layout.of(module), piece_names(module)
    by_name = ArrayLayout.of(ArrayRecord(module.state_dict()), layout, names)
    by_order = ArrayLayout.of(ArrayRecord([tensor.numpy() for tensor in module.state_dict().values()]), layout, names)
    assert torch.equal(by_name.read(ArrayRecord(module.state_dict())), layout.read(module))
    unnamed = by_order.write(layout.read(module))
    assert torch.equal(by_order.read(unnamed), layout.read(module))
    with pytest.raises(InvalidSetting, match="initial_arrays"):
        ArrayLayout.of(ArrayRecord([np.zeros(3)]), layout, names)


class Tied(nn.Module):
    """Two layers with the same weights, which a state dictionary lists twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs))
        return outputs


@pytest.mark.parametrize("named", [True, False])
def test_weights_that_layers_share_are_one_piece(named: bool) -> None:
    module = Tied()
    layout, names = Layout.of(module), piece_names(module)
    state = module.state_dict()
    record = ArrayRecord(state) if named else ArrayRecord([tensor.numpy() for tensor in state.values()])
    arrays = ArrayLayout.of(record, layout, names)
    assert torch.equal(arrays.read(record), layout.read(module))
    back = arrays.write(layout.read(module))
    assert list(back) == list(record)
    assert all(np.array_equal(back[name].numpy(), record[name].numpy()) for name in record)


def test_a_model_with_shared_weights_is_trained_and_judged() -> None:
    module = Tied()
    start = ArrayRecord(module.state_dict())

    def answer(message: Message) -> Message:
        arrays = message.content.array_records["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": measured()}), reply_to=message)

    inputs = np.concatenate([X, -X], axis=1)
    strategy = FedCA(model=module, validation=(inputs, Y), fraction_evaluate=0.0, device="cpu")
    result = strategy.start(LocalGrid({1: answer, 2: answer}), start, num_rounds=1)
    assert {name: array.numpy().tolist() for name, array in result.arrays.items()} == {
        name: array.numpy().tolist() for name, array in start.items()
    }
    with torch.no_grad():
        right = (module(torch.from_numpy(inputs)).argmax(1).numpy() == Y).mean()
    assert result.train_metrics_clientapp[1]["score"] == pytest.approx(right)


def test_a_model_that_is_given_stays_as_it_is() -> None:
    module = Line()
    strategy = FedCA(model=module, validation=(X, Y), fraction_evaluate=0.0, device="cpu")
    strategy.start(LocalGrid({1: node(GOOD), 2: node(BAD)}), START, num_rounds=1)
    assert module.training and module.weight.tolist() == [0.0, 0.0]


def test_arms_follow_the_client() -> None:
    roster = Roster()
    roster.meet([10, 11])
    assert roster.hear(10, "7") is None and roster.hear(11, "clinic") is None
    assert set(roster.meet([10, 11])) == {7, arm_of("clinic")} and arm_of("clinic") >= NAMED
    assert roster.meet([11, 12])[roster.arm(12)] == 12  # a new node, unknown yet
    assert roster.hear(12, "7") is None  # it is client 7, whose old node is gone
    assert roster.meet([11, 12])[7] == 12
    again = Roster()
    again.load_state_dict(json.loads(json.dumps(roster.state_dict())))
    assert again.meet([11, 12]) == roster.meet([11, 12])


def test_a_second_node_with_the_same_claim_is_refused_while_the_first_is_there() -> None:
    roster = Roster()
    roster.meet([10, 11])
    assert roster.hear(10, "7") is None
    assert roster.hear(11, "7") == "claims to be client 7, which is node 10"
    assert roster.meet([10, 11]) == {7: 10}
    assert roster.meet([11]) == {7: 11}  # the first one is gone


ids = st.text(min_size=1, max_size=8) | st.text("0123456789", min_size=1, max_size=25) | st.text("07", min_size=1)


@given(st.lists(ids, unique=True, max_size=30))
def test_clients_with_different_names_have_different_arms(names: list[str]) -> None:
    assert len({arm_of(name) for name in names}) == len(names)
    assert all(0 <= arm_of(name) < 2**63 for name in names)


@given(st.integers(0, NAMED - 1))
def test_a_client_whose_name_is_a_number_is_the_arm_of_that_number(number: int) -> None:
    assert arm_of(str(number)) == number
    assert arm_of(f"0{number}") >= NAMED  # another name


def test_a_claim_goes_by_its_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of one arm, should there be two, are one client: the second is refused, and does not displace the first."""
    monkeypatch.setattr("fedsieve.flower.roster.arm_of", lambda client: len(client))
    roster = Roster()
    roster.meet([10, 11])
    assert roster.hear(10, "one") is None
    assert roster.hear(11, "two") == "claims to be client two, which is node 10"
    assert roster.meet([10, 11]) == {3: 10}


def test_nobody_takes_the_name_of_a_node_that_says_nothing() -> None:
    roster = Roster()
    roster.meet([1, 2])
    assert roster.hear(2, "node 1") == "claims to be client node 1, as only that node is called"
    assert roster.hear(1, "node 1") is None
    for present in ([1, 2], [2]):
        assert roster.meet(present) == {arm_of(f"node {node}"): node for node in present if node == 1}
    assert roster.hear(2, "clinic") is None
    assert roster.meet([1, 2]) == {arm_of("node 1"): 1, arm_of("clinic"): 2}


def test_a_name_is_free_once_its_node_goes_by_another() -> None:
    roster = Roster()
    roster.meet([10, 11])
    assert roster.hear(10, "7") is None and roster.hear(10, "8") is None
    assert roster.hear(11, "7") is None
    again = Roster()
    again.load_state_dict(json.loads(json.dumps(roster.state_dict())))
    assert roster.meet([10, 11]) == again.meet([10, 11]) == {8: 10, 7: 11}


@pytest.mark.parametrize("how", ["ask", "replies"])
def test_a_client_may_have_any_name(how: Any) -> None:
    names = ["7", "007", "1" * 5000, "9" * 19, "²"]
    grid = LocalGrid({n: node(client=name) for n, name in enumerate(names)})
    result = FedPdp(client_ids=how, fraction_evaluate=0.0).start(grid, START, num_rounds=2)
    assert numbers(result.train_metrics_clientapp[2], "kept") == sorted(map(arm_of, names))


@pytest.mark.parametrize("how", ["ask", "replies"])
def test_a_node_that_claims_the_name_of_another_is_left_out(how: Any) -> None:
    grid = LocalGrid({1: node(), 2: node(BAD, client="node 1"), 3: node()})
    result = FedPdp(client_ids=how, fraction_evaluate=0.0).start(grid, START, num_rounds=2)
    assert numbers(result.train_metrics_clientapp[2], "kept") == sorted(arm_of(f"node {n}") for n in (1, 3))
    assert weight_of(result.arrays) == pytest.approx(GOOD)


def test_fedpdp_averages_by_examples() -> None:
    grid = LocalGrid({n: node((n, 0.0), examples=n) for n in (1, 2, 5)})
    result = FedPdp(fraction_evaluate=0.0).start(grid, START, num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx([(1 + 4 + 25) / 8, 0.0])
    assert result.arrays["count"].numpy() == 4 and result.arrays["count"].numpy().dtype == np.int64
    metrics = result.train_metrics_clientapp[1]
    assert metrics["train_loss"] == pytest.approx(0.5) and numbers(metrics, "failed") == []


def test_a_bad_model_is_filtered_and_its_client_asked_less() -> None:
    nodes = {n: node(BAD if n < 5 else GOOD, client=str(n)) for n in range(1, 11)}
    grid = LocalGrid(nodes)
    strategy = thompson(fraction_train=0.4, client_ids="ask", score="cross-entropy")
    result = strategy.start(grid, START, num_rounds=40)
    assert weight_of(result.arrays) == pytest.approx(GOOD)
    asked = np.zeros(11)
    for number, metrics in result.train_metrics_clientapp.items():
        sampled, kept, filtered = (numbers(metrics, name) for name in ("sampled", "kept", "filtered"))
        assert len(sampled) == 4 and sorted(kept + filtered) == sampled
        if any(client >= 5 for client in sampled):
            assert all(client >= 5 for client in kept)
        if number > 20:
            asked[sampled] += 1
    assert asked[5:].mean() > 2 * asked[1:5].mean()


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s)}"


def npy(header: str) -> bytes:
    """An array file with any header, and eight bytes of content."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)


def measured(**metrics: Any) -> MetricRecord:
    return MetricRecord({"num-examples": 10, **metrics})


def saved(values: np.ndarray[Any, Any]) -> bytes:
    return Array(values).data


def packed(message: Message, data: bytes, name: str = "weight", kept_as: str = "numpy.ndarray") -> Message:
    """A reply whose weights are these bytes."""
    arrays = ArrayRecord({name: Array("float32", (2,), kept_as, data), "count": START["count"]})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


BAD_REPLIES: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "error": (lambda m: Message(Error(code=3, reason="out of\nmemory"), reply_to=m), "error 3: out of memory"),
    "silence": (lambda m: None, "no answer"),
    "nan": (lambda m: reply(m, (float("nan"), 1.0)), "model with NaN or infinity"),
    "infinity": (lambda m: reply(m, (float("inf"), 1.0)), "model with NaN or infinity"),
    "shape": (lambda m: reply(m, (1.0, 2.0, 3.0)), "array weight has shape (3,), expected (2,)"),
    "zero examples": (lambda m: reply(m, examples=0), "num-examples 0"),
    "negative examples": (lambda m: reply(m, examples=-5), "num-examples -5"),
    "too many examples": (lambda m: reply(m, examples=1e300), "num-examples 1e+300"),
    "nan examples": (lambda m: reply(m, examples=float("nan")), "num-examples nan"),
    "list of examples": (lambda m: reply(m, examples=[1, 2]), "num-examples [1, 2]"),
    "no loss": (lambda m: reply(m, metrics=measured(train_loss=float("nan"))), "training loss nan"),
    "list of losses": (lambda m: reply(m, metrics=measured(train_loss=[1.0, 2.0])), "training loss nan"),
    "no arrays": (
        lambda m: Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=m),
        "0 array records, expected one",
    ),
    "no metrics": (lambda m: Message(RecordDict({"arrays": START}), reply_to=m), "no num-examples"),
    "two models": (lambda m: reply(m, more=START), "2 array records"),
    "other arrays": (
        lambda m: Message(
            RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "metrics": MetricRecord({"num-examples": 1})}), reply_to=m
        ),
        "are missing or too many",
    ),
    "broken bytes": (lambda m: packed(m, b"nonsense"), "array weight can't be read"),
    "too large a header": (lambda m: packed(m, npy(HEADER % "1180591620717411303424,")), "array weight can't be read"),
    "too few bytes": (lambda m: packed(m, npy(HEADER % "1099511627776,")), "array weight can't be read"),
    "a shape that wraps around": (lambda m: packed(m, npy(HEADER % "4294967296, 4294967296")), "can't be read"),
    "complex numbers": (lambda m: packed(m, saved(np.ones(2, np.complex64))), "it holds complex64"),
    "objects": (lambda m: packed(m, npy(HEADER.replace("<f4", "O") % "2,")), "it holds object"),
    "no type": (lambda m: packed(m, npy("{'descr': (), 'fortran_order': False, 'shape': (2,)}")), "can't be read"),
    "an open header": (lambda m: packed(m, npy("((( ")), "array weight can't be read"),
    "a deep header": (lambda m: packed(m, npy("-" * 5000 + "1")), "array weight can't be read"),
    "a deeper header": (lambda m: packed(m, npy("-" * 9900 + "1")), "array weight can't be read"),
    "too large for single precision": (lambda m: packed(m, saved(np.array([1e300, 0]))), "model with NaN or infinity"),
    "no text": (lambda m: packed(m, b"", kept_as="\ud800"), "it is kept as ?"),
    "a name that is no text": (lambda m: packed(m, b"", name="\ud800"), "arrays weight, ? are missing or too many"),
    "a long name": (lambda m: packed(m, b"", name="x" * 10**6), "arrays weight, xxx"),
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_is_left_out_with_its_reason_and_not_rewarded(kind: str, tmp_path: Path) -> None:
    answer, reason = BAD_REPLIES[kind]
    grid = LocalGrid({1: node(), 2: node(), 3: answer})
    strategy = thompson(state_dir=tmp_path)
    result = strategy.start(grid, START, num_rounds=2)
    assert weight_of(result.arrays) == pytest.approx(GOOD)
    bad = arm_of("node 3")
    for metrics in result.train_metrics_clientapp.values():
        assert numbers(metrics, "failed") == [bad] and bad not in numbers(metrics, "kept")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(reason in row["excluded"][str(bad)] and len(row["excluded"][str(bad)]) <= 200 for row in rows)
    assert rows[0]["clients"][str(bad)] == "node 3"
    state = strategy.sampler.state_dict()
    place = state["clients"].index(bad)
    assert (state["alpha"][place], state["beta"][place]) == (1, 3)  # twice asked, never kept


def test_counters_have_no_say_in_whom_to_believe() -> None:
    """The first two have counted as far; the last two have nearly the same weights."""

    def counting(weight: float, count: int) -> Answer:
        def answer(message: Message) -> Message:
            found = reply(message, (weight, 0.0))
            found.content.array_records["arrays"]["count"] = Array(np.array(count))
            return found

        return answer

    grid = LocalGrid({1: counting(100.0, 0), 2: counting(0.0, 0), 3: counting(0.1, 50_000)})
    strategy = SieveStrategy(UniformSampler(), Krum(0), fraction_evaluate=0.0)
    result = strategy.start(grid, START, num_rounds=1)
    assert weight_of(result.arrays)[0] < 1


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_who_sends_what_is_no_model_is_one_of_the_liars_a_filter_assumes(kind: str) -> None:
    """Krum needs 2f + 3 models: four do with f = 1 if a fifth unmasked itself, not if its sender may be honest."""
    grid = LocalGrid({1: node(), 2: node(), 3: node(), 4: node(), 5: BAD_REPLIES[kind][0]})
    strategy = SieveStrategy(UniformSampler(), Krum(1), fraction_evaluate=0.0)
    (metrics,) = strategy.start(grid, START, num_rounds=1).train_metrics_clientapp.values()
    assert len(numbers(metrics, "kept")) == (0 if kind in ("error", "silence") else 1)


def test_who_is_refused_for_its_name_is_not_one_of_them() -> None:
    """It may be the honest one of the two."""
    grid = LocalGrid({n: node(client="a" if n > 3 else None) for n in range(1, 6)})
    strategy = SieveStrategy(UniformSampler(), Krum(1), fraction_evaluate=0.0)
    (metrics,) = strategy.start(grid, START, num_rounds=1).train_metrics_clientapp.values()
    assert len(numbers(metrics, "failed")) == 1 and numbers(metrics, "kept") == []


def test_a_round_with_too_few_usable_models_changes_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    broken = {"yes": True}

    def sometimes(message: Message) -> Message | None:
        return reply(message, (float("nan"), 0.0)) if broken["yes"] else reply(message)

    class Mends(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            broken["yes"] = len(self.sent) == 1  # the second round's
            return super().send_and_receive(messages, timeout=timeout)

    grid = Mends({1: node(), 2: sometimes, 3: sometimes})
    result = thompson(state_dir=tmp_path).start(grid, START, num_rounds=3)
    rounds = result.train_metrics_clientapp
    assert numbers(rounds[2], "kept") == [] and len(numbers(rounds[2], "failed")) == 2
    assert len(numbers(rounds[3], "kept")) == 3 and weight_of(result.arrays) == pytest.approx(GOOD)


def test_a_round_with_too_few_models_for_its_filter_changes_nothing_and_the_next_goes_on() -> None:
    """Krum needs 2·0 + 3 models; in the second round two of three nodes answer."""

    def away_once(message: Message) -> Message | None:
        return None if len(grid.sent) == 2 else reply(message)

    grid = LocalGrid({1: node(), 2: node(), 3: away_once})
    strategy = SieveStrategy(UniformSampler(), Krum(0), fraction_evaluate=0.0)
    result = strategy.start(grid, START, num_rounds=3)
    rounds = result.train_metrics_clientapp
    assert [len(numbers(rounds[round], "kept")) for round in (1, 2, 3)] == [1, 0, 1]
    assert [len(numbers(rounds[round], "failed")) for round in (1, 2, 3)] == [0, 1, 0]
    assert weight_of(result.arrays) == pytest.approx(GOOD)


def test_who_costs_a_round_is_asked_less() -> None:
    """One node of four never answers; whenever it is asked, the round is lost."""
    grid = LocalGrid({n: node(client=str(n)) if n > 1 else lambda message: None for n in range(1, 5)})
    strategy = SieveStrategy(UCBSampler(), KeepAll(), min_train_nodes=1, fraction_train=0.25, fraction_evaluate=0.0)
    result = strategy.start(grid, START, num_rounds=40)
    lost = sum(not numbers(metrics, "kept") for metrics in result.train_metrics_clientapp.values())
    assert 0 < lost < 8  # at random it would be ten


@pytest.mark.parametrize("sampler", [FedCSSampler(9.0), CSUCBSampler(), CSUCBQSampler(0.2)])
def test_samplers_that_go_by_time_are_refused(sampler: ClientSampler) -> None:
    with pytest.raises(InvalidSetting, match=f"^sampler: '{type(sampler).__name__}' is not allowed"):
        SieveStrategy(sampler, KeepAll())


def test_the_order_in_which_nodes_are_listed_does_not_matter() -> None:
    nodes = {n: node((n / 10, 0.0), client=str(n)) for n in range(1, 9)}
    there, back = LocalGrid(nodes), LocalGrid(dict(reversed(nodes.items())))
    found = [thompson(fraction_train=0.5, client_ids="ask").start(grid, START, num_rounds=5) for grid in (there, back)]
    assert there.sent == back.sent
    assert weight_of(found[0].arrays) == weight_of(found[1].arrays)


@pytest.mark.parametrize("how", ["ask", "replies"])
def test_a_client_that_comes_back_on_another_node_keeps_its_history(how: Any) -> None:
    grid = LocalGrid({n: node(BAD if n == 1 else GOOD, client=f"c{n}") for n in (1, 2, 3)})
    strategy = thompson(client_ids=how)
    strategy.start(grid, START, num_rounds=4)
    grid.nodes = {77: grid.nodes[1], 2: grid.nodes[2], 3: grid.nodes[3]}
    strategy.start(grid, START, num_rounds=3)
    state = strategy.sampler.state_dict()
    asked = dict(zip(state["clients"], np.add(state["alpha"], state["beta"]) - 2, strict=True))
    assert asked == {arm_of(f"c{n}"): 7 for n in (1, 2, 3)}


def test_nodes_that_say_nothing_are_told_apart_by_their_connection() -> None:
    def no_query(message: Message) -> Message | None:
        if message.metadata.message_type.startswith("query"):
            return Message(Error(code=1, reason="No query function registered"), reply_to=message)
        return reply(message)

    grid = LocalGrid({1: no_query, 2: no_query})
    result = FedPdp(client_ids="ask", fraction_evaluate=0.0).start(grid, START, num_rounds=1)
    assert numbers(result.train_metrics_clientapp[1], "sampled") == sorted(arm_of(f"node {n}") for n in (1, 2))


def test_two_nodes_that_claim_one_identity_count_once(caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid({1: node(client="a"), 2: node(client="a"), 3: node(client="b")})
    result = FedPdp(client_ids="ask", fraction_evaluate=0.0).start(grid, START, num_rounds=2)
    assert grid.sent == [[1, 3], [1, 3]]
    assert numbers(result.train_metrics_clientapp[2], "sampled") == sorted(map(arm_of, "ab"))


class Killed(Exception):
    """The ServerApp is gone."""


@pytest.mark.parametrize("kind", [FedSieve, FedPdp])
def test_the_server_may_train_on_what_was_averaged(kind: type[FedSieve] | type[FedPdp]) -> None:
    nodes = {1: node(GOOD), 2: node(GOOD), 3: node((20.0, -20.0))}
    plain, tuned = (
        weight_of(
            kind(model=Line, validation=(X, Y), fraction_evaluate=0.0, device="cpu", finetune=finetune)
            .start(LocalGrid(nodes), START, num_rounds=1)
            .arrays
        )
        for finetune in (False, True)
    )
    wrong = 0.0 if kind is FedSieve else 1 / 3  # a client whose weights are the wrong way round is left out, or is not
    assert plain == pytest.approx((1 - wrong) * np.array(GOOD) + wrong * np.array((20.0, -20.0)))
    assert tuned[1] > plain[1] + 0.1 and tuned[0] < plain[0] - 0.1  # surer of what it knows
    with pytest.raises(InvalidSetting, match=r"augment: True is not allowed.*with finetune=True alone"):
        kind(model=Line, validation=(X, Y), device="cpu", augment=True)
    with pytest.raises(InvalidSetting, match=r"augment: True is not allowed.*false for inputs \(1,\), which are no im"):
        kind(model=Line, validation=(X, Y), device="cpu", finetune=True, augment=True)


def test_plain_averages_need_validation_data_for_training_alone() -> None:
    FedPdp()
    with pytest.raises(InvalidSetting, match=r"validation: None is not allowed.*FineTuning needs"):
        FedPdp(finetune=True)


def test_images_are_cropped_and_flipped_in_fine_tuning() -> None:
    random = np.random.default_rng(0)
    pictures = random.normal(size=(40, 1, 4, 4)).astype(np.float32)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    strategy = FedSieve(model=model, validation=(pictures, Y), device="cpu", finetune=True, augment=True)
    assert isinstance(strategy.sieve.filter, FineTuning) and strategy.sieve.filter.augment
    draws, flat = draw_crops_and_flips(random, 40), torch.ones(34)
    moved = crop_and_flip(torch.from_numpy(pictures), torch.from_numpy(draws)).numpy()
    other = FedSieve(model=model, validation=(moved, Y), device="cpu")
    expected = other.judge.score_and_gradient(flat)
    torch.testing.assert_close(strategy.judge.score_and_gradient(flat, None, draws), expected)


class Mortal(LocalGrid):
    """Its server dies while it waits for a kind of message for the nth time."""

    def __init__(self, nodes: dict[int, Answer], kind: str, time: int) -> None:
        super().__init__(nodes)
        self.kind, self.left = kind, time

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if messages and messages[0].metadata.message_type == self.kind:
            self.left -= 1
            if self.left == 0:
                raise Killed
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize(("kind", "time"), [("train", 1), ("train", 3), ("evaluate", 2), ("evaluate", 5)])
def test_a_server_that_is_killed_goes_on_as_if_nothing_had_happened(
    kind: str, time: int, caught: bool, tmp_path: Path
) -> None:
    """It is another process, or the same that caught the error."""

    nodes = {n: node((-n / 5, n / 7), examples=n, client=str(n)) for n in range(1, 9)}

    def strategy(folder: str) -> FedCM:
        return FedCM(
            model=Line,
            validation=(X, Y),
            score="cross-entropy",
            bandit="ucb",
            fraction_train=0.5,
            client_ids="ask",
            server_momentum=0.3,
            smoothing=0.7,
            state_dir=tmp_path / folder,
            device="cpu",
        )

    def judged(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"round": round, "weight": weight_of(arrays)[0]})

    whole = LocalGrid(nodes)
    expected = strategy("whole").start(whole, START, num_rounds=5, evaluate_fn=judged)
    mortal = Mortal(nodes, kind, time)
    first = strategy("killed")
    with pytest.raises(Killed):
        first.start(mortal, START, num_rounds=5, evaluate_fn=judged)
    grid = LocalGrid(nodes)
    second = first if caught else strategy("killed")
    result = second.start(grid, START, num_rounds=5, evaluate_fn=judged)
    assert (mortal.sent + grid.sent) == whole.sent
    assert result.arrays["weight"].numpy().tolist() == expected.arrays["weight"].numpy().tolist()
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        assert getattr(result, name) == getattr(expected, name)
    again = strategy("killed").start(LocalGrid({}), START, num_rounds=5, evaluate_fn=judged)
    assert again.train_metrics_clientapp == expected.train_metrics_clientapp  # all done: nothing is asked
    assert weight_of(again.arrays) == weight_of(expected.arrays)


def test_a_second_start_begins_from_its_own_arrays() -> None:
    def half_way(message: Message) -> Message:
        (now, _) = weight_of(message.content.array_records["arrays"])
        return reply(message, ((now + 4) / 2, 0.0))

    def strategy() -> SieveStrategy:
        settings: dict[str, Any] = {"fraction_evaluate": 0.0, "server_momentum": 0.5, "smoothing": 0.5}
        return SieveStrategy(UniformSampler(), KeepFirst(), half, **settings)

    other = ArrayRecord({"weight": Array(np.full(2, 9.0, np.float32)), "count": Array(np.array(0))})
    grid, twice = LocalGrid({1: half_way, 2: half_way}), strategy()
    expected = strategy().start(grid, other, num_rounds=3)
    twice.start(grid, START, num_rounds=3)
    assert weight_of(twice.start(grid, other, num_rounds=3).arrays) == weight_of(expected.arrays)


def test_a_second_start_goes_on_from_what_is_on_disk(tmp_path: Path) -> None:
    nodes = {n: node((n / 5, 0.0), client=str(n)) for n in range(1, 9)}
    whole, parts = LocalGrid(nodes), LocalGrid(nodes)
    settings: dict[str, Any] = {"fraction_train": 0.5, "client_ids": "ask"}
    expected = thompson(**settings).start(whole, START, num_rounds=5)
    strategy = thompson(**settings, state_dir=tmp_path)
    for rounds in (2, 5, 5):
        result = strategy.start(parts, START, num_rounds=rounds)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5] and parts.sent == whole.sent
    assert weight_of(result.arrays) == weight_of(expected.arrays)
    assert result.train_metrics_clientapp == expected.train_metrics_clientapp


LARGE = (4, 9, 17)


def unequal_nodes() -> dict[int, Answer]:
    """Twenty, of which three hold nearly everything."""
    return {n: node(examples=10_000 + n if n in LARGE else n, client=str(n)) for n in range(1, 21)}


def weighted(sampler: ClientSampler, **settings: Any) -> SieveStrategy:
    common: dict[str, Any] = {"client_ids": "ask", "fraction_train": 0.2, "fraction_evaluate": 0.0}
    return SieveStrategy(sampler, KeepAll(), min_train_nodes=1, **common, **settings)


@pytest.mark.parametrize("make", [PowerOfChoiceSampler, OortSampler, ProportionalSampler, AgnosticSampler])
def test_a_restart_changes_nothing_for_samplers_that_go_by_sizes(
    make: Callable[[], ClientSampler], tmp_path: Path
) -> None:
    whole, first, second = (LocalGrid(unequal_nodes()) for _ in range(3))
    weighted(make(), state_dir=tmp_path / "whole").start(whole, START, num_rounds=30)
    for grid, rounds in ((first, 15), (second, 30)):
        weighted(make(), state_dir=tmp_path / "halves").start(grid, START, num_rounds=rounds)
    assert len(first.sent) == 15 and first.sent + second.sent == whole.sent


@pytest.mark.parametrize("make", [PowerOfChoiceSampler, OortSampler, ProportionalSampler])
def test_large_clients_are_asked_more_often_once_sizes_are_known(make: Callable[[], ClientSampler]) -> None:
    grid = LocalGrid(unequal_nodes())
    weighted(make()).start(grid, START, num_rounds=40)
    asked = np.zeros(21)
    for nodes in grid.sent[10:]:
        asked[nodes] += 1
    large = asked[list(LARGE)]
    assert large.min() > 2 * (asked.sum() - large.sum()) / 17


@pytest.mark.parametrize("make", [PowerOfChoiceSampler, OortSampler, ProportionalSampler, AgnosticSampler])
def test_who_joins_later_is_asked_too(make: Callable[[], ClientSampler]) -> None:
    nodes = unequal_nodes()
    late = {n: nodes.pop(n) for n in (17, 18, 19, 20)}
    grid = LocalGrid(nodes)
    strategy = weighted(make())
    strategy.start(grid, START, num_rounds=5)
    grid.nodes = nodes | late
    strategy.start(grid, START, num_rounds=25)
    assert any(17 in asked for asked in grid.sent)


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    FedPdp(fraction_evaluate=0.0, state_dir=tmp_path).start(LocalGrid({1: node(), 2: node()}), START, num_rounds=1)
    other = ArrayRecord({"weight": Array(np.zeros(3, np.float32))})
    with pytest.raises(InvalidSetting, match="state_dir"):
        FedPdp(fraction_evaluate=0.0, state_dir=tmp_path).start(LocalGrid({}), other, num_rounds=2)


def test_the_state_of_another_strategy_is_refused(tmp_path: Path) -> None:
    grid = LocalGrid({1: node(), 2: node()})
    FedPdp(fraction_evaluate=0.0, state_dir=tmp_path).start(grid, START, num_rounds=1)
    with pytest.raises(InvalidSetting, match=r"state_dir: .*a folder of the same strategy"):
        thompson(state_dir=tmp_path).start(grid, START, num_rounds=2)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"train_metrics_clientapp": {"one": {}}}'])
def test_damaged_results_are_named(content: str, tmp_path: Path) -> None:
    grid = LocalGrid({1: node(), 2: node()})
    FedPdp(fraction_evaluate=0.0, state_dir=tmp_path).start(grid, START, num_rounds=1)
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InvalidSetting, match=r"state_dir: .*results.json' is not allowed; use one that is whole"):
        FedPdp(fraction_evaluate=0.0, state_dir=tmp_path).start(grid, START, num_rounds=2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_validation_data_must_be_numbers(bad: float) -> None:
    broken = np.array(X)
    broken[0, 0] = bad
    with pytest.raises(InvalidSetting, match="validation: 'inputs with NaN or infinity'"):
        FedCM(model=Line, validation=(broken, Y), device="cpu")
    with pytest.raises(InvalidSetting, match="validation: 'tuple'"):
        FedCM(model=Line, validation=(None, None), device="cpu")


def test_evaluation_averages_what_is_usable() -> None:
    def silent(message: Message) -> Message | None:
        if message.metadata.message_type == "evaluate":
            return Message(Error(code=1, reason="no"), reply_to=message)
        return reply(message)

    grid = LocalGrid({1: node(examples=30), 2: node(examples=10), 3: silent})
    result = FedPdp().start(grid, START, num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(0.5)


def test_who_evaluates_is_drawn_anew() -> None:
    asked: list[list[int]] = []

    class Watched(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            messages = list(messages)
            asked.append(sorted(message.metadata.dst_node_id for message in messages))
            return super().send_and_receive(messages, timeout=timeout)

    grid = Watched({n: node() for n in range(1, 21)})
    FedPdp(fraction_train=0.5, fraction_evaluate=0.5).start(grid, START, num_rounds=4)
    assert all(len(nodes) == 10 for nodes in asked)
    assert asked[::2] != asked[1::2]  # not those who trained


class KeepFirst(ModelFilter):
    """Believes whoever has the lowest id, half."""

    needs_logits = False

    def select(self, candidates: Candidates) -> Selection:
        return Selection(kept=(0,))


def half(kept: Kept) -> Coefficients:
    return Coefficients(0.5, np.array([0.5]))


def test_any_part_of_ones_own_can_be_put_in() -> None:
    grid = LocalGrid({n: node((n, 0.0), client=str(n)) for n in (1, 2, 3)})
    strategy = SieveStrategy(UniformSampler(), KeepFirst(), half, client_ids="ask", fraction_evaluate=0.0)
    result = strategy.start(grid, START, num_rounds=2)
    assert weight_of(result.arrays)[0] == pytest.approx(0.75)


def test_momentum_is_that_of_flowers_fedavgm() -> None:
    def towards(goal: tuple[float, float], examples: int) -> Answer:
        def answer(message: Message) -> Message | None:
            given = weight_of(message.content["arrays"])  # type: ignore[arg-type] # it is an ArrayRecord
            return reply(message, [(now + end) / 2 for now, end in zip(given, goal, strict=True)], examples)

        return answer

    nodes = {1: towards((1.0, -4.0), 10), 2: towards((3.0, 2.0), 30)}
    settings: dict[str, Any] = {"fraction_evaluate": 0.0, "server_momentum": 0.7}
    theirs, ours = (kind(**settings).start(LocalGrid(nodes), START, num_rounds=4) for kind in (FedAvgM, FedPdp))
    assert weight_of(ours.arrays) == pytest.approx(weight_of(theirs.arrays), abs=1e-5)
    assert weight_of(ours.arrays)[0] > 3  # the mean of where they want to go is 2.5


class Watched(Line):
    """A Line that notes what it saw, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def test_a_federation_that_is_given_a_model_later_keeps_its_momentum(tmp_path: Path) -> None:
    """Without one it was not known that `seen` is no weight, so it has a velocity on disk."""

    def answer(message: Message) -> Message:
        found = reply(message, (1.5, -1.0))
        found.content.array_records["arrays"]["seen"] = Array(np.ones(1, np.float32))
        return found

    nodes: dict[int, Answer] = {1: answer, 2: answer}
    start = ArrayRecord(Watched().state_dict())

    def weights(folder: str, rounds: int, beta: float = 0.5, **more: Any) -> list[float]:
        settings: dict[str, Any] = {"fraction_evaluate": 0.0, "server_momentum": beta, "state_dir": tmp_path / folder}
        return weight_of(FedPdp(**settings, **more).start(LocalGrid(nodes), start, num_rounds=rounds).arrays)

    whole = weights("whole", 4)
    weights("later", 2)
    assert weights("later", 4, model=Watched, validation=(X, Y), device="cpu") == pytest.approx(whole)
    weights("stopped", 2)
    weights("stopped", 3, beta=0.0)
    assert weights("stopped", 4) == pytest.approx([1.5, -1.0])  # what moved two rounds ago is forgotten


def test_an_average_over_rounds_is_evaluated_and_clients_go_on_from_the_last_model() -> None:
    trained, evaluated = list[float](), list[float]()

    def answer(message: Message) -> Message | None:
        seen = trained if message.metadata.message_type == "train" else evaluated
        seen.append(weight_of(message.content["arrays"])[0])  # type: ignore[arg-type] # it is an ArrayRecord
        return node((1.0, 0.0))(message)

    strategy = SieveStrategy(UniformSampler(), KeepFirst(), half, smoothing=0.6)
    result = strategy.start(LocalGrid({1: answer, 2: answer}), START, num_rounds=3)
    assert trained[::2] == pytest.approx([0, 0.5, 0.75])
    averages = [0.5, 0.625, 0.6 * 0.625 + 0.4 * 0.875]
    assert evaluated[::2] == pytest.approx(averages) and weight_of(result.arrays)[0] == pytest.approx(averages[-1])


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        (FedCM, {"model": Line, "validation": (X, Y), "bandit": "dice"}, "bandit: 'dice'"),
        (FedCM, {"model": Line, "validation": (X, Y), "score": "luck"}, "score: 'luck'"),
        (FedSieve, {"model": Line, "validation": (X, Y), "bandit": "dice"}, "bandit: 'dice'"),
        (FedCA, {"model": Line, "validation": (X,)}, "validation: 'tuple'"),
        (FedCA, {"model": Line, "validation": (np.zeros((40, 8, 8), np.uint8), Y)}, "validation: .*uint8.*floats"),
        (FedCA, {"model": Line, "validation": (np.zeros((40, 1), np.int64), Y)}, "validation: .*int64.*floats"),
        (FedCA, {"model": Line, "validation": (X[:, 0], Y)}, r"validation: .*float32 \[40\].*floats"),
        (FedCA, {"model": Line, "validation": (X[:0], Y[:0])}, r"validation: .*float32 \[0, 1\].*floats"),
        (FedCA, {"model": nn.Linear(7, 2), "validation": (X, Y)}, "model: 'Linear'"),
        (FedCA, {"model": lambda: 3, "validation": (X, Y)}, "model: 'int'"),
        (FedCA, {"model": Line, "validation": (X, Y + 5)}, "validation: 6 is not allowed; use labels 0 to 1"),
        (FedCA, {"model": Line, "validation": (X, Y[1:])}, "validation: '39 labels' is not allowed; use as many"),
        (FedCA, {"model": Line, "validation": (X, Y * 1.0)}, r"validation: 'float64 \[40\]' is not allowed; use int"),
        (FedPdp, {"client_ids": "guess"}, "client_ids: 'guess'"),
        (FedPdp, {"smoothing": 1.0}, "smoothing: 1.0"),
        (FedPdp, {"server_momentum": -0.5}, "server_momentum: -0.5"),
        (FedPdp, {"model": Line}, "validation: None"),
        (FedPdp, {"state_dir": "/dev/null/x"}, "state_dir"),
    ],
)
def test_a_wrong_argument_is_named(strategy: type[SieveStrategy], given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{said}"):
        strategy(**given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attack": "sign-flip", "hostile": 0.25}, "attack: 'sign-flip' is not allowed; use none"),
        ({"attack": "label-flip", "hostile": 0.25}, "attack: 'label-flip' is not allowed; use none"),
        ({"engine": "ray"}, "engine: 'ray' is not allowed; use auto, lanes, workers or sequential"),
    ],
)
def test_what_nodes_cannot_do_is_refused_before_the_first_round(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{said}"):
        client_app(fs.Config(**settings))


def test_without_flower_one_line_says_how_to_get_it() -> None:
    script = "import sys; sys.modules['flwr'] = None\ntry: import fedsieve.flower\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("pip install 'fedsieve[flower]' first") and done.stdout.count("\n") == 1


def test_who_answers_with_its_node_configuration() -> None:
    from flwr.clientapp import ClientApp

    from fedsieve.flower import say_who
    from fedsieve.flower.replies import claimed_id

    app = say_who(ClientApp())
    LocalGrid({})
    for own, expected in (
        ({"client-id": "clinic", "partition-id": 3}, "clinic"),
        ({"partition-id": 3}, "3"),
        ({}, None),
    ):
        message = Message(RecordDict(), 5, "query.client_id")
        message.metadata.__dict__["_message_id"] = "x"
        context = Context(run_id=1, node_id=5, node_config=cast(Any, own), state=RecordDict(), run_config={})
        assert claimed_id(app(message, context).content) == expected


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each strategy comes to in Flower's own simulation engine, with real actors."""
    folder = tmp_path_factory.mktemp("simulated")
    command = [sys.executable, str(Path(__file__).with_name("flower_simulation.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return {what: json.loads((folder / what).read_text()) for what in STRATEGIES}


@pytest.mark.parametrize("algorithm", ["fedcm-ts", "fedcm-ucb", "fedsieve", "fedsieve-ts"])
def test_algorithms_on_flower_make_the_choices_of_the_simulator(algorithm: str, simulated: dict[str, Any]) -> None:
    expected = fs.run(config(algorithm))
    found = simulated[algorithm]
    for row in expected.rows:
        metrics = found["train"][str(row["round"])]
        assert (metrics["sampled"], metrics["kept"]) == (row["sampled"], row["kept"])
        assert metrics.get("score") == pytest.approx(row["score"])
    assert expected.model is not None
    assert torch.allclose(torch.tensor(found["models"][-1]), expected.model, atol=1e-6)


def test_fedavg_by_us_is_fedavg_by_flower(simulated: dict[str, Any]) -> None:
    ours, theirs = (simulated[what] for what in ("fedpdp", "flower"))
    assert ours["names"] == theirs["names"]
    before, once, twice = np.abs(np.array(ours["models"]) - np.array(theirs["models"]))
    assert before.max() == 0 and once.max() < 1e-6
    # Flower adds up in single precision, in the order in which replies come; training may make more of the last bit.
    assert twice.max() < 1e-3 and np.median(twice) < 1e-6
    for number, near in (("1", 1e-6), ("2", 1e-3)):
        assert ours["train"][number]["train_loss"] == pytest.approx(theirs["train"][number]["train_loss"], rel=near)
        assert ours["evaluate"][number]["accuracy"] == pytest.approx(theirs["evaluate"][number]["accuracy"], abs=near)


@pytest.mark.parametrize("sampler", [FedCSSampler(30.0), PowerOfChoiceSampler(losses="exact")])
def test_samplers_that_flower_cannot_serve_are_refused_before_the_first_round(sampler: ClientSampler) -> None:
    with pytest.raises(InvalidSetting, match=f"sampler: '{type(sampler).__name__}' is not allowed"):
        SieveStrategy(sampler, Krum(0))
    SieveStrategy(PowerOfChoiceSampler(), Krum(0))
