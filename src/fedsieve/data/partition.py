"""Who holds which examples: splitting training data over clients, evenly or as unevenly as asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedsieve.data.dataset import check_labels
from fedsieve.errors import InvalidSetting, unknown_name
from fedsieve.randomness import generator

SCHEMES: Final = ("iid", "client", "class", "shards")


@dataclass(frozen=True, eq=False)
class Partition:
    """Which examples each client holds: client k has `indices[offsets[k]:offsets[k + 1]]`, in rising order.

    `indices` `[examples held]` and `unused` `[examples given to nobody]` point into the labels that were
    partitioned; `offsets` is `[clients + 1]`.
    """

    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    unused: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[client] for client in range(len(self)))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Examples per client `[clients]`."""
        return np.diff(self.offsets)

    def class_counts(self, labels: NDArray[np.integer[Any]], classes: int) -> NDArray[np.int64]:
        """Examples per client and class `[clients, classes]`, for the `labels` that were partitioned."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        cells = owner * classes + labels[self.indices].astype(np.int64)
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes)


def partition(
    labels: NDArray[np.integer[Any]],
    clients: int,
    scheme: str,
    *,
    alpha: float = 1.0,
    shards_per_client: int = 2,
    seed: int,
    candidates: NDArray[np.integer[Any]] | None = None,
) -> Partition:
    """Gives the examples with `labels` `[n]`, or those listed in `candidates`, to `clients` clients.

    - `iid`: at random; sizes differ by one at most.
    - `client`: class c is split over the clients by p_c ~ Dir_K(alpha), so sizes differ, and with a small
      alpha a client may get nothing.
    - `class`: client k draws from the classes by q_k ~ Dir(alpha). All clients get n // clients examples; the
      remainder is `unused`. One client after the other draws without replacement; draws from a class that has
      run out go to the classes that are left, in proportion to q_k.
    - `shards`: examples sorted by label are cut into clients × `shards_per_client` shards, whose sizes differ
      by one at most, and each client gets its number of them at random.

    The same seed gives the same partition, in whatever order the candidates are listed.
    """
    if scheme not in SCHEMES:
        raise unknown_name("heterogeneity", scheme, SCHEMES)
    if not (math.isfinite(alpha) and alpha > 0):
        raise InvalidSetting("alpha", alpha, "a finite number above 0")
    examples = _usable(labels, candidates)
    if clients < 1 or clients > len(examples):
        raise InvalidSetting("clients", clients, f"1 to {len(examples)}, the number of examples to hand out")

    draws = generator(seed, "partition")
    held = _compact(labels[examples])
    match scheme:
        case "iid":
            owner = _iid(len(examples), clients, draws)
        case "client":
            owner = _by_client(held, clients, alpha, draws)
        case "class":
            owner = _by_class(held, clients, alpha, draws)
        case _:
            owner = _shards(held, clients, shards_per_client, draws)
    return _gather(examples, owner, clients)


def validation_split(
    labels: NDArray[np.integer[Any]], per_class: int, classes: int, seed: int, imbalance: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Takes `per_class` examples of each class at random: their indices, and all others, in rising order.

    With an `imbalance` there are as many in all, but from class to class, in an order drawn from the seed, they get
    fewer by the same factor; the most frequent class has `imbalance` times as many as the rarest, up to rounding.
    """
    check_labels("labels", labels, classes)
    labels = _compact(labels)
    counts = np.bincount(labels, minlength=classes)
    scarcest = int(counts.argmin())
    if not 0 <= per_class <= counts[scarcest]:
        allowed = f"0 to {counts[scarcest]}, the number of training examples of class {scarcest}"
        raise InvalidSetting("validation_per_class", per_class, allowed)
    ranks = generator(seed, "validation classes").permutation(classes)
    wanted = _falling(per_class * classes, classes, imbalance)[ranks]
    _check_imbalance(imbalance, wanted, counts)
    order, starts = _shuffled_by_class(labels, generator(seed, "validation"))
    chosen = np.zeros(len(labels), dtype=bool)
    for start, count in zip(starts[:-1], wanted, strict=False):  # the last classes may have no example
        chosen[order[start : start + count]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def even_out(labels: NDArray[np.integer[Any]], seed: int) -> NDArray[np.int64]:
    """Positions `[m]` in `labels` `[n]` at which every class that is there comes up as often as the most frequent one.

    Examples of a rarer class are repeated: all of them equally often, but for some, drawn from the seed, once more.
    """
    labels = np.asarray(labels)
    check_labels("labels", labels)
    present, counts = np.unique(labels, return_counts=True)
    draws, most, positions = generator(seed, "validation evened"), int(counts.max()), []
    for label in present:
        own = np.flatnonzero(labels == label)
        times, left = divmod(most, len(own))
        positions += [np.repeat(own, times), draws.choice(own, left, replace=False)]
    return np.sort(np.concatenate(positions))


def mislabel(
    labels: NDArray[np.integer[Any]], places: NDArray[np.int64], share: float, classes: int, seed: int
) -> NDArray[np.integer[Any]]:
    """A copy of `labels` `[n]` in which a share of those at `places` is wrong: each some other class, all as likely."""
    if not 0 <= share <= 1 or classes < 2:
        raise InvalidSetting("validation_errors", share, "0 to 1, and 0 where there is one class alone")
    draws = generator(seed, "validation errors")
    chosen = draws.permutation(places)[: math.floor(share * len(places) + 0.5)]
    wrong = np.array(labels)
    wrong[chosen] = (wrong[chosen].astype(np.int64) + draws.integers(1, classes, len(chosen))) % classes
    return wrong


# Each scheme below answers with the owner of every example [n], -1 for nobody: no example can be held twice.


def _iid(examples: int, clients: int, draws: np.random.Generator) -> NDArray[np.int64]:
    owner = np.empty(examples, dtype=np.int64)
    owner[draws.permutation(examples)] = _even_parts(examples, clients)
    return owner


def _shards(
    labels: NDArray[np.integer[Any]], clients: int, shards_per_client: int, draws: np.random.Generator
) -> NDArray[np.int64]:
    most = len(labels) // clients
    if not 1 <= shards_per_client <= most:
        raise InvalidSetting("shards_per_client", shards_per_client, f"1 to {most}, one client's examples")
    owner_of_shard = draws.permutation(np.repeat(np.arange(clients), shards_per_client))
    owner = np.empty(len(labels), dtype=np.int64)
    owner[np.argsort(labels, kind="stable")] = owner_of_shard[_even_parts(len(labels), len(owner_of_shard))]
    return owner


def _by_client(
    labels: NDArray[np.integer[Any]], clients: int, alpha: float, draws: np.random.Generator
) -> NDArray[np.int64]:
    order, starts = _shuffled_by_class(labels, draws)
    owner = np.empty(len(labels), dtype=np.int64)
    for start, stop in pairwise(starts):
        upto = np.cumsum(_softmax(_log_dirichlet(alpha, (clients,), draws)))
        # Evenly spaced points, shifted at random: client k gets n·p_k on average, and less than one off.
        points = (np.arange(stop - start) + draws.random()) / max(1, stop - start)
        owner[order[start:stop]] = np.searchsorted(upto[:-1], points, side="right")
    return owner


def _by_class(
    labels: NDArray[np.integer[Any]], clients: int, alpha: float, draws: np.random.Generator
) -> NDArray[np.int64]:
    order, starts = _shuffled_by_class(labels, draws)
    remaining = np.diff(starts)
    size = len(labels) // clients
    counts = np.zeros((clients, len(remaining)), dtype=np.int64)
    block = 512  # clients at a time, to draw many at once and repeat few when a class runs out
    for first in range(0, clients, block):
        here = counts[first : first + block]
        log_q = _log_dirichlet(alpha, here.shape, draws)
        _draw_classes(log_q, size, remaining, here, draws)
    owner = np.full(len(labels), -1, dtype=np.int64)
    for start, held in zip(starts[:-1], counts.T, strict=True):
        owner[order[start : start + held.sum()]] = np.repeat(np.arange(clients), held)
    return owner


def _draw_classes(
    log_q: NDArray[np.float64],
    size: int,
    remaining: NDArray[np.int64],
    counts: NDArray[np.int64],
    draws: np.random.Generator,
) -> None:
    """Client after client takes `size` examples: `counts` `[clients, classes]`, out of `remaining` `[classes]`.

    Draws go by q over the classes that are left, for all clients at once. They hold up to the first client
    that wants more of a class than is there: it takes what there is and draws again for what is missing. The
    clients after it then start anew, without that class.
    """
    client = 0
    missing = np.full(len(log_q), size)
    while client < len(log_q):
        left = np.flatnonzero(remaining)
        wanted = draws.multinomial(missing[client:], _softmax(log_q[client:, left]))
        too_much = (np.cumsum(wanted, axis=0) > remaining[left]).any(axis=1)
        served = int(too_much.argmax()) if too_much.any() else len(wanted)
        counts[client : client + served, left] += wanted[:served]
        remaining[left] -= wanted[:served].sum(axis=0)
        client += served
        if client < len(log_q):
            taken = np.minimum(wanted[served], remaining[left])
            counts[client, left] += taken
            remaining[left] -= taken
            missing[client] -= taken.sum()


def _log_dirichlet(alpha: float, shape: tuple[int, ...], draws: np.random.Generator) -> NDArray[np.float64]:
    """Draws from Dir(alpha) along the last axis, as logarithms short of a constant.

    A gamma variable of shape a is one of shape a + 1 times U^(1/a). In logarithms nothing is lost to
    underflow when alpha is small, and q can be restricted to any of its classes. Beyond the limits set here,
    a draw is one class alone, or all classes alike, as far as any number of examples can tell.
    """
    alpha = min(max(alpha, 1e-12), 1e12)
    log_gamma: NDArray[np.float64] = np.log(draws.standard_gamma(alpha + 1, shape))
    log_gamma -= draws.standard_exponential(shape) / alpha
    return log_gamma


def _softmax(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.exp(logarithms - logarithms.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def _falling(total: int, classes: int, imbalance: float) -> NDArray[np.int64]:
    """Counts [classes] that fall by the same factor from one to the next, the first `imbalance` times the last.

    What rounding down leaves of the `total` goes to those that lost most by it.
    """
    if not (math.isfinite(imbalance) and imbalance >= 1):
        raise InvalidSetting("validation_imbalance", imbalance, "a finite number of at least 1")
    shares = imbalance ** -np.linspace(0, 1, classes)
    exact = total * shares / shares.sum()
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def _check_imbalance(imbalance: float, wanted: NDArray[np.int64], there: NDArray[np.int64]) -> None:
    """Raise unless every class has as many examples as are wanted, and at least one is where any is."""
    if wanted.any() and not wanted.all():
        allowed = "a smaller one, or more validation_per_class: the rarest class would have no example"
        raise InvalidSetting("validation_imbalance", imbalance, allowed)
    lacking = int(np.argmax(wanted - there))
    if wanted[lacking] > there[lacking]:
        allowed = f"a smaller one: of class {lacking} it takes {wanted[lacking]} of {there[lacking]} training examples"
        raise InvalidSetting("validation_imbalance", imbalance, allowed)


def _even_parts(examples: int, parts: int) -> NDArray[np.int64]:
    """The part of each of `examples` in a row cut into `parts` whose lengths differ by one at most."""
    return np.arange(examples, dtype=np.int64) * parts // examples


def _shuffled_by_class(
    labels: NDArray[np.integer[Any]], draws: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Examples `[n]` class by class, at random within each, and where the classes start `[classes + 1]`."""
    order = draws.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return order, np.concatenate(([0], np.cumsum(np.bincount(labels))))


def _compact(labels: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """The same labels in the smallest type, for which NumPy sorts in linear time."""
    return labels.astype(np.min_scalar_type(int(labels.max())))


def _usable(labels: NDArray[np.integer[Any]], candidates: NDArray[np.integer[Any]] | None) -> NDArray[np.int64]:
    """The examples that may be handed out, in rising order."""
    check_labels("labels", labels)
    if candidates is None:
        return np.arange(len(labels))
    allowed = f"indices [n] of the {len(labels)} examples, each at most once"
    if candidates.ndim != 1 or candidates.dtype.kind not in "iu" or len(candidates) == 0:
        raise InvalidSetting("candidates", f"{candidates.dtype} {list(candidates.shape)}", allowed)
    if candidates.min() < 0 or candidates.max() >= len(labels):
        outside = candidates.min() if candidates.min() < 0 else candidates.max()
        raise InvalidSetting("candidates", int(outside), allowed)
    usable = np.zeros(len(labels), dtype=bool)
    usable[candidates] = True
    examples = np.flatnonzero(usable)
    if len(examples) < len(candidates):
        raise InvalidSetting("candidates", f"{len(candidates) - len(examples)} repeated", allowed)
    return examples


def _gather(examples: NDArray[np.int64], owner: NDArray[np.int64], clients: int) -> Partition:
    """From the owner of each example [n] to the examples of each owner."""
    order = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner + 1, minlength=clients + 1)
    unused, held = np.split(examples[order], [sizes[0]])
    return Partition(held, np.concatenate(([0], np.cumsum(sizes[1:]))), unused)
