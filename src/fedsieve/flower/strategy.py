"""Flower strategies made of the simulator's own parts: a sampler, a filter, an averaging scheme."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve.averaging import Scheme, fedpdp
from fedsieve.errors import InvalidSetting, TooFewUpdates, unknown_name
from fedsieve.filtering import ModelFilter
from fedsieve.flower.arrays import ArrayLayout, piece_names
from fedsieve.flower.judge import NoJudge, ValidationJudge
from fedsieve.flower.replies import Reply, claimed_id, read_reply
from fedsieve.flower.roster import Roster
from fedsieve.flower.state import State
from fedsieve.momentum import ServerMomentum
from fedsieve.parts import check_own
from fedsieve.randomness import keys
from fedsieve.runs.directory import SMOOTHED, VELOCITY
from fedsieve.sampling import ClientSampler, Feedback
from fedsieve.sampling.base import highest, whom_to_ask
from fedsieve.sieve import Population, Sieve, Sifted
from fedsieve.smoothing import Smoothing
from fedsieve.stopwatch import Stopwatch

WHO = "query.client_id"
ASKING_TAKES = 60.0  # seconds at most

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Aggregator = Callable[[list[RecordDict], str], MetricRecord]


class SieveStrategy(FedAvg):
    """Any sampler, filter and averaging scheme as a Flower strategy.

    Arguments that Flower's FedAvg has mean what they mean there. `model`, a `torch.nn.Module` or a function that makes
    one, and `validation`, inputs and labels as the model takes them, are for filters that look at what models
    predict. `client_ids="ask"` asks every new node which client it is before it is first sampled (the ClientApp answers
    with `fedsieve.flower.say_who`); with "replies" a client that wants to be known says so in its replies. With
    `state_dir` every round is on disk, and a federation that was interrupted goes on with the next one. With
    `smoothing` an average over rounds is evaluated and comes out in the end; clients go on from the last round's model.
    `server_momentum` is that of Flower's FedAvgM.
    """

    def __init__(
        self,
        sampler: ClientSampler,
        filter: ModelFilter,
        averaging: Scheme = fedpdp,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        validation: tuple[Any, Any] | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregator | None = None,
        evaluate_metrics_aggr_fn: Aggregator | None = None,
        client_ids: Literal["replies", "ask"] = "replies",
        server_momentum: float = 0.0,
        smoothing: float = 0.0,
        state_dir: Path | str | None = None,
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )
        check_own(sampler, filter, averaging)
        if client_ids not in ("replies", "ask"):
            raise unknown_name("client_ids", client_ids, ("replies", "ask"))
        for name, share in (("server_momentum", server_momentum), ("smoothing", smoothing)):
            if not 0 <= share < 1:
                raise InvalidSetting(name, share, "a number of at least 0 and below 1")
        if (model is None) != (validation is None):
            raise InvalidSetting("validation", validation, "both a model and validation data, or neither")
        if filter.looks_at_validation and model is None:
            raise InvalidSetting("validation", None, f"(x, y) and a model, which {type(filter).__name__} needs")
        if sampler.needs_models or sampler.needs_losses or sampler.needs_times:
            allowed = "one that goes by what earlier rounds showed: Flower's nodes are asked to train, and nothing else"
            raise InvalidSetting("sampler", type(sampler).__name__, allowed)
        self.sampler = sampler
        self.client_ids = client_ids
        self.momentum = ServerMomentum(server_momentum, 0)  # how much there is to move the first arrays will show
        self.smoothing = Smoothing(smoothing)
        self.seed = seed
        self.judge: ValidationJudge | NoJudge = NoJudge()
        self._names: Mapping[str, str] = {}
        if model is not None and validation is not None:
            self.judge = ValidationJudge(model, validation, device, seed)
            self._names = piece_names(self.judge.engine.module)
        self.sieve = Sieve(filter, averaging, self.judge, max(1, min_train_nodes), seed=seed)
        self.roster = Roster()
        self.examples: dict[int, float] = {}
        self.state = None if state_dir is None else State(state_dir)
        self.model: Tensor = torch.empty(0)
        self._layout: ArrayLayout | None = None
        self._before = 0  # rounds that were made before the ServerApp was started again
        self._begun = False
        self._saved_sampler: Mapping[str, Any] | None = None
        self._present: set[int] = set()
        self._sampled: list[int] = []
        self._asked: dict[int, int] = {}
        self._result = Result()

    @property
    def layout(self) -> ArrayLayout:
        """How the model's arrays lie in `model` [size], known from the first arrays on."""
        assert self._layout is not None
        return self._layout

    def summary(self) -> None:
        """Log what the strategy is made of."""
        parts = (self.sampler, self.sieve.filter)
        scheme = self.sieve.averaging
        name = getattr(scheme.func if isinstance(scheme, partial) else scheme, "__name__", type(scheme).__name__)
        log(INFO, "\t├──> Parts: %s, %s", ", ".join(type(part).__name__ for part in parts), name)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the federation as Flower does; with a `state_dir`, go on after the last round that is on disk.

        A second `start` without one begins with its own arrays; what is known of clients stays.
        """
        self._layout = None
        self._open(initial_arrays)
        self._result = self.state.load_results(self._before) if self.state else Result()
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        arrays = initial_arrays
        if self._before:
            log(INFO, "Going on after round %d of %d", self._before, num_rounds)
            arrays = self.layout.write(self.smoothing.latest(self.model))
            self._result.arrays = arrays
            self._catch_up(grid, arrays, timeout, evaluate_config, evaluate_fn)
        if self._before < num_rounds:
            evaluate = None if evaluate_fn is None else partial(self._evaluate_at_server, evaluate_fn)
            left = num_rounds - self._before
            found = super().start(grid, arrays, left, timeout, train_config, evaluate_config, evaluate)
            if found.arrays:
                self._result.arrays = found.arrays
        return self._result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients that the sampler chooses."""
        if self.fraction_train == 0.0:
            return []
        self._open(arrays)
        round = server_round + self._before
        arms = self._who_is_there(grid)
        ids = np.array(sorted(arms), dtype=np.int64)
        weights = self._weights(ids.tolist())
        if not self._begun:
            self.sampler.begin(self.seed, ids, weights)
            if self.state is not None and self._saved_sampler is not None:
                try:
                    self.sampler.load_state_dict(self._saved_sampler)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    allowed = f"a folder of the same strategy: its sampler's state is another's ({error!r})"
                    raise InvalidSetting("state_dir", str(self.state.directory.path), allowed) from None
            self._begun = True
        self.sampler.weigh(ids, weights)
        count = self._count(self.fraction_train, self.min_train_nodes, len(arms))
        self._sampled = whom_to_ask(self.sampler, round, ids, count)
        self._asked = {arms[client]: client for client in self._sampled}
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(self._asked), len(arms))
        config["server-round"] = round
        if self.smoothing.average is not None:
            arrays = self.layout.write(self.model)
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, sorted(self._asked), MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the models that the filter believes; say who was left out and why."""
        round = server_round + self._before
        received = self._receive(replies)
        for reply in received:
            if reply.error is None:
                self.examples[reply.client] = reply.examples
        everyone = self._present | {reply.client for reply in received}
        population = Population(len(everyone), self._weights)
        stopwatch = Stopwatch(torch.device("cpu"))
        stopwatch.next_round()
        drawn = Counter(self._sampled)
        try:
            sifted = self.sieve.sift(round, self.model, received, drawn, population, stopwatch)
        except TooFewUpdates as problem:
            log(WARNING, "aggregate_train: %s; the model stays as it was", problem)
            failed = [client for client in self._sampled if client in problem.excluded]
            self.sampler.observe(Feedback(round, failed, kept=[]))
            return None, self._note(round, None, received, problem.excluded)
        self.model = self.momentum.step(self.model, sifted.model)
        handed_out = self.smoothing.hand_out(self.model, round)
        self.sampler.observe(Feedback(round, self._sampled, sifted.kept, sifted.losses))
        metrics = self._note(round, sifted, received, sifted.excluded)
        return self.layout.write(handed_out), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients drawn uniformly to evaluate the model."""
        if self.fraction_evaluate == 0.0:
            return []
        round = server_round + self._before
        arms = self._who_is_there(grid)
        count = self._count(self.fraction_evaluate, self.min_evaluate_nodes, len(arms))
        ids = np.array(sorted(arms), dtype=np.int64)
        chosen = ids[highest(keys(self.seed, "evaluation", round, ids), count)].tolist()
        log(INFO, "configure_evaluate: Sampled %s nodes (out of %s)", len(chosen), len(arms))
        config["server-round"] = round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, sorted(arms[client] for client in chosen), MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the metrics of the replies that have any."""
        usable = []
        for message in replies:
            content = None if message.has_error() else message.content
            records = [] if content is None else list(content.metric_records.values())
            if content is None or len(records) != 1 or not _is_weight(records[0].get(self.weighted_by_key)):
                reason = message.error.reason if message.has_error() else f"no {self.weighted_by_key}"
                log(WARNING, "aggregate_evaluate: node %d is left out: %s", message.metadata.src_node_id, reason)
            else:
                usable.append(content)
        metrics = self._average_metrics(self.evaluate_metrics_aggr_fn, usable)
        if metrics is not None:
            self._result.evaluate_metrics_clientapp[server_round + self._before] = metrics
            self._save_results()
        return metrics

    def _open(self, arrays: ArrayRecord) -> None:
        """Before the first round: learn what the model looks like, and go on from what is on disk."""
        if self._layout is not None:
            return
        described = self.judge.layout if self._names else None
        self._layout = ArrayLayout.of(arrays, described, self._names)
        self.judge.layout = self.layout.layout  # so that filters know what is trained, also where there is no module
        self.model = self.layout.read(arrays)
        self.momentum.trained = self.layout.layout.parameters
        self._before, self.smoothing.average, self.momentum.velocity = 0, None, None
        self._begun, self._saved_sampler = self._begun and self.state is None, None
        saved = self.state.load(self.layout.layout) if self.state else None
        if saved is not None:
            self._before, self.model, parts = saved.round, saved.model(self.layout.layout), saved.sampler
            if self.smoothing.share:
                self.smoothing.average = saved.beside(self.layout.layout, SMOOTHED)
            velocity = saved.beside(self.layout.layout, VELOCITY)
            if velocity is not None and len(velocity) >= self.momentum.trained and self.momentum.beta:
                self.momentum.velocity = velocity[: self.momentum.trained]  # there may have been no model to tell them
            self._saved_sampler = parts["sampler"]
            self.roster.load_state_dict(parts["roster"])
            self.examples = {int(client): examples for client, examples in parts["examples"].items()}

    def _catch_up(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        timeout: float,
        config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        """Evaluate the last round's model where the interruption came before that."""
        if self._before not in self._result.evaluate_metrics_clientapp and self.fraction_evaluate:
            messages = self.configure_evaluate(0, arrays, config, grid)
            self.aggregate_evaluate(0, grid.send_and_receive(messages, timeout=timeout))
        if evaluate_fn is not None and self._before not in self._result.evaluate_metrics_serverapp:
            self._keep_server_metrics(self._before, evaluate_fn(self._before, arrays))

    def _evaluate_at_server(
        self, evaluate_fn: EvaluateFn, server_round: int, arrays: ArrayRecord
    ) -> MetricRecord | None:
        round = server_round + self._before
        if server_round == 0 and self._before:
            return None  # done before
        return self._keep_server_metrics(round, evaluate_fn(round, arrays))

    def _keep_server_metrics(self, round: int, metrics: MetricRecord | None) -> MetricRecord | None:
        if metrics is not None:
            self._result.evaluate_metrics_serverapp[round] = metrics
            self._save_results()
        return metrics

    def _save_results(self) -> None:
        if self.state:
            self.state.save_results(self._result)

    def _who_is_there(self, grid: Grid) -> dict[int, int]:
        """The nodes that are connected, by arm, once there are enough of them."""
        needed = max(self.min_available_nodes, self.min_train_nodes, self.min_evaluate_nodes)
        while True:
            nodes = list(grid.get_node_ids())
            self.roster.meet(nodes)
            if self.client_ids == "ask" and (new := self.roster.unknown(nodes)):
                self._ask(grid, new)
            arms = self.roster.meet(nodes)
            if len(arms) >= needed:
                self._present = set(arms)
                return arms
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", len(arms), needed)
            time.sleep(1)

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        messages = [Message(content=RecordDict(), message_type=WHO, dst_node_id=node) for node in nodes]
        for reply in grid.send_and_receive(messages, timeout=ASKING_TAKES):
            node = reply.metadata.src_node_id
            if reply.has_error() or (client := claimed_id(reply.content)) is None:
                self.roster.hear(node, f"node {node}")
            else:
                self.roster.hear(node, client)

    def _receive(self, messages: Iterable[Message]) -> list[Reply]:
        """Each client's reply; one that turns out to be another client's is that client's from now on."""
        replies: dict[int, Reply] = {}
        for message in sorted(messages, key=lambda message: message.metadata.src_node_id):
            node = message.metadata.src_node_id
            asked = self._asked.get(node)
            if asked is None:
                log(WARNING, "aggregate_train: node %d was not asked and is ignored", node)
                continue
            client = None if message.has_error() else claimed_id(message.content)
            refused = None if client is None else self.roster.hear(node, client)
            arm = self.roster.arm(node)
            reply = read_reply(message, asked if refused else arm, self.layout, self.weighted_by_key)
            if refused:
                reply = Reply(asked, node, None, 0.0, 0.0, refused, self.layout)
            elif arm != asked:
                self._sampled = [arm if one == asked else one for one in self._sampled]
            replies[reply.client] = reply
        return list(replies.values())

    def _note(
        self, round: int, sifted: Sifted | None, received: Sequence[Reply], failed: Mapping[int, str]
    ) -> MetricRecord:
        """Log, keep and save what came of a round."""
        kept = [] if sifted is None else sifted.kept
        names = {client: self.roster.name(node) for node, client in self._asked.items()}
        names |= {reply.client: self.roster.name(reply.node) for reply in received}
        for client, reason in failed.items():
            log(WARNING, "aggregate_train: client %s is left out: %s", names.get(client, client), reason)
        filtered = sorted(set(self._sampled).difference(kept, failed)) if sifted else []
        usable = [reply.content for reply in received if reply.content is not None and reply.client not in failed]
        metrics = self._average_metrics(self.train_metrics_aggr_fn, usable) or MetricRecord()
        metrics["sampled"], metrics["kept"] = sorted(set(self._sampled)), kept
        metrics["filtered"], metrics["failed"] = filtered, sorted(failed)
        if sifted is not None and sifted.selection.score is not None:
            metrics["score"] = sifted.selection.score
        self._result.train_metrics_clientapp[round] = metrics
        if self.state:
            row = {
                "round": round,
                "sampled": self._sampled,
                "kept": kept,
                "coefficients": [] if sifted is None else sifted.coefficients.clients.tolist(),
                "score": None if sifted is None else sifted.selection.score,
                "excluded": {str(client): reason for client, reason in failed.items()},
                "clients": {str(client): name for client, name in sorted(names.items())},
            }
            parts = {
                "sampler": self.sampler.state_dict(),
                "roster": self.roster.state_dict(),
                "examples": {str(client): examples for client, examples in self.examples.items()},
            }
            beside = {SMOOTHED: self.smoothing.average, VELOCITY: self.momentum.velocity}
            self.state.save(row, self.model, self.layout.layout, parts, beside)
            self._save_results()
        return metrics

    def _average_metrics(self, average: Aggregator, contents: list[RecordDict]) -> MetricRecord | None:
        if not contents:
            return None
        try:
            return average(contents, self.weighted_by_key)
        except Exception as error:  # clients report what they like; it must not end the federation
            log(WARNING, "metrics can't be averaged: %s", error)
            return None

    def _weights(self, clients: Sequence[int]) -> NDArray[np.float64]:
        """p_k [n] by the examples that clients reported; one that reported none counts as a mean one."""
        mean = float(np.mean(list(self.examples.values()))) if self.examples else 1.0
        everyone = set(self._present) | set(clients)
        total = sum(self.examples.get(client, mean) for client in everyone)
        return np.array([self.examples.get(client, mean) / total for client in clients])

    def _count(self, fraction: float, least: int, available: int) -> int:
        return min(available, max(int(available * fraction + 1e-9), least))


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and np.isfinite(value) and value > 0
