"""What can go wrong, as types. Every message is one line that says what was given and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class FedSieveError(Exception):
    """Base of every error FedSieve raises on purpose."""


class InvalidSetting(FedSieveError, ValueError):
    """A setting, file or array that can't be used: names the field, the value and what is allowed.

    >>> str(InvalidSetting("ratio", 1.5, "a number above 0 and up to 1"))
    'ratio: 1.5 is not allowed; use a number above 0 and up to 1'
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}: {_shown(value)} is not allowed; use {allowed}")

    def __reduce__(self) -> tuple[type[InvalidSetting], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


class RunInUse(InvalidSetting):
    """A run's folder that another process, or another run of this one, is writing to."""


class MissingData(FedSieveError, FileNotFoundError):
    """A data set, run or file that was asked for is not there."""


class TooFewUpdates(FedSieveError, RuntimeError):
    """Fewer usable client models came back than the run or its filter needs; the run's state is that of the last round.

    `excluded` says of each client without one why.
    """

    def __init__(self, message: str, excluded: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.excluded = dict(excluded or {})


class TooManyModels(FedSieveError, ValueError):
    """More candidate models than the filter's search can take."""


class ClusterLost(FedSieveError, RuntimeError):
    """Nobody is left on the cluster to train clients; what was done is on disk."""


class FetchFailed(FedSieveError, RuntimeError):
    """No source of a data set gave the expected arrays."""


def unknown_name(field: str, value: object, known: Iterable[str]) -> InvalidSetting:
    """The error for a name that is none of `known`, with the nearest valid name first."""
    names = sorted(known)
    given = str(value).lower()
    longer = [name for name in names if given and name.startswith(given)]
    nearest = longer or difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"{nearest[0]!r} (nearest), or one of: " if nearest else "one of: "
    return InvalidSetting(field, value, hint + ", ".join(names))


def _shown(value: object) -> str:
    """At most 80 characters of it: the start, and the end, where paths differ."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:38]}...{text[-39:]}"
