"""Arithmetic on all models of a round at once, in stretches of coordinates that fit a cache.

A stretch is added up in the models' own precision, stretches in double precision. Where one model gone wild, up to the
edge of single precision, would spoil numbers that belong to others, all is done in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.threads import in_threads

Vector = NDArray[np.float64]
Made = TypeVar("Made")

AT_ONCE = {"cpu": 2**19, "cuda": 2**25}
"""Numbers in a stretch, over all models: a few MB on a CPU; on a GPU enough to keep it busy."""

FAR = 100
"""How many times their squared distances models may be away from where they are seen from, in single precision."""

SMALL = 1e-30
"""A squared norm below this may have lost digits in single precision."""


class Stack:
    """The flat `models` [models][size], each asked for once and then held; those in memory are not copied.

    Of a model the first `trained` numbers (default: all) count for norms, distances and products. The rest are buffers:
    a counter of batches would tell who took many steps, not who points where.
    """

    def __init__(self, models: Sequence[Tensor] | Tensor, trained: int | None = None) -> None:
        self.rows = list(models)
        self.trained = len(self.rows[0]) if trained is None else trained

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, positions: Sequence[int]) -> Stack:
        """The models at these positions."""
        return Stack([self.rows[position] for position in positions], self.trained)

    def gram(self) -> Vector:
        """The products of all models with each other, as seen from any one point: [models, models], symmetric.

        From a model amid the others small differences between large models stay in sight.
        """

        def products(values: Tensor, here: slice) -> Tensor:
            return values @ values.T

        first = self._values(next(self._stretches(self.trained)), torch.float64)
        amid = int(torch.cdist(first, first).sum(1).argmin())
        seen = self._total(products, self.rows[amid])
        if np.isfinite(seen).all() and np.median(seen.diagonal()) <= FAR * np.median(_squared_distances(seen)):
            return seen
        return self._total(products, dtype=torch.float64)

    def squared_distances(self) -> Vector:
        """‖w_i - w_j‖² of all pairs [models, models]."""
        return _squared_distances(self.gram())

    def updates(self, previous: Tensor, direction: Tensor | None = None) -> tuple[Vector, Vector]:
        """The norms ‖w_k - w^t‖ [models] of the updates of `previous` [size], and their products with `direction`."""

        def sums(values: Tensor, here: slice) -> Tensor:
            along = torch.zeros_like(values[:, 0]) if direction is None else values @ direction[here].to(values)
            return torch.stack([torch.linalg.vector_norm(values, dim=1) ** 2, along])

        found = self._total(sums, previous)
        if not (np.isfinite(found).all() and found[0].min() > SMALL):
            found = self._total(sums, previous, torch.float64)
        return np.sqrt(found[0]), found[1]

    def mixtures(self, shares: Vector) -> Tensor:
        """Weighted sums [sums, size] of the models, by their `shares` [sums, models]."""
        like = self.rows[0]
        result = torch.empty(len(shares), len(like), dtype=like.dtype, device=like.device)
        mix = torch.from_numpy(shares).to(result)

        def settle(here: slice) -> None:
            result[:, here] = mix @ self._values(here)

        for _ in self._each(settle, len(like)):
            pass
        return result

    def moved(self, previous: Tensor, steps: Vector) -> Tensor:
        """w^t + Σ steps_k (w_k - w^t) [size], for `previous` w^t [size] and `steps` [models].

        Differences are added up, in double precision: a step may be as long as an update is short.
        """
        result, along = torch.empty_like(previous), torch.from_numpy(steps).to(previous.device)

        def settle(here: slice) -> None:
            start = previous[here].double()
            result[here] = (start + along @ self._values(here, torch.float64).sub_(start)).to(result.dtype)

        for _ in self._each(settle, len(previous)):
            pass
        return result

    def per_coordinate(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """What `rule` makes of each coordinate's values in ascending order, [coordinates, models] -> [coordinates]."""
        result = torch.empty_like(self.rows[0])

        def settle(here: slice) -> None:
            result[here] = rule(_sorted(self._values(here).T.contiguous())).to(result.dtype)

        for _ in self._each(settle, len(result)):
            pass
        return result

    def _total(
        self,
        summand: Callable[[Tensor, slice], Tensor],
        origin: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Vector:
        """The sum of what `summand` makes of each stretch of what was trained, as seen from `origin` [size]."""

        def part(here: slice) -> Tensor:
            values = self._values(here, dtype)
            return summand(values if origin is None else values.sub_(origin[here]), here)

        total: Vector = sum(made.double() for made in self._each(part, self.trained)).cpu().numpy()  # type: ignore[union-attr]
        return total

    def _values(self, here: slice, dtype: torch.dtype | None = None) -> Tensor:
        """A stretch of all models, [models, coordinates]: a copy."""
        return torch.stack([row[here] for row in self.rows]).to(dtype or self.rows[0].dtype)

    def _each(self, work: Callable[[slice], Made], size: int) -> Iterator[Made]:
        """What `work` makes of each stretch of the first `size` numbers, in order; on a CPU in PyTorch's threads."""
        if self.rows[0].device.type != "cpu":
            yield from map(work, self._stretches(size))
            return
        yield from in_threads(work, self._stretches(size))

    def _stretches(self, size: int) -> Iterator[slice]:
        step = max(1, AT_ONCE.get(self.rows[0].device.type, AT_ONCE["cuda"]) // len(self))
        return (slice(start, min(size, start + step)) for start in range(0, size, step))


def _squared_distances(products: Vector) -> Vector:
    """By ‖w_i‖² + ‖w_j‖² - 2⟨w_i, w_j⟩."""
    squares = products.diagonal()
    distances: Vector = np.maximum(squares[:, None] + squares - products - products.T, 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def _sorted(values: Tensor) -> Tensor:
    """Each row of `values` [rows, columns] in ascending order; may work in place."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        values.numpy().sort(axis=1)  # eight times as fast as PyTorch's
        return values
    return values.sort(dim=1).values


def middle(ascending: Tensor) -> Tensor:
    """The median [rows], in double precision, of values [rows, columns] in ascending order; of two the mean."""
    columns = ascending.shape[1]
    return (ascending[:, (columns - 1) // 2].double() + ascending[:, columns // 2].double()) / 2
