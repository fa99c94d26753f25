"""Long requests at a proxy. A request with many keys is sent in chunks, one after another; their replies are merged.

A long request about a single key is encoded in steps, and sent whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from resp_server.backends.servers.batch import ReplyBatch
from resp_server.command.policy import Joined, Split
from resp_server.forwarding.answers import Answer, Called
from resp_server.forwarding.raw_replies import Steps, is_error, raw_reply_of, split_header
from resp_server.forwarding.reply_splitter import pack
from resp_server.pipeline.long_requests import of_bounded_size
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import encode, encode_header
from resp_server.protocol.request_parser import CHUNK_WORDS, LongRequest, Request

# The longest request that is sent whole (guess: encoding it takes a few milliseconds).
PACKED_BYTES_MAX = 32 << 20

# Sends one chunk, and returns the batch that gets its reply. The function may raise.
SendChunk = Callable[[Request], ReplyBatch]


def pack_in_steps(request: LongRequest) -> Steps[bytes]:
    """Encode a long request in steps. To free memory, its words are cleared, except those of the first chunk."""
    texts = [b"*%d\r\n" % len(request)]
    size = 0
    for at in range(0, len(request), CHUNK_WORDS):
        words = request[at : at + CHUNK_WORDS]
        for some in of_bounded_size(words):
            texts.append(pack(some).partition(b"\r\n")[2])
            size += len(texts[-1])
            if size > PACKED_BYTES_MAX:
                raise GenericError(f"a request may have {PACKED_BYTES_MAX >> 20} MiB through a proxy; split it")
            yield
        if at:
            request[at : at + len(words)] = [b""] * len(words)
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
            await Called(batch.when_resolved)
        (reply,) = batch.replies()
        if is_error(reply):
            return Answer(reply)
        line, items = split_header(reply)
        count += int(line[1:])  # of an array, the number of items; of an integer, its value
        texts += items
        size += len(reply)
        if size > bytes_max:
            raise GenericError(f"replies of more than {bytes_max} bytes were requested at once")
    if split.joined is Joined.SUM:
        return Answer(encode(count, protocol))
    return Answer(raw_reply_of([encode_header(list, count, protocol), *texts]))
