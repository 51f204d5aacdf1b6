"""The baselines of a sceptic: the validation data as training data, after averaging or as one more client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedsieve as fs
from fedsieve.averaging import Coefficients, combine
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import Candidates, FineTuning, LearnedAveraging
from fedsieve.runs import assemble

SETTINGS: dict[str, Any] = {"rounds": 4, "clients": 8, "ratio": 0.5, "lr": 0.05, "batch_size": 16, "device": "cpu"}


def test_fine_tuning_is_sgd_with_momentum_by_hand() -> None:
    # The log-likelihood is -|w - 2|² / 2 whatever the batch, so its gradient is 2 - w. From the average, 1, with rate
    # 0.1: velocity 1, w 1.1; velocity 0.9 + 0.9 = 1.8, w 1.28.
    candidates = Candidates(
        logits=torch.empty(0),
        labels=torch.zeros(5),
        weights=torch.ones(2),
        average=lambda kept: torch.tensor([float(len(kept)) - 1]),
        score_and_gradient=lambda model, examples: (torch.zeros(()), 2 - model),
        random=np.random.default_rng(0),
    )
    selection = FineTuning(steps=2, batch=3, rate=0.1).select(candidates)
    assert selection.kept == (0, 1) and selection.model is not None
    assert selection.model.tolist() == pytest.approx([1.28])


def test_the_server_is_one_more_client_of_every_round() -> None:
    config = fs.Config(algorithm="fedpdp-server-client", **SETTINGS)
    federation, engine = assemble(config)
    before = federation.model.clone()
    played = federation.play(1)
    assert max(played.sampled) < 8 and len(played.sampled) == 4
    # By hand: FedPdp of those sampled and the server, weighted by how many examples each has.
    assert federation.server is not None
    models = [update.model for update in engine.train(before, [*sorted(played.sampled), 8], 1)]
    examples = [float(engine.partition[client].size) for client in [*sorted(played.sampled), 8]]  # type: ignore[attr-defined]
    shares = np.array(examples) / sum(examples)
    assert examples[-1] == config.validation_per_class * 10
    expected = combine(before, [model for model in models if model is not None], Coefficients(0.0, shares))
    assert torch.allclose(federation.model, expected, atol=1e-6)
    engine.close()


@pytest.mark.parametrize(
    "algorithm", ["fedpdp-finetune", "fedpdp-server-client", "fedsieve", "fedsieve-ucb", "fedsieve-ts"]
)
def test_they_learn_and_need_validation_data(algorithm: str) -> None:
    history = fs.run(fs.Config(algorithm=algorithm, **SETTINGS))
    assert history.accuracy[-1] > 0.3
    with pytest.raises(InvalidSetting, match="validation_per_class: 0"):
        fs.run(fs.Config(algorithm=algorithm, **SETTINGS | {"validation_per_class": 0}))


def test_fine_tuning_sees_as_many_examples_as_learned_averaging() -> None:
    tuning, learning = FineTuning(), LearnedAveraging()
    assert (tuning.steps, tuning.batch) == (learning.steps, learning.batch)
