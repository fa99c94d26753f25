"""The replies to a client's pipeline at a proxy: requested from several servers at once, sent in request order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from resp_server.protocol.errors import PlainError, TryAgainError
from resp_server.protocol.replies import Pending
from resp_server.proxy.epoch_floors import behind
from resp_server.proxy.raw_replies import JOINED_BYTES_MAX, RawReply, RawReplySender, ReplyChunks, as_bytes, chunks_of
from resp_server.proxy.requests import ReplySink, UpstreamRequest
from resp_server.proxy.upstream_cluster import LONG_TIMEOUT_S, UpstreamCluster
from resp_server.session.epoch_feed import NO_EPOCHS, Epochs, ReplyEpochs
from resp_server.session.session import Session

# Longer than any question waits, so that it ends nothing unless something is wrong here.
BATCH_S_MAX = 2 * LONG_TIMEOUT_S
# What the replies of one batch may be together; they are held until all are there (guess).
BATCH_BYTES_MAX = 256 << 20


class ReplyBatch(Pending, ReplySink):
    """Replies to requests that came together, in their order.

    They are asked of several servers at once. Where one is from an earlier epoch than a reply before it, it is asked
    again, until its deadline.
    """

    def __init__(
        self,
        session: Session,
        now_s: Callable[[], float],
        deadline_s: float,
        error_reply: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(BATCH_S_MAX, self.joined)
        self._session = session
        self._error_reply = error_reply
        self._now_s, self._deadline_s = now_s, deadline_s
        self._replies: list[RawReply | None] = []
        self._epochs: dict[int, ReplyEpochs] = {}
        self._again: dict[int, Callable[[], object]] = {}
        self._silenced: set[int] = set()
        self._bytes = 0
        self._is_sealed = False
        self._then: Callable[[], None] | None = None
        self.missing = 0

    def add(self, reply: bytes) -> None:
        """Add a reply that is known."""
        self._replies.append(reply)

    def ask(
        self, cluster: UpstreamCluster, packed: bytes, slot: int, is_silent: bool = False, master: str | None = None
    ) -> None:
        """Add one that whoever answers a slot, or a master's shard, is asked for."""
        deadline_s = self._deadline_s
        index = self.expect(is_silent)
        ask = UpstreamRequest(packed, slot, self._session.protocol, deadline_s, self, index, None, master)
        self._again[index] = partial(cluster.send_again, ask)
        cluster.send(ask)

    def expect(self, is_silent: bool = False) -> int:
        """Add a reply that is to come; return its index. A silent one is waited for, and left out."""
        self.missing += 1
        self._replies.append(None)
        if is_silent:
            self._silenced.add(len(self._replies) - 1)
        return len(self._replies) - 1

    def before_last(self, then: Callable[[], None]) -> None:
        """Call back once all replies before the last one have arrived; some are missing now."""
        self._then = then

    def again(self, index: int, ask: Callable[[], object]) -> None:
        """Say how one that is to come is asked for once more."""
        self._again[index] = ask

    def __len__(self) -> int:
        return len(self._replies)

    def seen_epochs(self, index: int) -> Epochs:
        return self._session.seen.epochs

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take a reply that has arrived."""
        try:
            self._put(index, reply, epochs)
        except Exception as error:  # it concerns all that are still to come
            line = self._error_reply(error)
            self._replies = [line if each is None else each for each in self._replies]
            self.missing, self._then = 0, None
            if self._is_sealed:
                self.resolve(self.joined)

    def fail(self, index: int, error: Exception) -> None:
        """Turn an exception into the error reply."""
        self.put(index, self._error_reply(error))

    def refuse(self, index: int, error: Exception) -> None:
        """Have what was raised be the reply to the request in hand, whose place is the last one or the next."""
        if index == len(self._replies):
            self.add(b"")
        else:
            self.missing -= self._replies[index] is None
            self._silenced.discard(index)
        self._replies[index] = b"" if self._session.is_silent else self._error_reply(error)

    def _put(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        if self._replies[index] is not None:
            return
        self._bytes += len(reply)
        if self._bytes > BATCH_BYTES_MAX:
            error = PlainError(f"replies of more than {BATCH_BYTES_MAX} bytes were asked for at once")
            reply = b"-%b\r\n" % error.line
        self._replies[index] = b"" if index in self._silenced else reply
        self._epochs[index] = epochs
        self.missing -= 1
        if self._then is not None and self.missing == 1 and not self._ask_behind():
            then, self._then = self._then, None
            then()
        if not self.missing and self._is_sealed and not self._ask_behind():
            self.resolve(self.joined)

    def _ask_behind(self) -> bool:
        """Ask again for what is from an earlier epoch than a reply before it; tell whether there is something."""
        seen = self._session.seen
        for epochs in self._epochs.values():
            seen.add(epochs)
        if len(set(map(id, self._epochs.values()))) <= 1:
            return False
        late = behind([self._epochs.get(index, NO_EPOCHS) for index in range(len(self._replies))])
        if self._now_s() >= self._deadline_s:
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
            self._again[index]()
        return bool(late)

    def seal(self) -> None:
        """Say that nothing is added any more."""
        self._is_sealed = True

    def replies(self) -> Sequence[RawReply]:
        """Return the replies in order; an error for each that is missing."""
        late = b"-%b\r\n" % PlainError("no server answered in time").line
        return [late if reply is None else reply for reply in self._replies]

    def joined(self) -> bytes | RawReplySender:
        """Return the replies as they are sent: if they are long, in steps."""
        replies = self.replies()
        size = sum(map(len, replies))
        return (
            b"".join(map(as_bytes, replies)) if size <= JOINED_BYTES_MAX else RawReplySender(chunks_of(replies), size)
        )


class BatchHopSink:
    """The place in a batch of a request that the compiled hop asks for."""

    def __init__(self, batch: ReplyBatch, index: int, by_slots: Callable[[], None]) -> None:
        self._batch, self._index = batch, index
        self._by_slots = by_slots

    @property
    def seen(self) -> Epochs:
        """What the client has seen."""
        return self._batch.seen_epochs(self._index)

    def answered(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        """Take the reply. It is one server's megabyte each at most."""
        self._batch.put(self._index, reply if isinstance(reply, bytes) else ReplyChunks(list(reply.texts)), epochs)

    def ask_again(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Ask in another way."""
        self._by_slots()

    def fail(self, index: int, error: Exception) -> None:
        """Take an exception in place of the reply."""
        self._batch.fail(self._index, error)
