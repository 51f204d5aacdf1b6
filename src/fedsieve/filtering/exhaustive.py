"""All subsets, exactly, many times faster than scoring them one by one.

Both scores split the models into a low and a high half, so that a subset is a pair (high, low) and the work on sums is
done once per half. Accuracy: the label beats class c on an example when low sum < -high sum. Both sides are coarsened
to one byte, so that a comparison costs next to nothing and errs to one side only: what it counts is an upper bound for
every subset, and the few subsets whose bound reaches the best exact count are counted exactly. Cross-entropy: for
subsets of k models, exp of the mean margin is a product of a high and a low factor, so Σ_c exp(mean margin) over all
pairs is a small matrix product per example.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import TooManyModels
from fedsieve.filtering.scores import log_likelihood
from fedsieve.filtering.subsets import TIE_WIDTH, Found, Problem, label_wins, members_of, preference, subset_sums

MOST_MODELS = 24
LARGEST_MARGIN = 300.0
"""Beyond it a product of exponentials could leave the range of double precision."""


def search(problem: Problem) -> Found:
    """The best of all 2^n - 1 subsets; ties as `preference` decides."""
    if problem.models > MOST_MODELS:
        raise TooManyModels(
            f"candidates: {problem.models} models are too many for the exhaustive search; "
            f"use at most {MOST_MODELS}, or another search"
        )
    if problem.score == "accuracy":
        best, _ = most_correct(*problem.margins(), at_least=-1)
    else:
        scores = log_likelihoods(problem)
        scores[0] = -torch.inf
        tied = torch.nonzero(scores >= scores.max() - TIE_WIDTH).flatten().cpu().numpy()
        best = int(tied[preference(tied, problem.models).argmax()])
    score = problem.score_of(members_of(best))
    return Found(members_of(best), score, looked_at=2**problem.models - 1, optimal=True, bound=score)


def most_correct(
    margins: Tensor, wins_ties: Tensor, at_least: int, start: Tensor | None = None, empty_too: bool = False
) -> tuple[int, int]:
    """The subset (bit k is model k) with which the label wins most examples, and how many; (0, at_least) if not more.

    `margins` [n, examples, classes] and `wins_ties` [examples, classes] are as in `Problem.margins`; `start` [examples,
    classes] is a sum that every subset begins with, the empty one included if `empty_too`.
    """
    start = torch.zeros_like(margins[0]) if start is None else start
    order = margins.abs().sum((1, 2)).argsort(stable=True)  # the quietest come first: their sums make the finest codes
    margins = margins[order]
    models, place = len(margins), 1 << order.cpu().numpy()
    bounds = upper_counts(margins, wins_ties, start)
    if not empty_too:
        bounds[0] = -1
    found: list[tuple[int, int]] = []  # (subset, exact count), below its bound
    for level in range(int(bounds.max()), at_least, -1):
        pool = torch.nonzero(bounds == level).flatten().cpu().numpy()
        pool = (pool[:, None] >> np.arange(models) & 1) @ place  # in terms of the models as they were given
        pool = pool[np.argsort(-preference(pool, models), kind="stable")]
        hits = [subset for subset, count in found if count == level]
        for part in np.array_split(pool, max(1, -(-len(pool) // 32))):
            exact = _exact_counts(margins, wins_ties, start, part[:, None] & place != 0)
            found += [(subset, count) for subset, count in zip(part.tolist(), exact.tolist(), strict=True)]
            if (exact == level).any():
                hits += part[exact == level].tolist()  # the first part with a hit holds the preferred one of the pool
                break
        if hits:
            return int(hits[preference(np.array(hits), models).argmax()]), level
    return 0, at_least


def _exact_counts(margins: Tensor, wins_ties: Tensor, start: Tensor, members: NDArray[np.bool_]) -> NDArray[np.int64]:
    """On how many examples the label wins, for each subset `members` [k, n], in double precision."""
    sums = (torch.from_numpy(members).to(margins) @ margins.flatten(1)).view(len(members), *start.shape) + start
    return label_wins(sums, wins_ties).sum(1).cpu().numpy()


def upper_counts(margins: Tensor, wins_ties: Tensor, start: Tensor) -> Tensor:
    """At least the number of examples on which the label wins, and hardly more, for every subset [2^n].

    Examples that no subset can change are counted first and left out, and so are classes that can never win.
    """
    live, right = unsettled(margins, wins_ties, start)
    chosen = live.any(1)
    live, margins, start = live[chosen], margins[:, chosen], start[chosen]
    classes = live.sum(1)
    order = classes.argsort(descending=True, stable=True)  # so that examples with few live classes are done together
    slots_at = classes[order].tolist()
    live_first = (~live).to(torch.uint8).sort(dim=1, stable=True).indices

    models, device = len(margins), margins.device
    low = min(8, models // 2)
    high = min(8 if device.type == "cpu" else 12, models - low)
    counts = torch.full((2 ** (models - low), 2**low), right, dtype=torch.int32, device=device)
    rows = _rows(device, 8 * 2 ** max(low, high) * max([1, *slots_at[:1]]), max(8, 2**19 >> low))
    for first in range(0, len(order), rows):
        part = order[first : first + rows]
        slots = live_first[part, : slots_at[first]]  # [rows, slots]
        used = live[part].gather(1, slots).T
        sums = margins[:, part].gather(2, slots.expand(models, *slots.shape)).transpose(1, 2)  # [models, slots, rows]
        begin = start[part].gather(1, slots).T
        # In units in which the low sums run from 1 to 254; -high sums beyond them are 0 or 255. A slot without a live
        # class is set to pass. The last term makes up for rounding, many times over.
        lowest, highest = sums[:low].clamp(max=0).sum(0), sums[:low].clamp(min=0).sum(0)
        unit = (highest - lowest).clamp(min=1e-3) / 253
        low_codes = subset_sums(sums[:low] / unit).add_(1 - lowest / unit).clamp_(0, 255).to(torch.uint8)
        high_sums = subset_sums(-sums[low : low + high])
        tops = subset_sums(-sums[low + high :]) + (TIE_WIDTH - begin - lowest)
        tops = torch.where(used, tops, torch.inf)
        for place, top in enumerate(tops):
            high_codes = (high_sums + top).div_(unit).add_(1 + 1e-4).clamp_(0, 255).to(torch.uint8)
            counts[place * 2**high : (place + 1) * 2**high] += count_passes(
                low_codes.transpose(0, 1), high_codes.transpose(0, 1)
            )
    return counts.flatten()


def unsettled(margins: Tensor, wins_ties: Tensor, start: Tensor) -> tuple[Tensor, int]:
    """Which pairs [examples, classes] some subset can turn, and on how many examples the label always wins.

    No pair of an example on which the label always loses is left, nor any class that the label always beats.
    """
    lowest, highest = start + margins.clamp(max=0).sum(0), start + margins.clamp(min=0).sum(0)
    always_beaten = torch.where(wins_ties, highest < -TIE_WIDTH, highest <= TIE_WIDTH)
    never_beaten = torch.where(wins_ties, lowest >= -TIE_WIDTH, lowest > TIE_WIDTH)
    lost = never_beaten.any(1)
    won = always_beaten.all(1)
    return ~always_beaten & ~lost.unsqueeze(1), int(won.sum())


def log_likelihoods(problem: Problem) -> Tensor:
    """The mean log-likelihood of every subset [2^n]."""
    margins, _ = problem.margins()
    margins = torch.cat([margins, torch.zeros_like(margins[..., :1])], 2)  # the label's own margin
    largest = float(margins.abs().max())
    if largest > LARGEST_MARGIN:
        return _plain_log_likelihoods(problem)
    models, examples, classes = margins.shape
    low = min(8, models // 2)
    low_order, low_groups = _by_size(problem.counts[:low], margins.device)
    high_order, high_groups = _by_size(problem.counts[low:], margins.device)
    widest = max(map(_length, low_groups.values())) * max(map(_length, high_groups.values()))
    rows = _rows(margins.device, 8 * max(widest, 2 ** (models - low) * classes), 1000)

    sums = torch.zeros(len(high_order), len(low_order), dtype=torch.float64, device=margins.device)
    for first in range(0, examples, rows):
        part = margins[:, first : first + rows]
        for k in range(1, int(problem.counts.sum()) + 1):
            pairs = [(group, low_groups[k - size]) for size, group in high_groups.items() if k - size in low_groups]
            if not pairs:
                continue
            factors = (part / k).exp()
            of_low = _subset_products(factors[:low])[low_order].permute(1, 2, 0)
            of_high = _subset_products(factors[low:])[high_order].transpose(0, 1)
            for highs, lows in pairs:
                total = torch.bmm(of_high[:, highs], of_low[:, :, lows])
                sums[highs, lows] -= _sum_of_logs(total, largest + math.log(classes))
    scores = torch.empty_like(sums)
    scores[high_order.unsqueeze(1), low_order] = sums / examples
    return scores.flatten()


def _by_size(counts: Tensor, device: torch.device) -> tuple[Tensor, dict[int, slice]]:
    """All subsets in ascending order of size [2^n], and where each size lies."""
    sizes, order = subset_sums(counts).sort(stable=True)
    found, lengths = torch.unique_consecutive(sizes, return_counts=True)
    ends = lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return order.to(device), {
        size: slice(start, end) for size, start, end in zip(found.tolist(), starts, ends, strict=True)
    }


def _length(group: slice) -> int:
    return int(group.stop - group.start)


def _rows(device: torch.device, bytes_a_row: int, most_on_cpu: int) -> int:
    """How many examples to work on at once: what stays in a cache, or fills a GPU without filling its memory."""
    if device.type == "cpu":
        return max(1, min(most_on_cpu, 2**24 // bytes_a_row))
    return max(1, 2**30 // bytes_a_row)


def count_passes(low: Tensor, high: Tensor) -> Tensor:
    """In how many rows low ≤ high in all slots: bytes `low` [slots, l, rows] and `high` [slots, h, rows] -> [h, l].

    Verdicts are added as bytes, eight to an integer, which can't overflow within 255 additions.
    """
    padding = (-low.shape[2]) % 8
    low = torch.nn.functional.pad(low, (0, padding), value=1).contiguous()  # 1 ≤ 0 fails: padding is never counted
    high = torch.nn.functional.pad(high, (0, padding)).contiguous()
    slots, size, rows = low.shape
    step = max(1, (2**19 if low.device.type == "cpu" else 2**28) // (size * rows))
    counts = torch.zeros(high.shape[1], size, dtype=torch.int32, device=low.device)
    passes = torch.empty(min(step, high.shape[1]), size, rows, dtype=torch.bool, device=low.device)
    slot_passes = torch.empty_like(passes)
    for first in range(0, high.shape[1], step):
        here = high[:, first : first + step].unsqueeze(2)
        number = here.shape[1]
        torch.le(low[0], here[0], out=passes[:number])
        for slot in range(1, slots):
            torch.le(low[slot], here[slot], out=slot_passes[:number])
            passes[:number] &= slot_passes[:number]
        eights = passes[:number].view(torch.int64)
        for start in range(0, eights.shape[2], 255):
            lanes = eights[..., start : start + 255].sum(-1)
            pairs = (lanes & 0x00FF00FF00FF00FF) + (lanes >> 8 & 0x00FF00FF00FF00FF)
            counts[first : first + number] += (pairs + (pairs >> 16) + (pairs >> 32) + (pairs >> 48) & 0xFFFF).int()
    return counts


def _subset_products(factors: Tensor) -> Tensor:
    """Products of all subsets along the first dimension: [n, ...] -> [2^n, ...], subset s at place s."""
    products = factors.new_ones(2 ** len(factors), *factors.shape[1:])
    for position, factor in enumerate(factors):
        torch.mul(products[: 2**position], factor, out=products[2**position : 2 ** (position + 1)])
    return products


def _sum_of_logs(values: Tensor, largest_log: float) -> Tensor:
    """Σ log along the first dimension: values are multiplied while their product fits, then one log serves many."""
    room = 600.0
    while len(values) > 1 and largest_log * 2 <= room:
        half = len(values) // 2
        folded = values[:half] * values[half : 2 * half]
        if len(values) % 2:
            folded = torch.cat([folded, values[-1:]])
        values, largest_log = folded, 2 * largest_log
    return values.log_().sum(0)


def _plain_log_likelihoods(problem: Problem) -> Tensor:
    """The same, subset by subset, whatever the size of the logits."""
    logits, models = problem.logits.double(), problem.models
    counts = problem.counts.to(problem.device)
    chunk = max(1, 2**23 // logits[0].numel())
    scores = []
    for subsets in torch.split(torch.arange(2**models, device=problem.device), chunk):
        shares = (subsets.unsqueeze(1) >> torch.arange(models, device=problem.device) & 1) * counts
        mean = shares.double() @ logits.flatten(1) / shares.sum(1, keepdim=True).clamp(min=1)
        scores.append(log_likelihood(mean.view(-1, *logits.shape[1:]), problem.labels))
    return torch.cat(scores)
