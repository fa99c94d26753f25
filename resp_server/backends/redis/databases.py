"""The databases of one upstream: a pool of connections for each one that clients have selected.

Database 0 of clients is the one in the upstream's URL. Any other number is the upstream's own. A pool is made when a
client first selects its database; the upstream's reply says whether there is such a database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.upstream import Upstream
from resp_server.command.handler import check_32_bits, integer
from resp_server.protocol.errors import GenericError
from resp_server.raw_replies.answers import ask
from resp_server.raw_replies.reply_splitter import PING

# Each has a few shared connections, as long as the proxy runs (guess: four times Redis' default).
DATABASES_MAX = 64
OUT_OF_RANGE = "DB index is out of range"


class Databases:
    """The pools of an upstream, by the numbers that clients select. Runs on the event loop's thread."""

    def __init__(self, upstream: Upstream) -> None:
        self._first = upstream
        self._others: dict[int, Upstream] = {}

    @property
    def pools(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes, for all databases."""
        return [pool for each in self for pool in each.pools] if self._others else self._first.pools

    def __iter__(self) -> Iterator[Upstream]:
        yield self._first
        yield from list(self._others.values())

    def number_of(self, word: bytes) -> int:
        """Return the number of a database as SELECT has it; GenericError."""
        number = integer(word)
        check_32_bits(number)
        if number < 0:
            raise GenericError(OUT_OF_RANGE)
        return 0 if number == self._first.url.database else number

    def upstream_number_of(self, number: int) -> int:
        """Return the number that a database of clients has at the upstream."""
        return number or self._first.url.database

    def is_open(self, number: int) -> bool:
        """Return whether a database is known to exist."""
        return number == 0 or (number in self._others and not self._others[number].is_down)

    def of(self, number: int) -> Upstream:
        """Return the connections to a database; GenericError if there are too many."""
        if number == 0:
            return self._first
        upstream = self._others.get(number)
        if upstream is None:
            if len(self._others) >= DATABASES_MAX:
                raise GenericError(f"clients use {DATABASES_MAX} databases of the upstream already, which is the limit")
            upstream = self._others[number] = self._first.for_database(number)
            upstream.start()
        return upstream

    async def open(self, number: int) -> None:
        """Wait until it is known that the upstream has a database; ReplyError if it has not."""
        upstream = self.of(number)
        try:
            await ask(partial(upstream.send_to_node, 0, 0, 2, PING))
        except Exception as error:
            self.forget_unused(number)
            if OUT_OF_RANGE in str(error):
                raise GenericError(OUT_OF_RANGE) from error
            raise

    def forget_unused(self, number: int) -> None:
        """Forget a database without connections."""
        upstream = self._others.get(number)
        if upstream is not None and upstream.is_unused:
            del self._others[number]
            upstream.stop()

    def info_fields(self) -> dict[str, object]:
        """Return the fields of INFO."""
        return {
            **self._first.info_fields(),
            "upstream_database": self._first.url.database,
            "upstream_databases": 1 + len(self._others),
        }

    def stop(self) -> None:
        """Close all connections."""
        for upstream in self:
            upstream.stop()
