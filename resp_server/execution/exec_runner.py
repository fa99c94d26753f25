"""The reply to EXEC: what was queued, answered in order, in steps that are short whatever was queued."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from resp_server.execution.context import CommandContext
from resp_server.execution.watch import Watch
from resp_server.protocol.replies import STEP_BYTES_MAX, Pending, Sliced, SlicedEncoder, encode_header
from resp_server.protocol.request_parser import Request
from resp_server.session.session import ReplyMode
from resp_server.session.transaction import Mark
from state_backend.store.keyspace import KeyspaceView

# A step ends with the command during which this is over (guess: a fifth of a turn).
STEP_NS_MAX = 1_000_000

NOTHING_RUN = {2: b"*-1\r\n", 3: b"_\r\n"}


class ExecPlan(NamedTuple):
    """What EXEC found: commands, the view to answer them from, and the keys that must be what they were."""

    requests: Sequence[Request]
    view: KeyspaceView
    watched: Mapping[tuple[int, bytes], Mark]


@dataclass(slots=True)
class ExecContext(CommandContext):
    """Who called EXEC: all commands are answered from one view, which stays where it is."""

    pinned: KeyspaceView

    @property
    def jobs(self) -> KeyspaceView:
        return self.pinned

    @property
    def view(self) -> KeyspaceView:
        return self.pinned if self.session.db == 0 else self.server.nothing

    @property
    def now_ms(self) -> int:
        return self.pinned.now_ms

    def pin(self) -> KeyspaceView:
        return self.view

    def unpin(self, view: KeyspaceView) -> None:
        pass  # EXEC goes on with it


class QueuedRunner(Protocol):
    """Runs queued commands one by one (the dispatcher does)."""

    def answer_queued(self, context: CommandContext, request: Request) -> bytes | Sliced | Pending:
        """Run a queued command."""

    def pending_reply(self, context: CommandContext, pending: Pending) -> bytes:
        """Return the reply that had to be waited for."""

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""


class ExecRunner:
    """Makes the reply to an EXEC, a step at a time, as `SlicedEncoder` does for others.

    While `pending` is there the next step has to wait for it. What CLIENT REPLY among the commands silences is left out
    here already.
    """

    def __init__(self, dispatcher: QueuedRunner, context: CommandContext, to_run: ExecPlan) -> None:
        self._dispatcher = dispatcher
        self._context = ExecContext(context.session, context.server, to_run.view)
        self._to_run = to_run
        self._parts = self._make()
        self.pending: Pending | None = None
        self.when_done: Callable[[], None] = lambda: None
        self.holds_epoch = True
        self.held_bytes = 0
        self.has_begun = False
        self.before: Iterator[None] = iter(())  # what is to be done first, step by step
        self.is_done = False

    @property
    def requests(self) -> Sequence[Request]:
        """What is answered."""
        return self._to_run.requests

    def step(self) -> bytes:
        """Answer some more, and return what can be sent now, which may be nothing."""
        out: list[bytes] = []
        size, ends_ns = 0, perf_counter_ns() + STEP_NS_MAX
        for part in self._parts:
            out.append(part)
            size += len(part)
            if self.pending is not None or size >= STEP_BYTES_MAX or perf_counter_ns() >= ends_ns:
                return b"".join(out)
        self.is_done = True
        return b"".join(out)

    def close(self) -> None:
        """End the transaction. To be called once, at the end or instead of it."""
        self._parts.close()
        self._to_run.view.close()
        self._context.session.end_transaction()
        self.when_done()
        if self._context.session.tracked is not None:
            self._context.session.tracked.is_caching_set = False

    def _make(self) -> Generator[bytes]:
        session = self._context.session
        for _ in self.before:
            yield b""
        for is_changed in self._look_at_watched():
            if is_changed:
                yield b"" if session.is_silent else NOTHING_RUN[session.protocol]
                return
            yield b""
        session.watched.clear()
        session.reads_at = None
        self.has_begun = True
        count = len(self._to_run.requests)
        yield b"" if session.is_silent else encode_header(list, count, session.protocol)
        for request in self._to_run.requests:
            yield from self._answer(request)

    def _look_at_watched(self) -> Iterator[bool]:
        watch = Watch(self._context.server.process.run_id, self._context.pinned)
        # All databases but the first are empty, and stay so.
        return (watch.is_changed(key, mark) for (db, key), mark in self._to_run.watched.items() if db == 0)

    def _answer(self, request: Request) -> Iterator[bytes]:
        session = self._context.session
        reply = self._dispatcher.answer_queued(self._context, request)
        if isinstance(reply, Pending):
            self.pending = reply
            yield b""
            self.pending = None
            reply = self._dispatcher.pending_reply(self._context, reply)
        # A CLIENT REPLY SKIP among the commands silences the one after EXEC, and itself.
        is_skip = session.reply_mode is ReplyMode.SKIP_NEXT and session_is_told(request)
        is_silent = is_skip or session.reply_mode in (ReplyMode.OFF, ReplyMode.SKIP)
        if not isinstance(reply, Sliced):
            yield b"" if is_silent else reply
        elif is_silent and not reply.acts:
            reply.release()
        else:
            reply.is_silent = is_silent
            yield from self._in_steps(SlicedEncoder(reply, session.protocol))

    def _in_steps(self, encoder: SlicedEncoder) -> Iterator[bytes]:
        try:
            while not encoder.is_done:
                try:
                    yield encoder.step()
                except Exception as error:
                    if encoder.has_begun:
                        raise
                    yield self._dispatcher.error_reply(error)
                    return
                self.held_bytes = encoder.held_bytes
        finally:
            self.held_bytes = 0
            encoder.close()


def session_is_told(request: Request) -> bool:
    """Tell whether a request is a CLIENT REPLY."""
    return len(request) > 1 and request[0].lower() == b"client" and request[1].lower() == b"reply"
