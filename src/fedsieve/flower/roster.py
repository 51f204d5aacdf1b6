"""Who is there: arms follow the client, not the connection.

A node is known by the number Flower gave its connection until it says which client it is. The same client on another
node, after a restart, is the same arm.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.common.logger import log

NAMED = 2**62
"""Arms of clients whose id is no number begin here."""

NUMBER = re.compile("0|[1-9][0-9]{,18}")
UNNAMED = "node "
"""How names begin that nodes have which don't say who they are."""


class Roster:
    """Nodes, the clients they claim to be, and which node of several has the client's arm."""

    def __init__(self) -> None:
        self.claims: dict[int, str] = {}
        self.holders: dict[int, int] = {}
        self._present: frozenset[int] = frozenset()
        self._refused: set[tuple[int, str]] = set()

    def unknown(self, nodes: Iterable[int]) -> list[int]:
        """The nodes that have not said who they are."""
        return sorted(set(nodes).difference(self.claims))

    def hear(self, node: int, client: str) -> str | None:
        """A node says which client it is; a reason if it is refused, because another node is this one."""
        self.claims[node] = client
        return self._settle(node)

    def meet(self, nodes: Iterable[int]) -> dict[int, int]:
        """The nodes that are there now: by arm, the node of each client."""
        self._present = frozenset(nodes)
        return {self.arm(node): node for node in sorted(self._present) if self._settle(node) is None}

    def arm(self, node: int) -> int:
        """The arm of the client on a node."""
        return arm_of(self.name(node))

    def name(self, node: int) -> str:
        """How to call the client on a node."""
        return self.claims.get(node, f"{UNNAMED}{node}")

    def state_dict(self) -> dict[str, Any]:
        """Claims and who holds them."""
        holders = {self.claims[node]: node for arm, node in self.holders.items() if self.arm(node) == arm}
        return {"claims": {str(node): client for node, client in self.claims.items()}, "holders": holders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.claims = {int(node): client for node, client in state["claims"].items()}
        self.holders = {arm_of(client): node for client, node in state["holders"].items()}

    def _settle(self, node: int) -> str | None:
        client = self.claims.get(node)
        if client is None:
            return None
        arm = arm_of(client)
        holder = self.holders.get(arm, node)
        if client.startswith(UNNAMED) and client != f"{UNNAMED}{node}":
            problem = f"claims to be client {client}, as only that node is called"
        elif holder != node and holder in self._present and self.arm(holder) == arm:
            problem = f"claims to be client {client}, which is node {holder}"
        else:
            self.holders[arm] = node
            return None
        if (node, client) not in self._refused:
            self._refused.add((node, client))
            log(WARNING, "node %d is refused: it %s", node, problem)
        return problem


def arm_of(client: str) -> int:
    """A client's arm: its id where that is a number, else a number made of its name."""
    if NUMBER.fullmatch(client) and int(client) < NAMED:
        return int(client)
    return NAMED + int.from_bytes(hashlib.blake2b(client.encode(), digest_size=8).digest(), "little") % NAMED
