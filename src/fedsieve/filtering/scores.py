"""How good a prediction is: the two scores of the paper, of averaged logits on the validation set."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Score = Literal["accuracy", "cross-entropy"]


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of examples whose highest logit is the label's (the paper's Dirac delta score).

    `logits` [..., examples, classes], `labels` [examples] -> [...]. Of equal logits the lowest class counts.
    """
    return (logits.argmax(-1) == labels).double().mean(-1)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean log-probability of the label under the softmax of the logits: minus the cross-entropy, so higher is better.

    `logits` [..., examples, classes], `labels` [examples] -> [...].
    """
    of_label = logits.gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1))
    return -(logits - of_label).logsumexp(-1).double().mean(-1)
