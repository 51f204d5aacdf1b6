"""What nodes answered: models that are unpacked when they are needed, and why some can't be used."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsieve.engines.base import UNUSABLE, is_nonsense, problem_of
from fedsieve.flower.arrays import ArrayLayout

CLIENT_ID = "client-id"
MOST_EXAMPLES = 1e12


@dataclass(frozen=True)
class Reply:
    """A client's answer. Its model [size] is unpacked from Flower's bytes each time: one copy of all is enough."""

    client: int
    node: int
    content: RecordDict | None
    examples: float
    loss: float
    error: str | None
    layout: ArrayLayout

    @property
    def model(self) -> Tensor | None:
        """The flat model [size]; raises ValueError where there is none."""
        if self.content is None:
            return None
        records = list(self.content.array_records.values())
        if len(records) != 1:
            raise ValueError(f"{len(records)} array records, expected one")
        return self.layout.read(records[0])

    def problem(self, like: Tensor) -> str | None:
        """Why the model can't be averaged with others like `like` [size], if it can't."""
        if self.error is not None:
            return self.error
        try:
            problem = problem_of(self.model, self.loss, like)
        except ValueError as error:  # what it sent can't be unpacked
            problem = str(error)
        return problem if problem is None or is_nonsense(problem) else _one_line(UNUSABLE + problem)


def read_reply(message: Message, client: int, layout: ArrayLayout, weighted_by: str) -> Reply:
    """A reply with the reason why it can't be used, if there is one; its numbers are looked at later."""
    node = message.metadata.src_node_id

    def unusable(reason: str) -> Reply:
        return Reply(client, node, None, 0.0, 0.0, _one_line(reason), layout)

    if message.has_error():
        return unusable(f"error {message.error.code}: {message.error.reason}")
    content = message.content
    metrics = _metrics(content)
    examples = metrics.get(weighted_by)
    if examples is None:
        return unusable(f"{UNUSABLE}no {weighted_by} among its metrics")
    if isinstance(examples, list) or not (math.isfinite(examples) and 0 < examples <= MOST_EXAMPLES):
        reason = f"{weighted_by} {examples}, which is not a number above 0 and up to {MOST_EXAMPLES:g}"
        return unusable(UNUSABLE + reason)
    loss = metrics.get("train_loss", metrics.get("train-loss", 0.0))
    loss = math.nan if isinstance(loss, list) else float(loss)
    return Reply(client, node, content, float(examples), loss, None, layout)


def claimed_id(content: RecordDict) -> str | None:
    """Which client a reply says it is from."""
    for record in content.values():
        if isinstance(record, ConfigRecord | MetricRecord) and isinstance(record.get(CLIENT_ID), str | int):
            return str(record[CLIENT_ID])
    return None


def _metrics(content: RecordDict) -> MetricRecord:
    records = list(content.metric_records.values())
    return records[0] if len(records) == 1 else MetricRecord()


def _one_line(reason: str) -> str:
    """A reason as a log and a file can take it, whatever a client put in there."""
    return " ".join(reason.encode(errors="replace").decode().split())[:200]
