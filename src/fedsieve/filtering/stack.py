"""Arithmetic on all models of a round at once, in stretches of coordinates that fit a cache.

Sums are in double precision, so that one model gone wild, up to the edge of single precision, spoils no number that
belongs to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]

AT_ONCE = {"cpu": 2**19, "cuda": 2**25}
"""Numbers in a stretch, over all models: a few MB on a CPU; on a GPU enough to keep it busy."""


class Stack:
    """The flat `models` [models][size], each asked for once and then held; those in memory are not copied."""

    def __init__(self, models: Sequence[Tensor] | Tensor) -> None:
        self.rows = list(models)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, positions: Sequence[int]) -> Stack:
        """The models at these positions."""
        return Stack([self.rows[position] for position in positions])

    def gram(self) -> Vector:
        """The products of all models with each other: [models, models], symmetric."""
        total = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.rows[0].device)
        for stretch in self._stretches():
            values = torch.stack([row[stretch] for row in self.rows]).double()
            total += values @ values.T
        products: Vector = ((total + total.T) / 2).cpu().numpy()
        return products

    def squared_distances(self) -> Vector:
        """‖w_i - w_j‖² of all pairs [models, models], by ‖w_i‖² + ‖w_j‖² - 2⟨w_i, w_j⟩."""
        products = self.gram()
        squares = products.diagonal()
        distances: Vector = np.maximum(squares[:, None] + squares - 2 * products, 0.0)
        np.fill_diagonal(distances, 0.0)
        return distances

    def updates(self, previous: Tensor, direction: Tensor | None = None) -> tuple[Vector, Vector]:
        """The norms ‖w_k - w^t‖ [models] of the updates of `previous` [size], and their products with `direction`."""
        norms = torch.zeros(len(self), dtype=torch.float64, device=self.rows[0].device)
        products = torch.zeros_like(norms)
        for stretch in self._stretches():
            updates = torch.stack([row[stretch] for row in self.rows]).double() - previous[stretch].double()
            norms += torch.linalg.vector_norm(updates, dim=1) ** 2
            if direction is not None:
                products += updates @ direction[stretch].to(updates)
        return norms.sqrt().cpu().numpy(), products.cpu().numpy()

    def per_coordinate(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """What `rule` makes of each coordinate's values in ascending order, [coordinates, models] -> [coordinates]."""
        result = torch.empty_like(self.rows[0])

        def settle(stretch: slice) -> None:
            values = torch.stack([row[stretch] for row in self.rows]).T.contiguous()
            result[stretch] = rule(_sorted(values)).to(result.dtype)

        if result.device.type == "cpu":  # NumPy sorts in one thread, and lets others work meanwhile
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(settle, self._stretches()))
        else:
            for stretch in self._stretches():
                settle(stretch)
        return result

    def _stretches(self) -> Iterator[slice]:
        size, device = len(self.rows[0]), self.rows[0].device.type
        step = max(1, AT_ONCE.get(device, AT_ONCE["cuda"]) // len(self))
        return (slice(start, start + step) for start in range(0, size, step))


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
