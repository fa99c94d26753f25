"""The names in a SCAN, KEYS or RANDOMKEY of the states' keys: the states' own, and those that clients know.

A key of a state may have fields that clients know as keys. Whether a hash has them is read after the key was listed: a
field that exists throughout a scan is found. Types are read as well if the client asks for strings: names of fields are
strings, but the hashes that have them are not. Few reads are sent at a time.
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
from resp_server.session.epoch_feed import NO_EPOCHS, ReplyEpochs, union_of

# Keys whose owner is looked up in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 128
# Reads of one listing that are sent at a time (guess: 2 ms of the proxy's time).
READS_AT_ONCE = 128
NOTHING = (b"$-1\r\n", b"_\r\n")
STRING = b"+string\r\n"

# Tells whether a client sees a key, or returns the names under which it does.
Shown = Callable[[bytes], bool | Sequence[bytes]]
# Sends a read of a key to the server that has it.
ToOwner = Callable[[bytes, Request, ReplySink, int], None]


class StatesPart(NamedTuple):
    """The states' part of a listing. request: what the state servers get.

    shown: the keys in their reply that the client sees. fields: the rules whose names of fields may be among the names.
    may_begin: tells whether names that begin so may be. accepts: tells whether a name is. is_of_strings: only keys that
    are strings are listed.
    """

    request: Request
    shown: Shown
    fields: FieldRules
    may_begin: Callable[[bytes, bool], bool] = lambda start, is_whole: True
    accepts: Callable[[bytes], object] = lambda name: True
    is_of_strings: bool = False


class _Read(NamedTuple):
    """A read of a listed key. names: makes the key's names of the reply."""

    key: bytes
    request: Request
    names: Callable[[RawReply], Steps[Sequence[bytes]]]


class ListedNames(ReplyStage):
    """Makes the array of names of a reply with keys, of which RANDOMKEY has one. Other replies stay as they are."""

    KEYS, READS = 0, 1

    def __init__(self, part: StatesPart, to_owner: ToOwner, defer: Defer, sink: ReplySink, index: int) -> None:
        super().__init__(sink, index)
        self._part, self._to_owner, self._defer = part, to_owner, defer
        self._found: list[RawReply] = []
        self._reads: deque[_Read] = deque()
        self._epochs = NO_EPOCHS

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        self._epochs = union_of(self._epochs, epochs)
        if index == self.KEYS and not is_error(reply) and reply not in NOTHING:
            self.run_steps(merge_or_error(self._list, [reply]), self._continue, self._defer)
        elif index == self.KEYS:
            self.finish(reply, epochs)
        else:
            self._continue(reply)

    def _list(self, replies: Sequence[RawReply]) -> Steps[RawReply]:
        """Take the keys, and the names that need no reads."""
        part, reply = self._part, replies[0]
        is_single = isinstance(reply, bytes) and reply[:1] == b"$"
        keys = [reply] if is_single else (yield from items_of(reply))
        for number, item in enumerate(keys):
            key = text_of(item)
            shown = part.shown(key)
            if shown and part.is_of_strings:
                names = [key] if shown is True else shown
                self._reads.append(_Read(key, (b"TYPE", key), partial(_if_string, names)))
            elif shown is True:
                self._found.append(item)
            elif shown:
                self._found += [encode(name, 2) for name in shown]
            named = part.fields.of_hash(key, part.may_begin)
            if named is not None:
                self._reads.append(_Read(key, named.request, partial(self._names_of_fields, named)))
            if not number % KEYS_AT_ONCE:
                yield
        return b""

    def _names_of_fields(self, named: NamedHash, reply: RawReply) -> Steps[Sequence[bytes]]:
        found: list[bytes] = []
        for number, field in enumerate((yield from named.fields_in(reply))):
            found += filter(self._part.accepts, self._part.fields.names(named.key, named.rules, field))
            if not number % FIELDS_AT_ONCE:
                yield
        return found

    def _continue(self, result: RawReply) -> None:
        """Send the next reads; without any, reply the names. result: empty, or an error."""
        if is_error(result):
            self.finish(result, self._epochs)
            return
        if not self._reads:
            self.finish(raw_reply_of([b"*%d\r\n" % len(self._found), *self._found]), self._epochs)
            return
        reads = [self._reads.popleft() for _ in range(min(READS_AT_ONCE, len(self._reads)))]
        both = ReplyAggregator(len(reads), partial(self._take, reads), self, self.READS, self._defer, takes_errors=True)
        for number, read in enumerate(reads):
            both.attempt(self._to_owner, read.key, read.request, both, number)

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
