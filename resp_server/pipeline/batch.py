"""The replies to requests of one client that arrived together. They may come later, and are sent in request order.

A request that must not be sent before earlier replies, such as a blocking command, waits for the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import coroutine

from resp_server.protocol.errors import GenericError, TryAgainError
from resp_server.protocol.replies import Pending, ReplyStream, SlicedEncoder
from resp_server.raw_replies.answers import Answer, Answering, CallbackWait, Wait, run_into
from resp_server.raw_replies.raw_reply import (
    JOINED_BYTES_MAX,
    RawReply,
    RawReplySender,
    Result,
    as_bytes,
    chunks_of,
)
from resp_server.raw_replies.reply_sinks import ReplySink, UnansweredError
from resp_server.session.epochs import NO_EPOCHS, Epochs, ReplyEpochs, indexes_behind
from resp_server.session.session import Session

# Twice the deadline of any request (`LONG_TIMEOUT_S` of servers), so it is reached only after a bug.
BATCH_S_MAX = 120.0
LATE = b"-%b\r\n" % GenericError("no server answered in time").line
# The total size of a batch's replies, which are stored until all have arrived (guess).
BATCH_BYTES_MAX = 256 << 20


@coroutine
def next_batch() -> Generator[None, ReplyBatch, ReplyBatch]:
    """Wait until the client has the replies to all earlier requests; return the batch that begins then."""
    return (yield)


async def between_batches(work: Coroutine[Wait, None, Result], batch: ReplyBatch) -> tuple[Result, ReplyBatch]:
    """Do work while earlier requests are answered; return its result, and the batch that begins after both."""
    results: list[Result] = []
    errors: list[Exception] = []

    async def answering() -> Answer:
        try:
            results.append(await work)
        except Exception as error:
            errors.append(error)
        return Answer(b"")

    batch.answer(answering, is_suppressed=True)
    following = await next_batch()
    if errors:
        raise errors[0]
    return results[0], following


class BatchThenSteps:
    """A `ReplyStream` of the replies of a batch, and then of a sliced reply."""

    pins_epoch = True

    def __init__(self, batch: RawReplySender, last: SlicedEncoder) -> None:
        self._batch, self._last = batch, last

    @property
    def pending(self) -> Pending | None:
        return self._last.pending

    @property
    def buffered_bytes(self) -> int:
        return self._last.buffered_bytes

    @property
    def has_started(self) -> bool:
        return self._last.has_started

    @property
    def is_done(self) -> bool:
        return self._last.is_done

    def step(self) -> bytes:
        """Return the next bytes to send."""
        return self._last.step() if self._batch.is_done else self._batch.step()

    def close(self) -> None:
        """Release the memory and the epochs of the replies."""
        self._batch.close()
        self._last.close()


class ReplyBatch(Pending, ReplySink):
    """The replies to requests that arrived together, in request order.

    The requests may be sent to several servers at once. If a reply is from an earlier epoch than a reply before it, its
    request is sent again, until the deadline.

    Attributes:
        is_last: Later requests of the client wait for these replies.
    """

    def __init__(
        self,
        session: Session,
        now_s: Callable[[], float],
        deadline_s: float,
        error_reply: Callable[[Exception], bytes],
        bytes_max: int = BATCH_BYTES_MAX,
    ) -> None:
        super().__init__(BATCH_S_MAX, self.joined)
        self._bytes_max = bytes_max
        self._session = session
        self.error_reply = error_reply
        self._now_s, self.deadline_s = now_s, deadline_s
        self._replies: list[RawReply | None] = []
        self._epochs: dict[int, ReplyEpochs] = {}
        self._retries: dict[int, Callable[[], object]] = {}
        self._silenced: set[int] = set()
        self._bytes = 0
        self._is_sealed = False
        self._then: Callable[[], None] | None = None
        self._ends_at: int | None = None
        self._last: SlicedEncoder | None = None
        self.missing = 0
        self.is_last = False

    def add(self, reply: bytes) -> None:
        """Add a complete reply."""
        self._replies.append(reply)

    def expect(self, is_suppressed: bool = False) -> int:
        """Add a pending reply; return its index. The batch waits for a silent reply, but does not send it."""
        self.missing += 1
        self._replies.append(None)
        if is_suppressed:
            self._silenced.add(len(self._replies) - 1)
        return len(self._replies) - 1

    def block(self) -> None:
        """Wait without a time limit: the batch's only reply is that of a blocking command."""
        self.is_blocking, self.seconds_max = True, math.inf

    def earlier_replies(self) -> CallbackWait:
        """Wait for all replies but the last one, which is the caller's."""
        return CallbackWait(self._call_before_last)

    def _call_before_last(self, then: Callable[[], None]) -> None:
        if self.missing > 1:
            self.before_last_reply(then)
        else:
            then()

    def before_last_reply(self, then: Callable[[], None]) -> None:
        """Call back when all replies but the last one have arrived. At the call, one of them has to be missing."""
        self._then = then

    def answer(self, make: Callable[[], Answering], is_suppressed: bool = False) -> None:
        """Add the pending reply of a coroutine.

        Args:
            make: Called again if the reply is from too early an epoch.
        """
        index = self.expect(is_suppressed)

        def run() -> None:
            run_into(make(), self, index)

        self._retries[index] = run
        run()

    def seen(self) -> Epochs:
        """Return the epochs that the client has seen."""
        return self._session.seen.epochs

    def set_retry(self, index: int, send: Callable[[], object]) -> None:
        """Set the function that sends the request of a pending reply again."""
        self._retries[index] = send

    def __len__(self) -> int:
        return len(self._replies)

    def seen_epochs(self, index: int) -> Epochs:
        return self.seen()

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Store a reply that has arrived."""
        try:
            self._put(index, reply, epochs)
        except Exception as error:  # it becomes the reply to all requests without one
            line = self.error_reply(error)
            self._replies = [line if each is None else each for each in self._replies]
            self.missing, self._then = 0, None
            if self._is_sealed:
                self.resolve(self.joined)

    def fail(self, index: int, error: Exception) -> None:
        """Store an exception as an error reply. After an `UnansweredError`, only the replies before it are sent."""
        if isinstance(error, UnansweredError):
            self._ends_at = index if self._ends_at is None else min(index, self._ends_at)
            self.put(index, b"")
        else:
            self.put(index, self.error_reply(error))

    def refuse(self, index: int, error: Exception) -> None:
        """Set the error reply to the current request.

        Args:
            index: The index of the last reply, or of the next one to be added.
        """
        if index == len(self._replies):
            self.add(b"")
        else:
            self.missing -= self._replies[index] is None
            self._silenced.discard(index)
        self._replies[index] = b"" if self._session.replies_suppressed else self.error_reply(error)

    def _put(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        if self._replies[index] is not None:
            return
        self._bytes += len(reply)
        if self._bytes > self._bytes_max:
            error = GenericError(f"replies of more than {self._bytes_max} bytes were requested at once")
            reply = b"-%b\r\n" % error.line
        self._replies[index] = b"" if index in self._silenced else reply
        self._epochs[index] = epochs
        self.missing -= 1
        if self._then is not None and self.missing == 1 and not self._resend_behind():
            then, self._then = self._then, None
            then()
        if not self.missing and self._is_sealed and not self._resend_behind():
            self.resolve(self.joined)

    def _resend_behind(self) -> bool:
        """Resend the requests whose replies are from an earlier epoch than a reply before; return whether any were."""
        seen = self._session.seen
        for epochs in self._epochs.values():
            seen.add(epochs)
        if len(set(map(id, self._epochs.values()))) <= 1:
            return False
        late = indexes_behind([self._epochs.get(index, NO_EPOCHS) for index in range(len(self._replies))])
        if self._now_s() >= self.deadline_s:
            error = TryAgainError("the servers are not at the same epoch")
            for index in late:
                self._replies[index] = b"" if index in self._silenced else b"-%b\r\n" % error.line
                del self._epochs[index]
            return False
        self.missing += len(late)
        for index in late:
            self._bytes -= len(self._replies[index] or b"")
            self._replies[index] = None
            del self._epochs[index]
        for index in late:
            self._retries[index]()
        return bool(late)

    def seal(self) -> None:
        """Close the batch to further replies."""
        self._is_sealed = True

    def end_with(self, last: SlicedEncoder) -> None:
        """Close the batch, with a sliced reply after all others; its steps begin when the others have arrived."""
        self._last = last
        self.seal()

    def abandon(self) -> None:
        super().abandon()
        if self._last is not None:
            self._last.close()
            self._last = None

    def replies(self) -> Sequence[RawReply]:
        """Return the replies in order, with an error for each missing one."""
        if self._ends_at is not None:
            self._session.close()
        return [LATE if reply is None else reply for reply in self._replies[: self._ends_at]]

    def joined(self) -> bytes | ReplyStream:
        """Return all replies encoded; long ones are sent in steps."""
        replies = self.replies()
        size = sum(map(len, replies))
        if self._ends_at is not None:
            self.abandon()  # the connection ends before the last reply
        if self._last is not None:
            last, self._last = self._last, None
            return BatchThenSteps(RawReplySender(chunks_of(replies), size), last)
        if size <= JOINED_BYTES_MAX:
            return b"".join(map(as_bytes, replies))
        return RawReplySender(chunks_of(replies), size)
