"""MONITOR: every client's requests, as lines for the monitors.

Without monitors nothing here runs. With the first one, every connection leaves the fast path (`Session.is_observed`).
A line is sent once its request was answered, as in Redis. A monitor gets a request only if it may read all of its keys.
A monitor whose user may not read all keys gets only that user's requests without keys. Passwords are removed.

Other processes of the server relay their lines in batches, one batch at a time. Unsent lines are bounded; if there
are too many, the monitors that would miss lines are disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from resp_server.command.redaction import redacted
from resp_server.command.table import Command
from resp_server.limits import MONITOR_LINES_BYTES_MAX
from resp_server.metrics.slow_log import truncated
from resp_server.push.clients import Clients, OtherWorkers
from resp_server.session.session import Session
from state_backend.model.clock import Clock

RELAY_LINES, CUT_MONITORS, ANNOUNCE_MONITORS = "show requests", "cut monitors", "announce monitors"
HIDDEN_FLAGS = ("admin", "skip_monitor")

# The size of the lines that the other workers get together (guess).
BATCH_BYTES_MAX = 1 << 20

# Longer arguments and longer requests are shortened (guesses; Redis shortens none).
ARGUMENTS_MAX = 1024
ARGUMENT_BYTES_MAX = 16 << 10
LINE_BYTES_MAX = 64 << 10

ESCAPES = {code: f"\\x{code:02x}".encode() for code in range(256) if not 32 <= code < 127}
ESCAPES |= {ord(each): b"\\" + letter.encode() for each, letter in zip('"\\\n\r\t\a\b', '"\\nrtab', strict=True)}


class MonitorLine(NamedTuple):
    """A request's line, its keys, and its user. With too many keys, only monitors that may read all keys get it."""

    line: bytes
    keys: Sequence[bytes]
    user: bytes

    def to_json(self) -> list[Any]:
        """Return the line as it is sent to another process."""
        return [self.line.decode("latin-1"), [key.decode("latin-1") for key in self.keys], self.user.decode("latin-1")]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> MonitorLine:
        """Parse the output of `to_json`."""
        line, keys, user = row
        return cls(line.encode("latin-1"), [key.encode("latin-1") for key in keys], user.encode("latin-1"))


class Monitors:
    """The monitors of this process, and the lines that wait to be sent.

    Args:
        on_change: Called after the first monitor was added or the last one removed.
        attempt: Calls a function; False if it raised, which is logged.
    """

    def __init__(
        self,
        clients: Clients,
        workers: Callable[[], OtherWorkers | None],
        clock: Clock,
        on_change: Callable[[], None],
        attempt: Callable[..., bool],
    ) -> None:
        self._clients = clients
        self._workers = workers
        self._clock = clock
        self._on_change = on_change
        self._attempt = attempt
        self._own: dict[int, Session] = {}
        self._has_remote = False
        self._lines: list[MonitorLine] = []
        self._is_scheduled = False
        self._waiting: list[MonitorLine] = []
        self._waiting_bytes = 0
        self._is_relaying = False

    def __bool__(self) -> bool:
        """Return whether there is a monitor, here or at another process."""
        return bool(self._own) or self._has_remote

    def __len__(self) -> int:
        return len(self._own)

    def add(self, session: Session) -> None:
        """Make a client a monitor of the requests from now on."""
        self._send()
        session.is_monitor = True
        self._own[session.id] = session
        self._on_change()

    def remove(self, session: Session) -> None:
        """End a client's MONITOR."""
        session.is_monitor = False
        if self._own.pop(session.id, None) is not None:
            self._on_change()

    def set_remote(self, has_remote: bool) -> None:
        """Record whether other processes have monitors."""
        if self._has_remote != has_remote:
            self._has_remote = has_remote
            self._on_change()

    def announce(self, then: Callable[[], None] = lambda: None) -> None:
        """Notify the other processes that this one has monitors; called again for each new process."""
        workers = self._workers()
        if self._own and workers is not None:
            workers.query(ANNOUNCE_MONITORS, None, lambda answers: then())

    def record(self, session: Session, command: Command, request: Sequence[bytes]) -> None:
        """Send an answered request to the monitors."""
        if not self or any(flag in command.facts.flags for flag in HIDDEN_FLAGS):
            return
        first = request[: ARGUMENTS_MAX + 3]
        keys = [first[index] for index, _ in command.keys_in(first)] if command.facts.key_specs else []
        argument_bytes_max = min(ARGUMENT_BYTES_MAX, LINE_BYTES_MAX // min(len(request), ARGUMENTS_MAX))
        arguments = truncated(redacted(command.policy.redaction, request), ARGUMENTS_MAX, argument_bytes_max)
        line = line_of(self._clock(), session.db, session.address, arguments)
        self._lines.append(MonitorLine(line, keys[: ARGUMENTS_MAX + 1], session.user.name))
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        lines, self._lines = self._lines, []
        self._is_scheduled = False
        if not lines:
            return
        self.take(lines)
        if self._has_remote:
            self._waiting += lines
            self._waiting_bytes += sum(len(each.line) for each in lines)
            if self._waiting_bytes > MONITOR_LINES_BYTES_MAX:
                self._drop_waiting()
                self._query(CUT_MONITORS, None)
            else:
                self._relay()

    def take(self, lines: Sequence[MonitorLine]) -> None:
        """Send lines to this process's monitors."""
        joined = b"".join([each.line for each in lines])
        for session in list(self._own.values()):
            if not self._attempt(self._send_to, session, lines, joined):
                self._clients.cut(session.id, "MONITOR lines could not be sent")

    def _send_to(self, session: Session, lines: Sequence[MonitorLine], joined: bytes) -> None:
        reads_all = session.user.reads_all_keys
        text = joined if reads_all else b"".join([each.line for each in lines if may_see(session, each)])
        if text:
            self._clients.push(session.id, text)

    def cut(self) -> None:
        """Cut this process's monitors, because lines were lost."""
        for session_id in list(self._own):
            self._clients.cut(session_id)

    # -- the other processes ------------------------------------------------------------------------------------------

    def _relay(self) -> None:
        if not self._waiting or self._is_relaying:
            return
        batch: list[list[Any]] = []
        size = 0
        while len(batch) < len(self._waiting) and size < BATCH_BYTES_MAX:
            size += len(self._waiting[len(batch)].line)
            batch.append(self._waiting[len(batch)].to_json())
        del self._waiting[: len(batch)]
        self._waiting_bytes -= size
        self._query(RELAY_LINES, batch)

    def _query(self, query_name: str, argument: Any) -> None:
        workers = self._workers()
        if workers is not None:
            self._is_relaying = True
            workers.query(query_name, argument, self._relayed)

    def _relayed(self, counts: Sequence[int]) -> None:
        self._is_relaying = False
        if any(counts):
            self._relay()
        else:
            self._drop_waiting()
            self.set_remote(False)

    def _drop_waiting(self) -> None:
        self._waiting, self._waiting_bytes = [], 0


def may_see(session: Session, line: MonitorLine) -> bool:
    """Return whether a monitor may see a request."""
    if len(line.keys) > ARGUMENTS_MAX:
        return session.user.reads_all_keys
    if line.keys:
        return all(map(session.user.can_read, line.keys))
    return session.user.reads_all_keys or session.user.name == line.user


def line_of(now_ms: int, db: int, address: str, arguments: Sequence[bytes]) -> bytes:
    """Return a request as a line of MONITOR."""
    seconds, milliseconds = divmod(now_ms, 1000)
    prefix = f"+{seconds}.{milliseconds:03}000 [{db} {address}]".encode("utf-8", "surrogateescape")
    return b" ".join([prefix, *map(quoted, arguments)]) + b"\r\n"


def quoted(argument: bytes) -> bytes:
    """Return an argument in quotes, escaped as Redis does; printable ASCII is not escaped."""
    argument = bytes(argument)
    if argument.isalnum() and argument.isascii():
        return b'"%b"' % argument
    return b'"%b"' % b"".join([ESCAPES.get(code) or bytes((code,)) for code in argument])
