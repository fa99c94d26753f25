"""MONITOR: the requests of all clients, as lines for those who want to see them.

Where nobody does, nothing of this is reached: with the first one every connection leaves the short way
(`Session.is_observed`). A line is shown once its request was answered, as in Redis, and to whom may read all of its
keys; to who may not read all keys, of requests without keys their own user's alone. Passwords are not shown.

Other processes of the server pass their lines on in portions, one on its way at a time. What waits for longer than
they take is bounded: then those who would have missed lines are cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from resp_server.command_table.table import Command
from resp_server.metrics.slow_log import redacted, shortened
from resp_server.push.clients import Clients, PeerProcesses
from resp_server.session.session import Session
from state_backend.model.clock import Clock

SHOW, CUT, ANNOUNCE = "show requests", "cut monitors", "announce monitors"
NOT_SHOWN = ("admin", "skip_monitor")

# A portion of lines for the other processes, and what may wait while one is on its way (guesses).
PORTION_BYTES_MAX = 1 << 20
WAITING_BYTES_MAX = 8 << 20

# Of longer words, and of more of them, a part is shown (guesses; Redis shows all).
WORDS_MAX = 1024
WORD_BYTES_MAX = 16 << 10
LINE_BYTES_MAX = 64 << 10

ESCAPES = {code: f"\\x{code:02x}".encode() for code in range(256) if not 32 <= code < 127}
ESCAPES |= {ord(each): b"\\" + letter.encode() for each, letter in zip('"\\\n\r\t\a\b', '"\\nrtab', strict=True)}


class Shown(NamedTuple):
    """A request as it is shown, its keys, and whose it is. Who may not read all keys sees none with too many."""

    line: bytes
    keys: Sequence[bytes]
    user: bytes

    def to_json(self) -> list[Any]:
        """Return it as another process is told it."""
        return [self.line.decode("latin-1"), [key.decode("latin-1") for key in self.keys], self.user.decode("latin-1")]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Shown:
        """Return what `to_json` made."""
        line, keys, user = told
        return cls(line.encode("latin-1"), [key.encode("latin-1") for key in keys], user.encode("latin-1"))


class MonitorHost(Protocol):
    """The process whose requests are shown."""

    clients: Clients
    peers: PeerProcesses | None

    @property
    def clock(self) -> Clock: ...

    def update_observation(self) -> None:
        """Apply that there are monitors now, or none any more, to all sessions."""

    def attempt(self, do: Callable[..., object], *arguments: object) -> bool:
        """Call a function; False if it raised, which is logged."""


class Monitors:
    """Who sees requests at this process, and what waits to be shown."""

    def __init__(self, host: MonitorHost) -> None:
        self._host = host
        self._own: dict[int, Session] = {}
        self._are_elsewhere = False
        self._lines: list[Shown] = []
        self._is_coming = False
        self._waiting: list[Shown] = []
        self._waiting_bytes = 0
        self._is_passing_on = False

    def __bool__(self) -> bool:
        """Tell whether anybody sees requests, here or at another process."""
        return bool(self._own) or self._are_elsewhere

    def __len__(self) -> int:
        return len(self._own)

    def add(self, session: Session) -> None:
        """Show requests to a client: those from now on."""
        self._send()
        session.is_monitor = True
        self._own[session.id] = session
        self._host.update_observation()

    def remove(self, session: Session) -> None:
        """Show a client nothing more."""
        session.is_monitor = False
        if self._own.pop(session.id, None) is not None:
            self._host.update_observation()

    def set_elsewhere(self, set_elsewhere: bool) -> None:
        """Learn whether other processes want to see requests."""
        if self._are_elsewhere != set_elsewhere:
            self._are_elsewhere = set_elsewhere
            self._host.update_observation()

    def announce(self, then: Callable[[], None] = lambda: None) -> None:
        """Tell the other processes that somebody here sees requests: also those that were started just now."""
        if self._own and self._host.peers is not None:
            self._host.peers.query(ANNOUNCE, None, lambda answers: then())

    def show(self, session: Session, command: Command, request: Sequence[bytes]) -> None:
        """Show a request that was answered."""
        if not self or any(flag in command.facts.flags for flag in NOT_SHOWN):
            return
        seen = request[: WORDS_MAX + 3]
        keys = [seen[at] for at, _ in command.keys_in(seen)] if command.facts.key_specs else []
        word_bytes_max = min(WORD_BYTES_MAX, LINE_BYTES_MAX // min(len(request), WORDS_MAX))
        words = shortened(redacted(command.name, request), WORDS_MAX, word_bytes_max)
        line = line_of(self._host.clock(), session.db, session.address, words)
        self._lines.append(Shown(line, keys[: WORDS_MAX + 1], session.user.name))
        if not self._is_coming:
            self._is_coming = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        lines, self._lines = self._lines, []
        self._is_coming = False
        self.take(lines)
        if self._are_elsewhere:
            self._waiting += lines
            self._waiting_bytes += sum(len(each.line) for each in lines)
            if self._waiting_bytes > WAITING_BYTES_MAX:
                self._forget_waiting()
                self._ask(CUT, None)
            else:
                self._pass_on()

    def take(self, lines: Sequence[Shown]) -> None:
        """Send lines to those here who may see them."""
        whole = b"".join([each.line for each in lines])
        for session in list(self._own.values()):
            if not self._host.attempt(self._send_to, session, lines, whole):
                self._host.clients.cut(session.id, "requests could not be shown")

    def _send_to(self, session: Session, lines: Sequence[Shown], whole: bytes) -> None:
        reads_all = session.user.reads_all_keys
        text = whole if reads_all else b"".join([each.line for each in lines if may_see(session, each)])
        if text:
            self._host.clients.push(session.id, text)

    def cut(self) -> None:
        """Cut those here, because lines were lost."""
        for session_id in list(self._own):
            self._host.clients.cut(session_id)

    # -- the other processes ------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        if not self._waiting or self._is_passing_on:
            return
        portion: list[list[Any]] = []
        size = 0
        while len(portion) < len(self._waiting) and size < PORTION_BYTES_MAX:
            size += len(self._waiting[len(portion)].line)
            portion.append(self._waiting[len(portion)].to_json())
        del self._waiting[: len(portion)]
        self._waiting_bytes -= size
        self._ask(SHOW, portion)

    def _ask(self, question: str, argument: Any) -> None:
        if self._host.peers is not None:
            self._is_passing_on = True
            self._host.peers.query(question, argument, self._passed_on)

    def _passed_on(self, counts: Sequence[int]) -> None:
        self._is_passing_on = False
        if any(counts):
            self._pass_on()
        else:
            self._forget_waiting()
            self.set_elsewhere(False)

    def _forget_waiting(self) -> None:
        self._waiting, self._waiting_bytes = [], 0


def may_see(session: Session, shown: Shown) -> bool:
    """Tell whether a client may see a request."""
    if len(shown.keys) > WORDS_MAX:
        return session.user.reads_all_keys
    if shown.keys:
        return all(map(session.user.can_read, shown.keys))
    return session.user.reads_all_keys or session.user.name == shown.user


def line_of(now_ms: int, db: int, address: str, words: Sequence[bytes]) -> bytes:
    """Return a request in the line that MONITOR sends."""
    seconds, milliseconds = divmod(now_ms, 1000)
    head = f"+{seconds}.{milliseconds:03}000 [{db} {address}]".encode("utf-8", "surrogateescape")
    return b" ".join([head, *map(quoted, words)]) + b"\r\n"


def quoted(word: bytes) -> bytes:
    """Return a text between quotes, as Redis writes it: printable ASCII as it is."""
    word = bytes(word)
    if word.isalnum() and word.isascii():
        return b'"%b"' % word
    return b'"%b"' % b"".join([ESCAPES.get(code) or bytes((code,)) for code in word])
