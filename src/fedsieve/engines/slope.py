"""The gradient on validation data on a GPU. Who asks for it asks again and again, so it is captured as a CUDA graph."""

from __future__ import annotations

import copy
import logging
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsieve.engines.capture import record
from fedsieve.engines.fusing import fused_twin
from fedsieve.engines.sequential import one_line
from fedsieve.engines.streams import borrow, give_back
from fedsieve.vector import Layout

MOST_GRAPHS = 8  # as many sizes of a batch

log = logging.getLogger("fedsieve")


class Slope:
    """The log-likelihood of a batch, summed, and its gradient by the model.

    A size of a batch is computed as it is the first time, and captured the second.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.point, self.gradient = torch.zeros(2, layout.size, device=device, dtype=layout.dtype)
        self._named = copy.deepcopy(module).to(device).eval()
        layout.bind(self.point, self.gradient, self._named)
        self._parameters = [parameter for parameter in self._named.parameters() if parameter.requires_grad]
        self._fused = fused_twin(self._named)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self._stream = borrow(device)
        if self._stream is not None:
            finalize(self, give_back, device, self._stream, self._graphs)
        self._seen: set[int] = set()

    def at(self, model: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The log-likelihood [] and its gradient [size], until the next call."""
        self.point.copy_(model)
        self.layout.write_untrained(model, self._named)
        size = len(labels)
        if size in self._seen and size not in self._graphs:
            self._capture(inputs, labels)
        self._seen.add(size)
        if size not in self._graphs:
            return self._compute(inputs, labels), self.gradient
        graph, given, right, likelihood = self._graphs[size]
        given.copy_(inputs)
        right.copy_(labels)
        graph.replay()
        return likelihood, self.gradient

    def _compute(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self._fused(inputs)
        likelihood = -cross_entropy(logits.to(self.layout.dtype), labels, reduction="sum")
        slopes = torch.autograd.grad(likelihood, self._parameters, allow_unused=True)
        for parameter, slope in zip(self._parameters, slopes, strict=True):
            assert parameter.grad is not None  # a view of `gradient`
            if slope is not None:
                parameter.grad.copy_(slope)
        return likelihood.detach()

    def _capture(self, inputs: Tensor, labels: Tensor) -> None:
        """Write down how a batch as large as this one is computed, if that can be done."""
        if self._stream is None or len(self._graphs) == MOST_GRAPHS:
            return
        given, right = torch.empty_like(inputs).copy_(inputs), labels.clone()
        beside = next((graph for graph, *_ in self._graphs.values()), None)
        main, stream = torch.cuda.current_stream(self.device), self._stream
        stream.wait_stream(main)
        try:
            with torch.cuda.stream(stream):
                self._compute(given, right)  # libraries choose and load their kernels now, not while capturing
                graph, likelihood = record(lambda: self._compute(given, right), beside)
            self._graphs[len(labels)] = graph, given, right, likelihood
        except Exception as error:
            log.info("the gradient on validation data can't be captured: %s", one_line(error))
            self._stream = None
            self._graphs.clear()  # PyTorch cleared the workspaces of all on this stream
        main.wait_stream(stream)
