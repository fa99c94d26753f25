"""Turns keys that state servers list for SCAN, KEYS or RANDOMKEY into the names that clients use.

A hash may have fields that clients read as keys. Its fields are read after its key was listed. SCAN's guarantee holds:
a field that exists during the whole scan is returned. If the client asks for strings only, types are read, too: the
names of fields are strings, but their hashes are not. Few reads are sent at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from resp_server.backends.servers.field_names import FIELDS_AT_ONCE, FieldRules, NamedHash, is_failure
from resp_server.backends.servers.request_split import NO_KEY
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReplyFuture, all_of, epochs_of, run_in_steps
from resp_server.raw_replies.raw_reply import RawReply, Steps, is_error, raw_reply_of, text_of
from resp_server.raw_replies.reply_sinks import Defer, merge_or_error
from resp_server.raw_replies.reply_splitter import items_of
from resp_server.session.epochs import union_of

# The number of keys whose owner is looked up in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 128
# The number of reads of one listing that are sent at a time (guess: 2 ms of the proxy's time).
READS_AT_ONCE = 128
STRING = b"+string\r\n"

# Returns the names under which a client sees a key. True: under its own name. False: not at all.
VisibleNames = Callable[[bytes], bool | Sequence[bytes]]
# Sends a read of a key to the server that has it.
ToOwner = Callable[[bytes, Request], ReplyFuture]


class StateListing(NamedTuple):
    """The states' part of a listing.

    Args:
        visible_names: Returns the names under which the client sees a listed key.
        is_prefix_needed: Tells whether a name with this prefix can be in the listing (as in `FieldRules.of_hash`).
        accepts: Tells whether a field's name is in the listing.
        is_of_strings: Only strings are listed.
    """

    request: Request
    visible_names: VisibleNames
    fields: FieldRules
    is_prefix_needed: Callable[[bytes, bool], bool] = lambda prefix, is_complete: True
    accepts: Callable[[bytes], object] = lambda name: True
    is_of_strings: bool = False


class _Read(NamedTuple):
    """A read of a listed key.

    Args:
        names: Derives the client's names from the reply.
    """

    key: bytes
    request: Request
    names: Callable[[RawReply], Steps[Sequence[bytes]]]


async def listed_names(listing: StateListing, keys: Answer, to_owner: ToOwner, defer: Defer) -> Answer:
    """Replace the keys in the reply to SCAN, KEYS or RANDOMKEY by the clients' names.

    An error or an empty reply passes unchanged.
    """
    if is_error(keys.reply) or keys.reply in NO_KEY:
        return keys
    names, epochs = _Names(listing), keys.epochs
    error = await run_in_steps(merge_or_error(names.of_keys, [keys.reply]), defer)
    while names.reads and not is_error(error):
        reads = [names.reads.popleft() for _ in range(min(READS_AT_ONCE, len(names.reads)))]
        answers = await all_of([to_owner(read.key, read.request) for read in reads])
        epochs = union_of(epochs, epochs_of(answers))
        taken = merge_or_error(partial(names.of_reads, reads), [answer.reply for answer in answers])
        error = await run_in_steps(taken, defer)
    if is_error(error):
        return Answer(error, epochs)
    return Answer(raw_reply_of([b"*%d\r\n" % len(names.found), *names.found]), epochs)


class _Names:
    """The clients' names of listed keys. Its steps return an error, or nothing.

    Attributes:
        reads: The reads for names that depend on a key's type or fields.
    """

    def __init__(self, listing: StateListing) -> None:
        self._listing = listing
        self.found: list[RawReply] = []
        self.reads: deque[_Read] = deque()

    def of_keys(self, replies: Sequence[RawReply]) -> Steps[RawReply]:
        """Collect the names that need no reads, and the reads for the others."""
        listing, reply = self._listing, replies[0]
        is_single = isinstance(reply, bytes) and reply[:1] == b"$"
        keys = [reply] if is_single else (yield from items_of(reply))
        for number, item in enumerate(keys):
            key = text_of(item)
            visible = listing.visible_names(key)
            if visible and listing.is_of_strings:
                names = [key] if visible is True else visible
                self.reads.append(_Read(key, (b"TYPE", key), partial(_if_string, names)))
            elif visible is True:
                self.found.append(item)
            elif visible:
                self.found += [encode(name, 2) for name in visible]
            named = listing.fields.of_hash(key, listing.is_prefix_needed)
            if named is not None:
                self.reads.append(_Read(key, named.request, partial(self._of_fields, named)))
            if not number % KEYS_AT_ONCE:
                yield
        return b""

    def _of_fields(self, named: NamedHash, reply: RawReply) -> Steps[Sequence[bytes]]:
        found: list[bytes] = []
        for number, field in enumerate((yield from named.fields_in(reply))):
            names = self._listing.fields.names(named.key, named.rules, field)
            found += filter(self._listing.accepts, (each.name for each in names))
            if not number % FIELDS_AT_ONCE:
                yield
        return found

    def of_reads(self, reads: Sequence[_Read], replies: Sequence[RawReply]) -> Steps[RawReply]:
        """Collect the names that some reads were for."""
        for read, reply in zip(reads, replies, strict=True):
            if is_failure(reply):
                return reply
            self.found += [encode(name, 2) for name in (yield from read.names(reply))]
            yield
        return b""


def _if_string(names: Sequence[bytes], reply: RawReply) -> Steps[Sequence[bytes]]:
    """Return a key's names if it is a string."""
    yield
    return names if reply == STRING else ()
