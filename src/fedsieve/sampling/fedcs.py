"""FedCS: as many clients as fit a deadline, by how long they will take (Nishio & Yonetani 2019, arXiv 1804.08333)."""

from __future__ import annotations

import math
from collections import defaultdict
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsieve.errors import InvalidSetting
from fedsieve.sampling.base import Ids, sorted_ids
from fedsieve.sampling.uniform import UniformSampler

Seconds = NDArray[np.float64]
Group = tuple[bool, bool]


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
            raise InvalidSetting("sampler", "fedcs", "it with --system drawn or a CSV file: it looks at times")
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
        left = ByAddedTime(download, training, upload)
        chosen: list[int] = []
        slowest, busy = 0.0, 0.0  # T^d and Θ
        while (place := left.take_least(slowest, busy)) is not None:
            then = busy + left.upload[place] + max(0.0, left.training[place] - busy)
            if max(slowest, left.download[place]) + then < self.deadline:
                slowest, busy = max(slowest, left.download[place]), then
                chosen.append(place)
        return np.sort(np.array(chosen, dtype=np.intp))


class ByAddedTime:
    """Candidates by the time they add, which falls as T^d and Θ grow: n log n steps to take all n.

    A client adds download - T^d, unless its download is shorter than that, then upload, and training - Θ, unless its
    training is shorter. By these two it is in one of four groups, and within a group what a client adds is a sum of its
    own times less the same for all: each group has a heap of such sums. T^d and Θ only grow, so a client changes its
    group twice at most; its place in the heap it left is thrown away once it is on top.
    """

    def __init__(self, download: Seconds, training: Seconds, upload: Seconds) -> None:
        self.download: list[float] = download.tolist()
        self.training: list[float] = training.tolist()
        self.upload: list[float] = upload.tolist()
        self.slowest = self.busy = -math.inf
        # Shortest last, to be taken from the end as T^d and Θ pass them.
        self.longer_download, self.longer_training = np.argsort(-download).tolist(), np.argsort(-training).tolist()
        self.left = set(range(len(download)))
        self.heaps: defaultdict[Group, list[tuple[float, int]]] = defaultdict(list)
        for place in self.left:
            self._enter(place)

    def take_least(self, slowest: float, busy: float) -> int | None:
        """The place of who adds least where T^d is `slowest` and Θ is `busy`, of equals the first; None if all left."""
        self.slowest, self.busy = slowest, busy
        while self.longer_download and self.download[self.longer_download[-1]] <= slowest:
            self._enter(self.longer_download.pop())
        while self.longer_training and self.training[self.longer_training[-1]] <= busy:
            self._enter(self.longer_training.pop())
        tops = [heap[0][1] for group, heap in self.heaps.items() if self._tidy(group, heap)]
        if not tops:
            return None
        least = min(tops, key=lambda place: (self._added(place), place))
        self.left.remove(least)
        return least

    def _enter(self, place: int) -> None:
        if place in self.left:
            group = self._group(place)
            fetching, training = self.download[place] * group[0], self.training[place] * group[1]
            heappush(self.heaps[group], (fetching + self.upload[place] + training, place))

    def _tidy(self, group: Group, heap: list[tuple[float, int]]) -> bool:
        """Throw away who is on top but not in the group any more; whether there is anybody else."""
        while heap and not (heap[0][1] in self.left and self._group(heap[0][1]) == group):
            heappop(heap)
        return bool(heap)

    def _group(self, place: int) -> Group:
        """Whether its download is longer than T^d, and its training than Θ."""
        return self.download[place] > self.slowest, self.training[place] > self.busy

    def _added(self, place: int) -> float:
        fetching, training = self.download[place] - self.slowest, self.training[place] - self.busy
        return max(fetching, 0.0) + self.upload[place] + max(training, 0.0)
