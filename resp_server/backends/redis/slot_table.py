"""The slots of each node of a Redis Cluster, from replies to CLUSTER SLOTS and from MOVED errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import hiredis

from resp_server.backends.redis.url import UpstreamAddress
from state_backend.model.slots import SLOTS

# Masters with a number, as `CONNECTIONS_MAX` in `servers/native/forwarder.pxd` allows. Requests for others take the
# general path.
NUMBERED_MAX = 255


class Redirect(NamedTuple):
    """A MOVED or an ASK.

    Args:
        is_ask: For this request only.
    """

    slot: int
    address: UpstreamAddress
    is_ask: bool


class SlotTable:
    """The master of each slot.

    Attributes:
        masters: The masters in the order of their first slots, as a scan walks them.
        joined: Other nodes that have keys, by a later MOVED or ASK; the next table has them as masters, or not.
        numbers: For each slot the number of its master, for the compiled forwarder; 0: it has none.
    """

    def __init__(self, owners: Sequence[UpstreamAddress | None]) -> None:
        self._owners = list(owners)
        self.masters: Sequence[UpstreamAddress] = list(dict.fromkeys(owner for owner in owners if owner is not None))
        self.joined: list[UpstreamAddress] = []
        self._numbered: list[UpstreamAddress | None] = [None, *self.masters[:NUMBERED_MAX]]
        number_of: dict[UpstreamAddress | None, int] = {each: index for index, each in enumerate(self._numbered)}
        self.numbers = bytes([number_of.get(owner, 0) for owner in owners])

    @classmethod
    def parse(cls, reply: bytes, node: UpstreamAddress) -> SlotTable:
        """Return the table in a reply to CLUSTER SLOTS; ValueError, TypeError or LookupError for anything else.

        Args:
            node: The one that replied. A node that does not know its own address leaves its host empty.
        """
        reader = hiredis.Reader(encoding="utf-8", errors="surrogateescape")
        reader.feed(reply)
        rows = reader.gets()
        if not isinstance(rows, list):
            raise ValueError(str(rows)[:200])
        owners: list[UpstreamAddress | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in rows:
            if not 0 <= first <= last < SLOTS:
                raise ValueError(f"slots {first} to {last}")
            owners[first : last + 1] = [UpstreamAddress(host or node.host, port)] * (last + 1 - first)
        return cls(owners)

    def master_of(self, slot: int) -> UpstreamAddress | None:
        """Return the master of a slot; None if no node has it."""
        return self._owners[slot]

    def has_owners_of(self, other: SlotTable) -> bool:
        """Return whether all slots have the masters that they have in another table."""
        return self._owners == other._owners

    def move(self, slot: int, address: UpstreamAddress) -> None:
        """Change the master of a slot, as a MOVED says. A new master has no place in a scan before the next table."""
        self._owners[slot] = address
        self.join(address)
        if address not in self._numbered and len(self._numbered) <= NUMBERED_MAX:
            self._numbered.append(address)
        number = self._numbered.index(address) if address in self._numbered else 0
        self.numbers = self.numbers[:slot] + bytes([number]) + self.numbers[slot + 1 :]

    def join(self, address: UpstreamAddress) -> None:
        """Take note of a node that has keys."""
        if address not in self.masters and address not in self.joined:
            self.joined.append(address)

    def numbered(self, number: int) -> UpstreamAddress | None:
        """Return the master with a number of `numbers`."""
        return self._numbered[number]


def redirect_in(reply: bytes, node: UpstreamAddress) -> Redirect | None:
    """Return the redirect that an error reply of a node is; None: it is another reply."""
    if not reply.startswith((b"-MOVED ", b"-ASK ")):
        return None
    words = reply[:-2].decode("utf-8", "replace").split(" ")
    host, _, port = words[-1].rpartition(":")
    if len(words) != 3 or not (words[1].isdigit() and port.isdigit()) or int(words[1]) >= SLOTS:
        return None
    return Redirect(int(words[1]), UpstreamAddress(host or node.host, int(port)), words[0] == "-ASK")
