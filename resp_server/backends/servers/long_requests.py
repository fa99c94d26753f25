"""Long requests at a proxy. A request with many keys is sent in chunks, one after another; their replies are merged.

A long request about a single key is encoded in steps, and sent whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from resp_server.backends.servers.state_sender import StateSender
from resp_server.command.policy import AnsweredBy, ReplyMerge, Split
from resp_server.command.table import Command
from resp_server.pipeline.admission import Check
from resp_server.pipeline.batch import BATCH_BYTES_MAX, ReplyBatch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import count_forwarded
from resp_server.pipeline.long_requests import (
    first_chunk,
    may_run_unsplit,
    of_bounded_size,
    request_chunks,
    split_of,
    too_long,
)
from resp_server.pipeline.outcome import RequestOutcome
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import encode, encode_header
from resp_server.protocol.request_parser import CHUNK_ARGUMENTS, LongRequest, Request
from resp_server.raw_replies.answers import Answer, CallbackWait, run_in_steps
from resp_server.raw_replies.raw_reply import Steps, is_error, raw_reply_of, split_header
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session

# The longest request that is sent whole (guess: encoding it takes a few milliseconds).
PACKED_BYTES_MAX = 32 << 20

# The keys of a long request that are requested at once. Each slot among them costs a request (measured: 20 to 80 us).
CHUNK_KEYS = 256

# Sends one chunk, and returns the batch that gets its reply. The function may raise.
SendChunk = Callable[[Request], ReplyBatch]


def pack_in_steps(request: LongRequest) -> Steps[bytes]:
    """Encode a long request in steps. To free memory, its words are cleared, except those of the first chunk."""
    texts = [b"*%d\r\n" % len(request)]
    size = 0
    for index in range(0, len(request), CHUNK_ARGUMENTS):
        words = request[index : index + CHUNK_ARGUMENTS]
        for some in of_bounded_size(words):
            texts.append(pack(some).partition(b"\r\n")[2])
            size += len(texts[-1])
            if size > PACKED_BYTES_MAX:
                raise GenericError(f"a request may have {PACKED_BYTES_MAX >> 20} MiB through a proxy; split it")
            yield
        if index:
            request[index : index + len(words)] = [b""] * len(words)
    return b"".join(texts)


async def answer_in_chunks(
    chunks: Iterator[Request], send_chunk: SendChunk, split: Split, protocol: int, bytes_max: int
) -> Answer:
    """Answer a request that is sent in chunks.

    Args:
        bytes_max: The bytes of all replies; GenericError if they are longer.
    """
    texts: list[bytes] = []
    size = count = 0
    for chunk in chunks:
        batch = send_chunk(chunk)
        if batch.missing:
            await CallbackWait(batch.when_resolved)
        (reply,) = batch.replies()
        if is_error(reply):
            return Answer(reply)
        line, items = split_header(reply)
        count += int(line[1:])  # of an array, the number of items; of an integer, its value
        texts += items
        size += len(reply)
        if size > bytes_max:
            raise GenericError(f"replies of more than {bytes_max} bytes were requested at once")
    if split.merge is ReplyMerge.SUM:
        return Answer(encode(count, protocol))
    return Answer(raw_reply_of([encode_header(list, count, protocol), *texts]))


def forwarded_split_of(command: Command, request: Request) -> Split | None:
    """Return how a proxy splits a long request; None: it is not forwarded, or not split."""
    split = split_of(command, request)
    if split is None or split.merge is ReplyMerge.FRAMES:
        return split
    if command.answered_without_upstream is AnsweredBy.STATES and split.merge in (ReplyMerge.SUM, ReplyMerge.LIST):
        return split
    if not may_run_unsplit(request):
        raise too_long(command)
    return None


class LongRequests:
    """Forwards long requests of clients.

    Args:
        check: Raises the error of a request that may neither run nor be queued.
        new_batch: Returns a batch for the reply to a chunk.
        has_keys: Returns whether requests with keys are forwarded in the database that a client has selected.
    """

    def __init__(
        self,
        server: ServerContext,
        sender: StateSender,
        check: Check,
        new_batch: Callable[[Session], ReplyBatch],
        has_keys: Callable[[Session], bool],
    ) -> None:
        self._server, self._sender, self._check = server, sender, check
        self._new_batch, self._has_keys = new_batch, has_keys

    def answer(self, context: CommandContext, request: LongRequest, batch: ReplyBatch) -> RequestOutcome:
        """Forward a long request, if it can be forwarded in chunks, or is about one key. Later requests wait."""
        session = context.session
        command = self._server.table.find(request)
        command.check_arity(request)
        self._check(context, command, first_chunk(request))
        split = forwarded_split_of(command, request)
        if session.transaction is not None and not may_run_unsplit(request):
            raise too_long(command)
        if split is None or split.merge is ReplyMerge.FRAMES:
            return RequestOutcome.LOCAL
        if session.transaction is not None:
            return RequestOutcome.TRANSACTION
        if not self._has_keys(session):
            return RequestOutcome.NO_KEYS
        count_forwarded(context, command, request)
        if session.replies_suppressed:  # a read whose reply is suppressed has no effect
            return RequestOutcome.ANSWERED
        if command.single_key_at:
            self._answer_unsplit(session, command, request, batch)
        else:
            batch.answer(partial(self._chunks_answer, context, command, request, split, batch))
        return RequestOutcome.ANSWERED

    def _answer_unsplit(self, session: Session, command: Command, request: LongRequest, batch: ReplyBatch) -> None:
        """Send a long request about one key unsplit, so that its reply is from one epoch.

        The request uses a connection for slow requests, so that other clients do not wait behind it.
        """
        key = request[command.single_key_at]
        packed: list[bytes] = []  # once: the request's words are cleared then

        async def answering() -> Answer:
            await batch.earlier_replies()  # they must not be from a later epoch
            if not packed:
                packed.append(await run_in_steps(pack_in_steps(request), self._server.clients.defer))
            return await self._sender.slow_answer(packed[0], key, key, session, batch.seen)

        batch.answer(answering)

    async def _chunks_answer(
        self, context: CommandContext, command: Command, request: Request, split: Split, batch: ReplyBatch
    ) -> Answer:
        """Answer a long request about keys of many slots, after all earlier replies."""
        session = context.session
        await batch.earlier_replies()  # they must not be from a later epoch

        def send(chunk: Request) -> ReplyBatch:
            self._check(context, command, chunk)
            chunk_batch = self._new_batch(session)
            if not self._sender.send(command, chunk, session, chunk_batch):
                raise GenericError("the request is malformed")
            chunk_batch.seal()
            return chunk_batch

        found = request_chunks(command, split, request, CHUNK_KEYS)
        return await answer_in_chunks(found, send, split, session.protocol, BATCH_BYTES_MAX)
