"""FedCS: as many clients as fit a deadline, by how long they will take (Nishio & Yonetani 2019, arXiv 1804.08333)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.sampling.base import Ids, sorted_ids
from fedsieve.sampling.uniform import UniformSampler

Seconds = NDArray[np.float64]


class FedCSSampler(UniformSampler):
    """Of `count` candidates drawn uniformly, asks greedily those that add least time, while all are done in `deadline`.

    The paper's clients get the model together, train side by side, and send one after the other: the time of a set is
    its slowest download, plus Θ, which a client x moves to Θ + upload_x + max(0, train_x - Θ). A round of ours lets
    them send side by side, so what fits by this rule does so with time to spare. If no candidate fits, candidates are
    drawn from those of all clients that do; if there are none, the quickest of all is asked.
    """

    notation = "as many as fit the deadline, of some drawn uniformly"
    uses_prior_knowledge = True
    needs_times = True

    def __init__(self, deadline: float, seed: int = 0) -> None:
        super().__init__(seed)
        if not deadline > 0:
            raise InvalidSetting("deadline", deadline, "seconds above 0")
        self.deadline = deadline

    def sample(self, round: int, clients: ArrayLike, count: int) -> Ids:
        """Up to `count` different clients, sorted."""
        if self.device_times is None:
            raise InvalidSetting("sampler", "fedcs", "one that looks at no times, or --system drawn")
        ids = sorted_ids(clients, count)
        candidates = super().sample(round, ids, count)
        chosen = candidates[self._chosen(*self.device_times(candidates))]
        if chosen.size or count == 0:
            return chosen
        download, training, upload = self.device_times(ids)
        alone = download + (upload + training)
        fitting = ids[alone < self.deadline]
        if fitting.size == 0:
            return ids[[alone.argmin()]]
        candidates = super().sample(round, fitting, min(count, fitting.size))
        return candidates[self._chosen(*self.device_times(candidates))]

    def _chosen(self, download: Seconds, training: Seconds, upload: Seconds) -> NDArray[np.intp]:
        """The places of those that are asked, ascending (the paper's Algorithm 3)."""
        left = np.arange(len(download))
        chosen: list[int] = []
        slowest, busy = 0.0, 0.0  # T^d and Θ
        while len(left):
            added = np.maximum(download[left] - slowest, 0) + upload[left] + np.maximum(training[left] - busy, 0)
            best = int(added.argmin())
            place = int(left[best])
            left = np.delete(left, best)
            then = busy + upload[place] + max(0.0, training[place] - busy)
            if max(slowest, download[place]) + then < self.deadline:
                slowest, busy = max(slowest, download[place]), then
                chosen.append(place)
        return np.sort(np.array(chosen, dtype=np.intp))
