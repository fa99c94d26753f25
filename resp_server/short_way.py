"""The short way of a request: no parsing where the same bytes were asked before, one look-up for all where not.

A buffer is cut into requests as they were sent (see `protocol.wholes`). Those whose replies are ready are not looked
at any closer; the others are read, if they are of the commands that have a short cut, and looked up together. Where
the short way meets anything else it stops, having answered and counted exactly what is before; the general way goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import NamedTuple

from resp_server.commands.generic import SLICE_ENTRIES
from resp_server.commands.table import Command
from resp_server.errors import ReplyError
from resp_server.instance import Call, Found, Instance
from resp_server.protocol.replies import Sliced, encode
from resp_server.protocol.requests import RequestParser
from resp_server.protocol.session import Session
from resp_server.protocol.wholes import (
    GET_HEAD,
    Many,
    arguments_of,
    by_head,
    head,
    head_of,
    lone_key_of,
    many_of,
    pieces_of,
    second_of,
)
from resp_server.short_cuts import AMBIGUOUS, OF_MEMBERS, OfMembers, ShortCut, bodies, short_cuts
from resp_server.stats import Tally
from state_backend.errors import StoreError
from state_backend.slots import slot_of
from state_backend.store import LongText

# What is looked at in one go: about a millisecond if nothing is ready (measured: 2 us for a GET of 40 bytes).
BYTES_MAX = 16_384
# What bodies answer in one go (guess: of items that have to be looked for, a few milliseconds).
BODIES_BYTES_MAX = 64 << 10
# Larger values are read one by one, so that not much is held of replies at a time.
VALUE_BYTES_MAX = 4_096


class _Way(NamedTuple):
    """What is taken of a command under a name as typed, by its number of words.

    start: what its requests begin with, the `*` and the head. nothing: as in `ShortCut`; empty: there is none.
    """

    name: str
    nothing: bytes
    start: bytes
    tally: Tally


class _Body(NamedTuple):
    """A command whose body is asked, and how many words are behind its name."""

    command: Command
    arguments: int


class _Uncounted(Call):
    """Who calls a body: what is looked up is counted with all that is answered together. has_missed: nothing was."""

    has_missed = False

    def counted(self, found: Found) -> Found:
        self.has_missed = found is None
        return found


class _ManyFound(NamedTuple):
    """The reply to an MGET, what it was called, how many keys it asks for, and how many of them are missing."""

    reply: bytes
    name: str
    keys: int
    misses: int


class ShortWay:
    """The short way of the connections that speak one version of the protocol."""

    def __init__(self, instance: Instance, protocol: int) -> None:
        self._instance = instance
        self._stats = instance.stats
        self._cache = instance.replies[protocol]
        self._cuts = {
            head(cut.words, name.encode()): cut for cut in short_cuts(protocol) for name in (cut.name, cut.name.upper())
        }
        # Of commands whose bodies are asked: their names and how many words are behind these.
        self._bodies = {
            head(words, typed.encode()): _Body(command, words - 1)
            for name, words in bodies()
            for typed in (name, name.upper())
            if (command := instance.table.get(name.encode())) is not None
        }
        self._of_members = {
            head(3, typed.encode()): each for each in OF_MEMBERS for typed in (each.name, each.name.upper())
        }
        self._call = _Uncounted(Session(0, "", "", instance.users.default, 0), instance)
        self._protocol = protocol
        # Of what is in hand, the requests whose replies do not tell by themselves whether something was found: if not.
        self._ambiguous: dict[bytes, bool] = {}
        # Those taken so far, by their heads, and what they answer where nothing is found: all there is to count.
        self._ways: dict[bytes, _Way] = {}
        self._nothings: tuple[bytes, ...] = ()
        self._only: _Way | None = None

    def answer(self, session: Session, data: bytes) -> tuple[bytes, bytes]:
        """Answer requests from the front of a buffer; return the replies, and what of the buffer is left.

        The instance's view was renewed for it. Nothing is taken of a connection that is not plain.
        """
        if not session.is_plain or self._instance.is_loading:
            return b"", data
        return self.take(session, data)

    def take(self, session: Session, data: bytes) -> tuple[bytes, bytes]:
        """Answer requests that the client may make; see `answer`."""
        started_ns = perf_counter_ns()
        if data.count(b"*") == 1 and data.startswith(b"*"):
            reply = self._lone(session, data[1:], started_ns)
            if reply:
                return reply, b""
        text = data if len(data) <= BYTES_MAX else data[:BYTES_MAX]
        wholes = pieces_of(text)
        if wholes[0]:
            return b"", data  # an inline command
        del wholes[0]
        many: dict[bytes, _ManyFound] = {}
        self._ambiguous.clear()
        try:
            replies = self._ready(wholes)
            if not all(replies):
                if replies[0] is None and not self._has_cut(head_of(wholes[0])):
                    return b"", data
                many = self._fill(wholes, replies)
                if None in replies:
                    del wholes[replies.index(None) :], replies[len(wholes) :]
                    text = data[: sum(map(len, wholes)) + len(wholes)]
            reply = b"".join(replies)  # type: ignore[arg-type]
        except (ReplyError, StoreError):
            return b"", data  # the general way meets it again, and answers it
        except Exception as error:
            self._instance.report(error)
            return b"", data
        if wholes:
            elapsed_ns = perf_counter_ns() - started_ns
            self._count(session, text, wholes, replies, many, elapsed_ns)
            if elapsed_ns >= self._instance.noted_ns:
                self._note(session, wholes, elapsed_ns)
        return reply, data[len(text) :]

    def _lone(self, session: Session, whole: bytes, started_ns: int) -> bytes:
        """Answer a request that came alone, as most do, without `answer`'s lists; nothing where it is left to those."""
        try:
            reply: bytes | None = self._ready((whole,))[0] or self._lone_get(whole)
            if reply:
                way = self._only or self._ways[head_of(whole)]
                name, tally, keys, misses = way.name, way.tally, 1, int(reply in self._nothings)
            elif command := self._of_members.get(its_head := head_of(whole)):
                reply, misses = self._lone_member(whole, its_head, command)
                name, tally, keys = command.name, self._ways[its_head].tally, 1
            elif many := self._lone_mget(whole, its_head):
                reply, name, keys, misses = many
                tally = self._stats.tally(name)
        except (ReplyError, StoreError):
            return b""  # the general way meets it again, and answers it
        except Exception as error:
            self._instance.report(error)
            return b""
        if not reply:
            return b""
        elapsed_ns = self._count_lone(session, name, tally, keys, misses, started_ns)
        if elapsed_ns >= self._instance.noted_ns:
            self._note(session, [whole], elapsed_ns)
        return reply

    def _count_lone(self, session: Session, name: str, tally: Tally, keys: int, misses: int, started_ns: int) -> int:
        """Count a request as the general way does, and return how long it took."""
        elapsed_ns = perf_counter_ns() - started_ns
        tally.calls += 1
        tally.nanoseconds += elapsed_ns
        tally.took[elapsed_ns.bit_length()] += 1
        session.last_command = name
        session.active_ms = self._instance.view.now_ms
        self._cache.looks += keys
        self._stats.hits += keys - misses
        self._stats.misses += misses
        return elapsed_ns

    def _note(self, session: Session, wholes: Sequence[bytes], elapsed_ns: int) -> None:
        """Keep what took long: a request, or the first of some that were answered together, and how many these are."""
        words: list[bytes] = list(next(iter(RequestParser().feed(b"*" + wholes[0]))))
        command = self._instance.table.find(words)
        if len(wholes) > 1:
            words.append(b"... (%d more requests)" % (len(wholes) - 1))
        self._instance.note(session, command, words, elapsed_ns)

    def _lone_get(self, whole: bytes) -> bytes:
        """Return the reply to a whole GET of a key that is no other's kind, in a job in which nothing expires."""
        key = lone_key_of(whole)
        if not key:
            return b""
        snapshot = self._instance.view.at(key)  # a key that is another node's is an error there
        if snapshot.applied.expiring:
            return b""
        text = snapshot.text(key)
        cut = self._taken(GET_HEAD)
        if isinstance(text, LongText):
            return b""
        reply = cut.nothing if text is None else b"$%d\r\n%b\r\n" % (len(text), text)
        self._cache.add(GET_HEAD, {whole: reply} if self._cache.is_held else {}, 1)
        return reply

    def _lone_member(self, whole: bytes, its_head: bytes, command: OfMembers) -> tuple[bytes, int]:
        """Return the reply to a request about a member, if it is whole, and 1 if nothing was found."""
        ((key, member),) = arguments_of((whole,), its_head, 2)
        (found,) = command.found(self._instance.view.at(key), key, (member,))
        if its_head not in self._ways:
            self._take_way(its_head, command.name, b"")
        self._cache.add(its_head, {}, 1)
        is_miss = found is None
        return encode(command.nothing if is_miss else found, self._protocol), int(is_miss)

    def _lone_mget(self, whole: bytes, its_head: bytes) -> _ManyFound | None:
        many = many_of(its_head)
        return self._look_up_many([(many, whole)]).get(whole) if many else None

    def _has_cut(self, its_head: bytes) -> bool:
        if its_head in self._cuts or its_head in self._bodies or its_head in self._of_members:
            return True
        return many_of(its_head) is not None

    def _ready(self, wholes: Sequence[bytes]) -> list[bytes | None]:
        """Return ready replies, None for what is not ready; what an epoch changed leaves them before they are seen."""
        self._instance.view.freshen(map(second_of, wholes), len(wholes))
        held = self._cache.held
        return [held.get(wholes[0])] if len(wholes) == 1 else list(map(held.get, wholes))

    def _fill(self, wholes: Sequence[bytes], replies: list[bytes | None]) -> dict[bytes, _ManyFound]:
        """Look up what is not ready, and put in what is found; return the MGETs among it."""
        asked: list[tuple[Many, bytes]] = []
        for its_head, some in by_head(_missing(wholes, replies)):
            if its_head in self._cuts:
                _put(wholes, replies, some, self._look_up(its_head, some))
            elif its_head in self._of_members:
                _put(wholes, replies, some, self._look_up_members(its_head, some))
            elif its_head in self._bodies:
                _put(wholes, replies, some, self._ask_body(its_head, some))
            elif its_many := many_of(its_head):
                asked += [(its_many, whole) for whole in some]
        if not asked:
            return {}
        many = self._look_up_many(asked)
        _put(wholes, replies, list(many), [each.reply for each in many.values()])
        return many

    def _look_up(self, its_head: bytes, wholes: Sequence[bytes]) -> list[bytes | None]:
        """Return the replies to requests of one command, as far as they are whole; None for those left to others."""
        cut = self._taken(its_head)
        asked = arguments_of(wholes, its_head, cut.words - 1)
        keys = [words[0] for words in asked]
        values, expiring, left = self._instance.view.values(keys, cut.kind, VALUE_BYTES_MAX)
        found = cut.replies(values, asked)
        if left:
            found = [None if key in left else reply for key, reply in zip(keys, found, strict=True)]
        if expiring:
            rows = zip(wholes, keys, found, strict=False)
            lasting = {whole: reply for whole, key, reply in rows if key not in expiring}
        else:
            lasting = dict(zip(wholes, found, strict=False)) if self._cache.is_held else {}
        self._cache.add(its_head, lasting, len(keys))
        return found

    def _ask_body(self, its_head: bytes, wholes: Sequence[bytes]) -> list[bytes | None]:
        """Return what a command's body answers to requests, as far as they are whole; None for those left to others."""
        command, arguments = self._bodies[its_head]
        if its_head not in self._ways:
            self._take_way(its_head, command.name, b"")
        view = self._instance.view
        found: list[bytes | None] = []
        lasting: dict[bytes, bytes | None] = {}
        size = 0
        for whole, words in zip(wholes, arguments_of(wholes, its_head, arguments), strict=False):
            if size > BODIES_BYTES_MAX:
                break
            reply = self._reply_of_body(command, words)
            found.append(reply)
            size += len(reply or b"")
            if reply in AMBIGUOUS:
                self._ambiguous[whole] = self._call.has_missed
            elif reply is not None and not view.at(words[0]).applied.expiring:
                lasting[whole] = reply
        self._cache.add(its_head, lasting if self._cache.is_held else {}, len(found))
        return found

    def _look_up_members(self, its_head: bytes, wholes: Sequence[bytes]) -> list[bytes | None]:
        """Return the replies to requests about members of keys, as far as they are whole, together for each key."""
        command = self._of_members[its_head]
        if its_head not in self._ways:
            self._take_way(its_head, command.name, b"")
        asked = arguments_of(wholes, its_head, 2)
        by_key: dict[bytes, list[int]] = {}
        for index, (key, _) in enumerate(asked):
            by_key.setdefault(key, []).append(index)
        replies: list[bytes | None] = [None] * len(asked)
        for key, places in by_key.items():
            try:
                found = command.found(self._instance.view.at(key), key, [asked[index][1] for index in places])
            except (ReplyError, StoreError):
                continue
            for index, each in zip(places, found, strict=True):
                replies[index] = reply = encode(command.nothing if each is None else each, self._protocol)
                if reply in AMBIGUOUS:
                    self._ambiguous[wholes[index]] = each is None
        self._cache.add(its_head, {}, len(asked))
        return replies

    def _reply_of_body(self, command: Command, words: Sequence[bytes]) -> bytes | None:
        try:
            reply = command.execute(self._call, (b"", *words))
        except (ReplyError, StoreError):
            return None
        if isinstance(reply, Sliced):
            reply.release()
            return None
        return encode(reply, self._protocol)

    def _look_up_many(self, asked: Sequence[tuple[Many, bytes]]) -> dict[bytes, _ManyFound]:
        """Return the replies to MGETs, as far as they are whole: arrays of what GET answers, looked up together."""
        gets: list[bytes] = []
        taken = [(many, whole) for many, whole in asked if self._add_gets(many, whole, gets)]
        if not taken:
            return {}
        replies = self._ready(gets)
        if not all(replies):
            missing = _missing(gets, replies)
            _put(gets, replies, missing, self._look_up(GET_HEAD, missing))
        found: dict[bytes, _ManyFound] = {}
        nothing, end = self._cuts[GET_HEAD].nothing, 0
        for many, whole in taken:
            some = replies[end : end + many.keys]
            end += many.keys
            if None not in some:
                reply = b"*%d\r\n%b" % (many.keys, b"".join(some))  # type: ignore[arg-type]
                found[whole] = _ManyFound(reply, many.name, many.keys, some.count(nothing))
        return found

    def _add_gets(self, many: Many, whole: bytes, gets: list[bytes]) -> bool:
        """Add the GETs that an MGET stands for; False if it is left to others."""
        if not 0 < many.keys <= SLICE_ENTRIES or not whole.startswith(many.start):
            return False
        some = many.gets(whole)
        is_of_one_slot = many.name == "mget" and self._instance.cluster is not None
        if len(some) != many.keys or (is_of_one_slot and _slots_of(some) > 1):
            return False
        gets += some
        return True

    def _taken(self, its_head: bytes) -> ShortCut:
        """Return a short cut, from now on among those to be counted."""
        cut = self._cuts[its_head]
        if its_head not in self._ways:
            self._take_way(its_head, cut.name, cut.nothing)
        return cut

    def _take_way(self, its_head: bytes, name: str, nothing: bytes) -> None:
        self._ways[its_head] = _Way(name, nothing, b"*" + its_head, self._stats.tally(name))
        self._nothings = tuple({way.nothing for way in self._ways.values() if way.nothing})
        self._only = self._ways[its_head] if len(self._ways) == 1 else None

    def _count(
        self,
        session: Session,
        text: bytes,
        wholes: Sequence[bytes],
        replies: Sequence[bytes | None],
        many: Mapping[bytes, _ManyFound],
        elapsed_ns: int,
    ) -> None:
        """Count what was answered as the general way does; the time is shared out by the number of calls."""
        keys = calls = len(wholes)
        misses = 0
        for nothing in self._nothings:
            misses += replies.count(nothing)
        if self._ambiguous:
            for whole, reply in zip(wholes, replies, strict=True):
                if whole in self._ambiguous:
                    misses += self._ambiguous[whole] - (reply in self._nothings)
        if many:
            mgets = [many[whole] for whole in wholes if whole in many]
            for name in {each.name for each in mgets}:
                count = sum(each.name == name for each in mgets)
                self._stats.tally(name).count(count, elapsed_ns * count // calls)
            keys += sum(each.keys for each in mgets) - len(mgets)
            misses += sum(each.misses for each in mgets)
        if self._only is not None and not many:
            self._only.tally.count(calls, elapsed_ns)
            session.last_command = self._only.name
        else:
            for way in self._ways.values():
                count = text.count(way.start)
                if count:
                    way.tally.count(count, elapsed_ns * count // calls)
            last = self._ways.get(head_of(wholes[-1]))
            session.last_command = many[wholes[-1]].name if last is None else last.name
        self._cache.looks += keys
        self._stats.hits += keys - misses
        self._stats.misses += misses
        session.active_ms = self._instance.view.now_ms


def _slots_of(gets: Sequence[bytes]) -> int:
    """Return of how many slots the keys of GETs are: a cluster's node reads those of one slot at a time."""
    return len({slot_of(lone_key_of(each)) for each in gets})


def _missing(wholes: Sequence[bytes], replies: Sequence[bytes | None]) -> Sequence[bytes]:
    if replies.count(None) == len(replies):
        return wholes
    return [whole for whole, reply in zip(wholes, replies, strict=True) if reply is None]


def _put(
    wholes: Sequence[bytes], replies: list[bytes | None], asked: Sequence[bytes], found: Sequence[bytes | None]
) -> None:
    """Put what was found for some requests, in their order and as far as it goes, where replies are missing."""
    if asked is wholes:
        replies[: len(found)] = found
        return
    by_whole = dict(zip(asked, found, strict=False))
    replies[:] = [by_whole.get(each) if reply is None else reply for each, reply in zip(wholes, replies, strict=True)]
