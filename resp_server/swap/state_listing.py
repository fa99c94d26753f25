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

from resp_server.forwarding.raw_replies import RawReply, Steps, is_error, raw_reply_of, text_of
from resp_server.forwarding.reply_splitter import items_of
from resp_server.forwarding.reply_stages import Defer, ReplyAggregator, ReplySink, ReplyStage, merge_or_error
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.proxy.field_names import FIELDS_AT_ONCE, FieldRules, NamedHash, is_failure
from resp_server.proxy.request_policy import NO_KEY
from resp_server.session.epoch_feed import NO_EPOCHS, ReplyEpochs, union_of

# The number of keys whose owner is looked up in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 128
# The number of reads of one listing that are sent at a time (guess: 2 ms of the proxy's time).
READS_AT_ONCE = 128
STRING = b"+string\r\n"

# Returns the names under which a client sees a key. True: under its own name. False: not at all.
VisibleNames = Callable[[bytes], bool | Sequence[bytes]]
# Sends a read of a key to the server that has it.
ToOwner = Callable[[bytes, Request, ReplySink, int], None]


class StateListing(NamedTuple):
    """The states' part of a listing.

    request: the request to the state servers.
    visible_names: returns the names under which the client sees a listed key.
    fields: the rules that name fields.
    is_prefix_needed: tells whether a name with this prefix can be in the listing (as in `FieldRules.of_hash`).
    accepts: tells whether a field's name is in the listing.
    is_of_strings: only strings are listed.
    """

    request: Request
    visible_names: VisibleNames
    fields: FieldRules
    is_prefix_needed: Callable[[bytes, bool], bool] = lambda prefix, is_complete: True
    accepts: Callable[[bytes], object] = lambda name: True
    is_of_strings: bool = False


class _Read(NamedTuple):
    """A read of a listed key. names: derives the client's names from the reply."""

    key: bytes
    request: Request
    names: Callable[[RawReply], Steps[Sequence[bytes]]]


class ListedNames(ReplyStage):
    """Replaces the keys in the reply to SCAN, KEYS or RANDOMKEY by the clients' names.

    An error or an empty reply passes unchanged.
    """

    KEYS, READS = 0, 1

    def __init__(self, listing: StateListing, to_owner: ToOwner, defer: Defer, sink: ReplySink, index: int) -> None:
        super().__init__(sink, index)
        self._listing, self._to_owner, self._defer = listing, to_owner, defer
        self._found: list[RawReply] = []
        self._reads: deque[_Read] = deque()
        self._epochs = NO_EPOCHS

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        self._epochs = union_of(self._epochs, epochs)
        if index == self.KEYS and not is_error(reply) and reply not in NO_KEY:
            self.run_steps(merge_or_error(self._list, [reply]), self._continue, self._defer)
        elif index == self.KEYS:
            self.finish(reply, epochs)
        else:
            self._continue(reply)

    def _list(self, replies: Sequence[RawReply]) -> Steps[RawReply]:
        """Collect the names that need no reads, and queue the reads for the others."""
        listing, reply = self._listing, replies[0]
        is_single = isinstance(reply, bytes) and reply[:1] == b"$"
        keys = [reply] if is_single else (yield from items_of(reply))
        for number, item in enumerate(keys):
            key = text_of(item)
            visible = listing.visible_names(key)
            if visible and listing.is_of_strings:
                names = [key] if visible is True else visible
                self._reads.append(_Read(key, (b"TYPE", key), partial(_if_string, names)))
            elif visible is True:
                self._found.append(item)
            elif visible:
                self._found += [encode(name, 2) for name in visible]
            named = listing.fields.of_hash(key, listing.is_prefix_needed)
            if named is not None:
                self._reads.append(_Read(key, named.request, partial(self._names_of_fields, named)))
            if not number % KEYS_AT_ONCE:
                yield
        return b""

    def _names_of_fields(self, named: NamedHash, reply: RawReply) -> Steps[Sequence[bytes]]:
        found: list[bytes] = []
        for number, field in enumerate((yield from named.fields_in(reply))):
            names = self._listing.fields.names(named.key, named.rules, field)
            found += filter(self._listing.accepts, (each.name for each in names))
            if not number % FIELDS_AT_ONCE:
                yield
        return found

    def _continue(self, result: RawReply) -> None:
        """Send the next reads. When none is left, send the names to the sink. result: empty, or an error."""
        if is_error(result):
            self.finish(result, self._epochs)
            return
        if not self._reads:
            self.finish(raw_reply_of([b"*%d\r\n" % len(self._found), *self._found]), self._epochs)
            return
        reads = [self._reads.popleft() for _ in range(min(READS_AT_ONCE, len(self._reads)))]
        reads_done = ReplyAggregator(
            len(reads), partial(self._take, reads), self, self.READS, self._defer, takes_errors=True
        )
        for number, read in enumerate(reads):
            reads_done.attempt(self._to_owner, read.key, read.request, reads_done, number)

    def _take(self, reads: Sequence[_Read], replies: Sequence[RawReply]) -> Steps[RawReply]:
        for read, reply in zip(reads, replies, strict=True):
            if is_failure(reply):
                return reply
            self._found += [encode(name, 2) for name in (yield from read.names(reply))]
            yield
        return b""


def _if_string(names: Sequence[bytes], reply: RawReply) -> Steps[Sequence[bytes]]:
    """Return a key's names if it is a string."""
    yield
    return names if reply == STRING else ()
