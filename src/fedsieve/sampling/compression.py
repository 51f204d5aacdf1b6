"""Models in a few numbers each: their principal components, exact however large the models are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import InvalidSetting

BLOCK = 2**18
NOTHING = 1e-10
"""Of the largest variance: a component with less has none, but for rounding."""


@dataclass(frozen=True)
class Compression:
    """`mean` [size] and `loadings` [components, size], orthonormal rows; numbers are in `unit`s.

    The unit is the standard deviation along the first component.
    """

    mean: Tensor
    loadings: Tensor
    unit: float

    @classmethod
    def of(cls, models: Tensor, components: int) -> Compression:
        """Fitted to `models` [n, size], of which a centred copy is made block by block.

        XXᵀ = U Λ Uᵀ is [n, n], and the loadings are Λ^(-1/2) Uᵀ X. Of each column of U the number that is largest in
        size is positive. A component along which models don't differ is 0.
        """
        count, size = models.shape
        if not 1 <= components <= count:
            raise InvalidSetting("components", components, f"1 to {count}, the number of models")
        mean = torch.empty(size, device=models.device)
        gram = torch.zeros(count, count, dtype=torch.float64, device=models.device)
        for start in range(0, size, BLOCK):
            block = models[:, start : start + BLOCK].double()
            mean[start : start + BLOCK] = block.mean(0)
            centred = block - block.mean(0)
            gram += centred @ centred.T
        variances, vectors = np.linalg.eigh(gram.cpu().numpy())
        variances, vectors = variances[::-1][:components], vectors[:, ::-1][:, :components]
        largest = vectors[np.abs(vectors).argmax(0), np.arange(components)]
        real = variances > NOTHING * max(variances[0], np.finfo(np.float64).tiny)
        factors = np.sign(largest) * real / np.sqrt(np.where(real, variances, 1.0))
        turn = torch.from_numpy((vectors * factors).T.copy()).to(models.device)
        loadings = torch.empty(components, size, device=models.device)
        for start in range(0, size, BLOCK):
            block = models[:, start : start + BLOCK].double()
            loadings[:, start : start + BLOCK] = turn @ (block - block.mean(0))
        deviation = float(np.sqrt(max(variances[0], 0.0) / max(count - 1, 1)))
        return cls(mean, loadings, deviation or 1.0)

    @property
    def components(self) -> int:
        """How many numbers stand for a model."""
        return self.loadings.shape[0]

    @property
    def size(self) -> int:
        """How many numbers a model has."""
        return self.loadings.shape[1]

    def to(self, device: torch.device) -> Compression:
        """The same where models are."""
        return replace(self, mean=self.mean.to(device), loadings=self.loadings.to(device))

    def __call__(self, models: Sequence[Tensor]) -> NDArray[np.float32]:
        """What stands for `models` [n of size]: [n, components]."""
        if not len(models):
            return np.empty((0, self.components), dtype=np.float32)
        flat = torch.stack([model.detach().to(self.mean) for model in models])
        coordinates: NDArray[np.float32] = ((flat - self.mean) @ self.loadings.T / self.unit).cpu().numpy()
        return coordinates
