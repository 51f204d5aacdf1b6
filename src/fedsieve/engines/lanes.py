"""Many clients at once on a GPU."""

from __future__ import annotations

from fedsieve.engines.sequential import SequentialEngine


class LanesEngine(SequentialEngine):
    """Trains the clients of a round side by side."""
