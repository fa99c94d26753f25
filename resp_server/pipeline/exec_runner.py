"""EXEC: runs the queued commands in order, in short steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from resp_server.command.policy import Role
from resp_server.limits import STEP_NS_MAX
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.watch import Watch
from resp_server.protocol.replies import STEP_BYTES_MAX, Pending, Sliced, SlicedEncoder, encode_header
from resp_server.protocol.request_parser import Request
from resp_server.session.session import ReplyMode
from resp_server.session.transaction import WatchedVersion
from state_backend.store.keyspace import KeyspaceView

NOTHING_RUN = {2: b"*-1\r\n", 3: b"_\r\n"}


class ExecPlan(NamedTuple):
    """The queued commands of an EXEC, the view that they read, and the watched keys."""

    requests: Sequence[Request]
    view: KeyspaceView
    watched: Mapping[tuple[int, bytes], WatchedVersion]


@dataclass(slots=True)
class ExecContext(CommandContext):
    """The context of queued commands: all of them read one pinned view."""

    pinned: KeyspaceView

    @property
    def jobs(self) -> KeyspaceView:
        return self.pinned

    @property
    def view(self) -> KeyspaceView:
        return self.pinned if self.session.db == 0 else self.server.empty_view

    @property
    def now_ms(self) -> int:
        return self.pinned.now_ms

    def pin(self) -> KeyspaceView:
        return self.view

    def unpin(self, view: KeyspaceView) -> None:
        pass  # EXEC still needs it


class ExecRunner:
    """Makes the reply to EXEC step by step, as `SlicedEncoder` does for other replies.

    While `pending` is set, the next step waits for it. Replies that a queued CLIENT REPLY suppresses are dropped.

    Args:
        answer: Runs one queued command.
        pending_reply: Returns a resolved reply, encoded.
        error_reply: Returns the error reply for an exception.
    """

    def __init__(
        self,
        context: CommandContext,
        plan: ExecPlan,
        answer: Callable[[CommandContext, Request], bytes | Sliced | Pending],
        pending_reply: Callable[[CommandContext, Pending], bytes],
        error_reply: Callable[[Exception], bytes],
    ) -> None:
        self._answer_queued, self._pending_reply, self._error_reply = answer, pending_reply, error_reply
        self._context = ExecContext(context.session, context.server, plan.view)
        self._plan = plan
        self._parts = self._make()
        self.pending: Pending | None = None
        self.when_done: Callable[[], None] = lambda: None
        self.pins_epoch = True
        self.buffered_bytes = 0
        self.has_started = False
        # Steps that run before the first command.
        self.before: Iterator[None] = iter(())
        self.is_done = False

    @property
    def requests(self) -> Sequence[Request]:
        """The queued commands."""
        return self._plan.requests

    def step(self) -> bytes:
        """Run the next commands, and return the bytes to send now, maybe none."""
        out: list[bytes] = []
        size, ends_ns = 0, perf_counter_ns() + STEP_NS_MAX
        for reply in self._parts:
            out.append(reply)
            size += len(reply)
            if self.pending is not None or size >= STEP_BYTES_MAX or perf_counter_ns() >= ends_ns:
                return b"".join(out)
        self.is_done = True
        return b"".join(out)

    def close(self) -> None:
        """End the transaction, also an unfinished one. Called once."""
        self._parts.close()
        self._plan.view.close()
        self._context.session.end_transaction()
        self.when_done()
        if self._context.session.tracking_state is not None:
            self._context.session.tracking_state.is_caching_set = False

    def _make(self) -> Generator[bytes]:
        session = self._context.session
        for _ in self.before:
            yield b""
        for is_changed in self._check_watched():
            if is_changed:
                yield b"" if session.replies_suppressed else NOTHING_RUN[session.protocol]
                return
            yield b""
        session.watched.clear()
        session.read_point = None
        self.has_started = True
        count = len(self._plan.requests)
        yield b"" if session.replies_suppressed else encode_header(list, count, session.protocol)
        for request in self._plan.requests:
            yield from self._answer(request)

    def _check_watched(self) -> Iterator[bool]:
        watch = Watch(self._context.server.process.run_id, self._context.pinned)
        # All databases but the first are always empty.
        return (watch.is_changed(key, mark) for (db, key), mark in self._plan.watched.items() if db == 0)

    def _answer(self, request: Request) -> Iterator[bytes]:
        session = self._context.session
        reply = self._answer_queued(self._context, request)
        if isinstance(reply, Pending):
            self.pending = reply
            yield b""
            self.pending = None
            reply = self._pending_reply(self._context, reply)
        # A queued CLIENT REPLY SKIP suppresses its own reply, and the one after EXEC.
        is_skip = (
            session.reply_mode is ReplyMode.SKIP_NEXT
            and self._context.server.table.role_of(request) is Role.CLIENT_REPLY
        )
        is_suppressed = is_skip or session.reply_mode in (ReplyMode.OFF, ReplyMode.SKIP)
        if not isinstance(reply, Sliced):
            yield b"" if is_suppressed else reply
        elif is_suppressed and not reply.has_effect:
            reply.release()
        else:
            reply.is_suppressed = is_suppressed
            yield from self._in_steps(SlicedEncoder(reply, session.protocol))

    def _in_steps(self, encoder: SlicedEncoder) -> Iterator[bytes]:
        try:
            while not encoder.is_done:
                try:
                    yield encoder.step()
                except Exception as error:
                    if encoder.has_started:
                        raise
                    yield self._error_reply(error)
                    return
                self.buffered_bytes = encoder.buffered_bytes
        finally:
            self.buffered_bytes = 0
            encoder.close()
