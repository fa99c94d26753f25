"""Which lines of the upstream's MONITOR are about requests of proxies themselves, which no client has sent. Pure.

    +1339518083.107412 [0 127.0.0.1:60866] "CLIENT" "SETNAME" "sparkis-proxy"

A proxy greets the upstream over each new connection. From its name to PING, all requests over that connection are the
greeting's. Clients' PING, HELLO, CLIENT and SELECT are never sent to the upstream, but within a transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from resp_server.backends.redis.url import CLIENT_NAME

LINE = re.compile(rb'\+\d+\.\d+ \[\d+ (\S+:\d+)\] "([^"]*)"(.*)\r\n\Z', re.DOTALL)
OWN_COMMANDS = frozenset([b"CLIENT", b"HELLO", b"PING", b"SELECT"])
NAMED = b' "SETNAME" "%b"' % CLIENT_NAME


class MonitorLines:
    """Follows the greetings and transactions at each address.

    Args:
        is_own: Tells whether this proxy is connected from it.
    """

    def __init__(self, is_own: Callable[[bytes], bool]) -> None:
        self._is_own = is_own
        self._greeting: set[bytes] = set()
        self._in_transaction: set[bytes] = set()

    def hides(self, line: bytes) -> bool:
        """Return whether a line is about a request that no client has sent."""
        found = LINE.match(line)
        if found is None:
            return False
        address, name, rest = found[1], found[2].upper(), found[3]
        if name == b"CLIENT" and rest == NAMED:
            self._greeting.add(address)
            return True
        if address in self._greeting:
            if name == b"PING":
                self._greeting.discard(address)
            return True
        if not self._is_own(address):
            return False
        if name == b"MULTI":
            self._in_transaction.add(address)
        elif name in (b"EXEC", b"DISCARD"):
            self._in_transaction.discard(address)
        return name in OWN_COMMANDS and address not in self._in_transaction
