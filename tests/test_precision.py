"""PyTorch's switches for a GPU's numbers: set while they matter, put back after, never for two runs at once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import fedsieve as fs
from fedsieve.engines.precision import Precision, arithmetic
from fedsieve.errors import InvalidSetting

CUDA = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")  # from autocast, where there is none


def switches() -> tuple[bool, bool, bool, bool]:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic, convolutions.benchmark


@pytest.mark.parametrize(("precision", "coarse"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_switches_are_set_inside_and_put_back(precision: Precision, coarse: bool) -> None:
    before = switches()
    with arithmetic(precision, CUDA):
        assert switches() == (coarse, coarse, True, False)
        with arithmetic("fp32", CUDA):  # as a search inside a run
            assert switches() == (False, False, True, False)
        assert switches() == (coarse, coarse, True, False)
    assert switches() == before
    with pytest.raises(ValueError, match="enough"), arithmetic(precision, CUDA):
        raise ValueError("enough")
    assert switches() == before


def test_a_cpu_has_no_switches() -> None:
    before = switches()
    with arithmetic("tf32", torch.device("cpu")):
        assert switches() == before


class Exacting(nn.Module):
    """Adds what its layer makes to numbers in fp32, of which bf16 is another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.zeros(len(inputs), 10)
        return total.index_add_(0, torch.arange(len(inputs)), self.layer(inputs.flatten(1)))


def test_a_model_that_cannot_be_computed_in_bf16_is_refused_before_the_run() -> None:
    settings = {"device": "cpu", "clients": 4, "rounds": 1, "local_epochs": 1}
    fs.run(fs.Config(**settings), model=Exacting())
    with pytest.raises(InvalidSetting, match="model: 'Exacting' is not allowed"):
        fs.run(fs.Config(precision="bf16", **settings), model=Exacting())


def test_one_run_waits_for_the_other() -> None:
    inside, leave, seen = threading.Event(), threading.Event(), []

    def coarse_run() -> None:
        with arithmetic("tf32", CUDA):
            inside.set()
            leave.wait(10)

    def exact_run() -> None:
        with arithmetic("fp32", CUDA):
            seen.append(switches())

    runs = [threading.Thread(target=coarse_run), threading.Thread(target=exact_run)]
    runs[0].start()
    assert inside.wait(10)
    runs[1].start()
    runs[1].join(0.2)
    assert runs[1].is_alive() and not seen
    leave.set()
    for run in runs:
        run.join(10)
    assert seen == [(False, False, True, False)]
