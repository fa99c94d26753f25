"""Reads the table of the slots from the nodes of a Redis Cluster, again and again until one of them replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from resp_server.backends.redis.slot_table import SlotTable
from resp_server.backends.redis.url import UpstreamAddress
from resp_server.raw_replies.answers import ask, in_background
from resp_server.raw_replies.raw_reply import as_bytes
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, ReplySink
from resp_server.raw_replies.reply_splitter import pack

CLUSTER_SLOTS = pack((b"CLUSTER", b"SLOTS"))
# The pause before the table is read again (guess: a failover takes seconds), and the time for a node to reply.
REFRESH_PAUSE_S = 0.1
REFRESH_S_MAX = 1.0
# The time between two reads of the table once replies are cached (guess: to parse a reply takes about a millisecond).
POLL_S = 5.0


class SlotTableReader:
    """Reads the table at the start, and when it may have changed. Runs on the event loop's thread.

    Args:
        nodes: Returns the addresses of the nodes to ask, in order.
        send: Sends a request to a node; takes the address, the packed request, the reply's sink and its index.

    Attributes:
        error: Why there is no table yet; empty: there is one.
    """

    def __init__(
        self,
        nodes: Callable[[], Sequence[UpstreamAddress]],
        send: Callable[[UpstreamAddress, bytes, ReplySink, int], None],
        take: Callable[[SlotTable], None],
    ) -> None:
        self._nodes, self._send, self._take = nodes, send, take
        self.error = "its topology is not known yet"
        self._attempts = 0  # since the last table
        self._refresh: asyncio.TimerHandle | None = None
        self._polling: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Read the table."""
        self._loop = asyncio.get_running_loop()
        self._read()

    def stop(self) -> None:
        """Read no table any more."""
        self._attempts += 1  # the request in flight fails, and is not sent again
        for timer in (self._refresh, self._polling):
            if timer is not None:
                timer.cancel()

    def read_soon(self) -> None:
        """Read the table after a pause, if it is not about to be read."""
        if self._refresh is None:
            self._read_in(REFRESH_PAUSE_S)

    def poll(self) -> None:
        """Read the table every few seconds from now on."""
        if self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self.read_soon()
        self._polling = self._loop.call_later(POLL_S, self._poll)

    def _read_in(self, pause_s: float) -> None:
        """Read the table after a pause, and not at the time that was set before."""
        if self._refresh is not None:
            self._refresh.cancel()
        self._refresh = self._loop.call_later(pause_s, self._read)

    def _read(self) -> None:
        """Request the table from the next node; from another one if that does not reply in time."""
        candidates = self._nodes()
        address = candidates[self._attempts % len(candidates)]
        self._attempts += 1
        self._read_in(REFRESH_S_MAX)
        in_background(self._read_from(address, self._attempts))

    async def _read_from(self, address: UpstreamAddress, number: int) -> None:
        """Take the table of a node, unless a later request was sent; without one, request it again after a pause."""
        table, reason = None, "no node has slots"
        try:
            answer = await ask(partial(self._send, address, CLUSTER_SLOTS))
            table = SlotTable.parse(as_bytes(answer.reply), address)
        except MALFORMED_REPLY_ERRORS as error:
            reason = f"the reply of {address} to CLUSTER SLOTS is not understood: {error}"
        except Exception as error:
            reason = str(error)
        if number != self._attempts:
            return
        if table is None or not table.masters:
            self.error = self.error and reason
            self._read_in(REFRESH_PAUSE_S)
            return
        if self._refresh is not None:
            self._refresh.cancel()
        self._refresh, self._attempts = None, 0  # the next request goes to the first master
        self.error = ""
        self._take(table)
