"""Who is there: arms follow the client, not the connection.

A node is known by the number Flower gave its connection until it says which client it is. The same client on another
node, after a restart, is the same arm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.common.logger import log

NAMED = 2**62
"""Arms of clients whose id is no number begin here."""


class Roster:
    """Nodes, the clients they claim to be, and which node of several has a claim."""

    def __init__(self) -> None:
        self.claims: dict[int, str] = {}
        self.holders: dict[str, int] = {}
        self._present: frozenset[int] = frozenset()
        self._refused: set[tuple[int, str]] = set()

    def unknown(self, nodes: Iterable[int]) -> list[int]:
        """The nodes that have not said who they are."""
        return sorted(set(nodes).difference(self.claims))

    def hear(self, node: int, client: str) -> str | None:
        """A node says which client it is; a reason if it is refused, because another node that is there is this one."""
        self.claims[node] = client
        return self._settle(node)

    def meet(self, nodes: Iterable[int]) -> dict[int, int]:
        """The nodes that are there now: by arm, the node of each client."""
        self._present = frozenset(nodes)
        return {self.arm(node): node for node in sorted(self._present) if self._settle(node) is None}

    def arm(self, node: int) -> int:
        """The arm of the client on a node."""
        return arm_of(self.claims.get(node, f"node {node}"))

    def name(self, node: int) -> str:
        """How to call the client on a node."""
        return self.claims.get(node, f"node {node}")

    def state_dict(self) -> dict[str, Any]:
        """Claims and who holds them."""
        return {"claims": {str(node): client for node, client in self.claims.items()}, "holders": dict(self.holders)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.claims = {int(node): client for node, client in state["claims"].items()}
        self.holders = dict(state["holders"])

    def _settle(self, node: int) -> str | None:
        client = self.claims.get(node)
        if client is None:
            return None
        holder = self.holders.get(client)
        if holder is not None and holder != node and holder in self._present:
            if (node, client) not in self._refused:
                self._refused.add((node, client))
                log(WARNING, "node %d is refused: it claims to be client %s, which is node %d", node, client, holder)
            return f"claims to be client {client}, which is node {holder}"
        self.holders[client] = node
        return None


def arm_of(client: str) -> int:
    """A client's arm: its id where that is a number, else a number made of its name."""
    if client.isascii() and client.isdigit() and int(client) < NAMED:
        return int(client)
    return NAMED + int.from_bytes(hashlib.blake2b(client.encode(), digest_size=8).digest(), "little") % NAMED
