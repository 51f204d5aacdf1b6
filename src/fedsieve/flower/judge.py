"""The server's validation data on Flower: the simulator's engine without clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve.clients import LocalTraining
from fedsieve.data import Dataset, Partition
from fedsieve.engines import Judge, SequentialEngine, WorkersEngine
from fedsieve.errors import InvalidSetting
from fedsieve.models import check_outputs
from fedsieve.runs.assembly import find_device


class ValidationJudge(Judge):
    """Scores flat models [size] on validation examples, one model at a time."""

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module], validation: tuple[Any, Any], device: str, seed: int
    ) -> None:
        try:
            inputs, labels = (np.asarray(torch.as_tensor(part).cpu()) for part in validation)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidSetting("validation", type(validation).__name__, f"arrays (x, y) ({error})") from None
        if inputs.dtype.kind != "f" or inputs.ndim < 2 or inputs.size == 0:
            given = f"inputs {inputs.dtype} {list(inputs.shape)}"
            raise InvalidSetting("validation", given, "floats [n, ...], at least one example, as the model takes them")
        if not np.isfinite(inputs).all():
            raise InvalidSetting("validation", "inputs with NaN or infinity", "finite numbers")
        module = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        if not isinstance(module, nn.Module):
            raise InvalidSetting("model", type(module).__name__, "a torch.nn.Module, or a function that makes one")
        classes = _outputs(module, inputs)
        try:
            dataset = Dataset.from_arrays(inputs, labels, inputs, labels, classes)
        except InvalidSetting as problem:  # it names the training data, of which there is none here
            raise InvalidSetting("validation", problem.value, problem.allowed) from None
        nobody = Partition(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64))
        place = find_device(device)
        common = (lambda: module, dataset, nobody, np.arange(len(labels)), LocalTraining(), seed)
        self.engine: SequentialEngine
        self.engine = WorkersEngine(*common) if place.type == "cpu" else SequentialEngine(*common, place)
        check_outputs(self.engine.module, dataset.input_shape, dataset.classes, place)
        self.layout = self.engine.layout

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """[models, examples, classes]."""
        return torch.cat([self.engine.logits([model.to(self.engine.device)], data) for model in models]).cpu()

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """[examples]."""
        return self.engine.labels(data).cpu()

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean log-likelihood and its gradient [size]."""
        score, gradient = self.engine.score_and_gradient(model.to(self.engine.device), examples, crops)
        return score.cpu(), gradient.cpu()


class NoJudge(Judge):
    """For algorithms that look at no validation data."""

    def logits(self, models: Sequence[Tensor], data: Literal["validation", "test"]) -> Tensor:
        """There is nothing to predict."""
        raise InvalidSetting("validation", None, "a pair of arrays (x, y), which the filter needs")

    def labels(self, data: Literal["validation", "test"]) -> Tensor:
        """None."""
        return torch.empty(0, dtype=torch.int64)

    def score_and_gradient(
        self, model: Tensor, examples: Tensor | None = None, crops: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """There is nothing to score."""
        raise InvalidSetting("validation", None, "a pair of arrays (x, y), which the filter needs")


def _outputs(module: nn.Module, inputs: np.ndarray[Any, Any]) -> int:
    """How many classes the module tells apart."""
    training = module.training
    try:
        with torch.no_grad():
            return int(module.cpu().eval()(torch.as_tensor(inputs[:2]).float()).shape[-1])
    except Exception as error:
        raise InvalidSetting("model", type(module).__name__, f"a model for the validation inputs ({error})") from None
    finally:
        module.train(training)
