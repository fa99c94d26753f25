"""The connection of each slot, in the form that the compiled forwarder reads for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.min_epochs import MinEpochs, has_reached
from resp_server.backends.servers.server_connection import ServerConnection
from resp_server.backends.servers.slot_map import SlotMap
from resp_server.session.epochs import EMPTY_EPOCHS, Epochs, latest
from state_backend.model.slots import SLOTS

# The compiled forwarder numbers connections with one byte.
OPEN_CONNECTIONS_MAX = 254
CLOSED = bytes(4 * SLOTS)


class SlotConnections:
    """The open connection to the active server of each slot.

    Args:
        connection_of: Returns the connection to a master's shard, if there is one.
        opened_of: The same, and opens it if no request has done so.

    Attributes:
        numbers: The number of a key's connection, by the CRC of the key; 0: the request takes the general path.
        is_some_slot_behind: A server has not reached the minimum epochs of some of its slots.
    """

    def __init__(
        self,
        slots: SlotMap,
        min_epochs: MinEpochs,
        epochs: ClusterEpochs,
        connection_of: Callable[[str], ServerConnection | None],
        opened_of: Callable[[str], ServerConnection | None],
    ) -> None:
        self._slots, self._min_epochs, self._epochs = slots, min_epochs, epochs
        self._connection_of, self._opened_of = connection_of, opened_of
        self.numbers = CLOSED
        self.connections: list[ServerConnection | None] = [None]
        self.is_some_slot_behind = False
        self._is_valid = True
        self._by_master: dict[str, Epochs] = {}

    def open(self) -> None:
        """Open the connections that no request has opened, because the forwarder needs them."""
        for master in self._slots.counts:
            self._opened_of(master)

    def min_epochs_of(self, master: str) -> Epochs:
        """Return the joint minimum epochs of all slots of a master."""
        if not self._is_valid:
            self._build()
        return self._by_master.get(master, EMPTY_EPOCHS)

    def invalidate(self) -> None:
        """Clear the numbers. They are made again soon; requests that arrive before take the general path."""
        self.numbers = CLOSED
        if self._is_valid:
            self._is_valid = False
            asyncio.get_running_loop().call_soon(self._build)

    def _build(self) -> None:
        if self._is_valid:
            return
        self._is_valid = True
        numbers, self.connections, self._by_master = bytearray(SLOTS), [None], {}
        self.is_some_slot_behind = False
        numbers_of_ranges: dict[tuple[str, int], int] = {}
        # Ranges of slots make this fast. Each change of a connection makes the numbers again, and no request is
        # answered during that time.
        for first, end in pairwise(sorted({0, *self._slots.ends, *self._min_epochs.ends})):
            master, min_epochs = self._slots.owners[first], self._min_epochs.by_slot[first]
            if master is None:
                continue
            number = numbers_of_ranges.get((master, id(min_epochs)))
            if number is None:
                number = self._number_of(self._connection_of(master), min_epochs)
                numbers_of_ranges[master, id(min_epochs)] = number
                self._by_master[master] = latest(self._by_master.get(master, EMPTY_EPOCHS), min_epochs)
            if number:
                numbers[first:end] = bytes([number]) * (end - first)
        self.numbers = bytes(numbers) * 4

    def _number_of(self, connection: ServerConnection | None, min_epochs: Epochs) -> int:
        """Return the number of a connection; 0: its server takes no requests with these minimum epochs."""
        if connection is None or not connection.is_ready:
            return 0
        if not has_reached(connection.epochs, min_epochs, self._epochs.removed_jobs):
            self.is_some_slot_behind = True
            return 0
        if connection not in self.connections:
            if len(self.connections) > OPEN_CONNECTIONS_MAX:
                return 0
            self.connections.append(connection)
        return self.connections.index(connection)
