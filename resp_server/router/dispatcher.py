"""A proxy's requests: those that it answers itself as any server does, and those that it asks the servers for.

What a client sent at once, up to a batch, is asked at once; the replies come together and in order. The next batch of
the same client waits for it, which bounds what one client can have waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from resp_server.commands.generic import cursor
from resp_server.commands.table import Command
from resp_server.dispatcher import SPELLINGS_MAX, Dispatcher, Later
from resp_server.errors import ClusterDownError, PlainError, ReplyError, TryAgainError, not_served
from resp_server.instance import Call, Instance
from resp_server.protocol.replies import Pending, Sliced, SlicedEncoder, encode
from resp_server.protocol.requests import Request
from resp_server.protocol.session import Session
from resp_server.router.frames import pack
from resp_server.router.routes import Merge, Way, lone_key_at, merge_all, scan_reply, split, way_of
from resp_server.router.upstream import LONG_TIMEOUT_S, Ask, TakesReplies, Upstreams
from resp_server.short_way import ShortWay
from resp_server.stats import Tally
from state_backend.slots import HASH_BITS, SLOTS, slot_of

# Longer than any question waits, so that it ends nothing unless something is wrong here.
BATCH_S_MAX = 2 * LONG_TIMEOUT_S
# What the replies of one batch may be together; they are held until all are there (guess).
BATCH_BYTES_MAX = 512 << 20

LOCATE = "state|locate"
TOPOLOGY = pack((b"CLUSTER", b"INFO"))


class NoShortWay(ShortWay):
    """No request has a short way: nothing is here."""

    def answer(self, session: Session, data: bytes) -> tuple[bytes, bytes]:
        return b"", data


class Batch(Pending):
    """Replies to requests that came together, in their order."""

    def __init__(self) -> None:
        super().__init__(BATCH_S_MAX, self.joined)
        self._replies: list[bytes | None] = []
        self._silenced: set[int] = set()
        self._bytes = 0
        self._is_sealed = False
        self.missing = 0

    def add(self, reply: bytes) -> None:
        """Add a reply that is there."""
        self._replies.append(reply)

    def expect(self, is_silent: bool = False) -> int:
        """Add one that is to come; return its number. One that is silent is waited for, and left out."""
        self.missing += 1
        self._replies.append(None)
        if is_silent:
            self._silenced.add(len(self._replies) - 1)
        return len(self._replies) - 1

    def put(self, index: int, reply: bytes) -> None:
        """Take a reply that was to come."""
        if self._replies[index] is not None:
            return
        self._bytes += len(reply)
        if self._bytes > BATCH_BYTES_MAX:
            error = PlainError(f"replies of more than {BATCH_BYTES_MAX} bytes were asked for at once")
            reply = b"-%b\r\n" % error.line
        self._replies[index] = b"" if index in self._silenced else reply
        self.missing -= 1
        if not self.missing and self._is_sealed:
            self.resolve(self.joined)

    def seal(self) -> None:
        """Say that nothing is added any more."""
        self._is_sealed = True

    def joined(self) -> bytes:
        """Return the replies as they are sent."""
        late = b"-%b\r\n" % PlainError("no server answered in time").line
        return b"".join([late if reply is None else reply for reply in self._replies])


class Joined:
    """Answers of several servers that make one reply. The first error among them is the reply."""

    def __init__(self, count: int, merge: Merge, whose: TakesReplies, index: int) -> None:
        self._replies: list[bytes | None] = [None] * count
        self._missing = count
        self._merge, self._whose, self._index = merge, whose, index

    def put(self, index: int, reply: bytes) -> None:
        self._replies[index] = reply
        self._missing -= 1
        if self._missing:
            return
        replies = [each for each in self._replies if each is not None]
        error = next((each for each in replies if each[:1] == b"-"), None)
        self._whose.put(self._index, self._merge(replies) if error is None else error)


class Survey:
    """A question about the keys of several servers, all of them or a cursor's.

    It is answered only if each server shows the topology that the proxy knows, before and after: else keys of a slot
    that moves could be told twice, or not at all. So long as they do not agree it is asked again, until its deadline.
    """

    def __init__(
        self, upstreams: Upstreams, request: Request, protocol: int, way: Way, whose: TakesReplies, index: int
    ):
        self._upstreams = upstreams
        self._slots = upstreams.slots
        self._name = request[0].lower().decode("latin-1")
        self._request = tuple(request)
        self._protocol = protocol
        self._way = way
        self._whose, self._index = whose, index
        self._is_long = way is Way.ALL
        self._deadline_s = upstreams.deadline_s(self._is_long)
        # Servers that do not agree for longer than one look-up may take will not for a long time.
        self._agree_s = upstreams.deadline_s()
        self._cursor = cursor(request[1]) if way is Way.SCAN else 0

    def ask(self) -> None:
        """Ask all that are concerned."""
        if not self._slots.is_whole:
            self._end(ClusterDownError())
            return
        self._version = self._slots.version
        self._at = min(self._cursor >> HASH_BITS, SLOTS - 1)
        self._last = self._slots.last_of_run(self._at)
        counts = self._slots.counts
        self._servers = [str(self._slots.told[self._at])] if self._way is Way.SCAN else list(counts)
        self._weights = [counts[each] for each in self._servers]
        words = (self._request[0], b"%d" % self._cursor, *self._request[2:]) if self._way is Way.SCAN else self._request
        packed = pack(words)
        self._replies: list[bytes | None] = [None] * (3 * len(self._servers))
        self._missing = len(self._replies)
        for at, address in enumerate(self._servers):
            for place, each in enumerate((TOPOLOGY, packed, TOPOLOGY), 3 * at):
                ask = Ask(each, 0, self._protocol, self._deadline_s, self, place, address, self._is_long)
                self._upstreams.send(ask)

    def put(self, index: int, reply: bytes) -> None:
        """Take one server's answer."""
        self._replies[index] = reply
        self._missing -= 1
        if not self._missing:
            self._done([each for each in self._replies if each is not None])

    def _done(self, replies: Sequence[bytes]) -> None:
        error = next((each for each in replies if each[:1] == b"-"), None)
        shown = b"\r\ncluster_current_epoch:%d\r\n" % self._version
        others = [at // 3 for at, each in enumerate(replies) if at % 3 != 1 and shown not in each]
        if error is not None:
            self._whose.put(self._index, error)
        elif others or self._version != self._slots.version:
            for at in set(others):
                self._upstreams.refresh(self._servers[at])
            if not self._upstreams.later(self._agree_s, self.ask):
                self._end(TryAgainError("the servers do not show the same version of the topology"))
        elif self._way is Way.SCAN:
            self._whose.put(self._index, scan_reply(replies[1], self._last, SLOTS))
        else:
            self._whose.put(self._index, merge_all(self._name, replies[1::3], self._weights))

    def _end(self, error: TryAgainError | ClusterDownError) -> None:
        self._whose.put(self._index, b"-%b\r\n" % error.line)


class Rule(NamedTuple):
    """What becomes of a command under a name as typed. lone_key_at: 0 if it is not as simple as that."""

    command: Command
    way: Way
    lone_key_at: int
    tally: Tally


class ProxyDispatcher(Dispatcher):
    """Answers requests for one proxy."""

    def __init__(self, instance: Instance, upstreams: Upstreams) -> None:
        super().__init__(instance)
        self.short_ways = {protocol: NoShortWay(instance, protocol) for protocol in instance.replies}
        self._upstreams = upstreams
        self._rules: dict[bytes, Rule | None] = {}

    def answer(self, call: Call, requests: Iterator[Request], out: list[bytes]) -> Later | None:
        session, upstreams, rules = call.session, self._upstreams, self._rules
        batch = Batch()
        deadline_s = upstreams.deadline_s()
        for request in requests:
            name = request[0]
            rule = rules[name] if name in rules else self._learn_rule(name)
            if rule is not None and rule.lone_key_at and session.is_plain and _fits(rule, request):
                rule.tally.calls += 1
                session.last_command = rule.command.name
                slot = slot_of(request[rule.lone_key_at])
                packed = pack(request)
                upstreams.send(Ask(packed, slot, session.protocol, deadline_s, batch, batch.expect()))
                continue
            session.begin_command()
            if not self._ask(call, request, batch):
                later = self._answer_here(call, request, batch)
                if later is not None:
                    out.append(batch.joined())
                    return later
            if session.is_closing:
                break
        batch.seal()
        if batch.missing:
            return batch
        out.append(batch.joined())
        return None

    def _check(self, call: Call, command: Command, request: Request) -> None:
        super()._check(call, command, request)
        if command.facts.group == "transactions" or command.name in ("state|at", "state|expect"):
            raise not_served(command.name)  # what is queued would be answered here, where nothing is

    def pending_reply(self, call: Call, pending: Pending) -> bytes:
        if isinstance(pending, Batch):
            return pending.joined()
        return super().pending_reply(call, pending)

    def _learn_rule(self, name: bytes) -> Rule | None:
        command = self._table.get(name) if b"|" not in name else None
        rule = None
        if command is not None:
            way = way_of(command)
            rule = Rule(command, way, lone_key_at(command) if way is Way.KEYS else 0, self._stats.tally(command.name))
        if len(self._rules) < SPELLINGS_MAX:
            self._rules[name] = rule
        return rule

    def _ask(self, call: Call, request: Request, batch: Batch) -> bool:
        """Ask the servers; False if the request is answered, or refused, here."""
        session = call.session
        try:
            command = self._table.find(request)
            command.check_arity(request)
        except ReplyError:
            return False
        way = way_of(command)
        # The other databases are empty everywhere, so here as well.
        if way is Way.HERE or session.db != 0 or not session.is_authenticated:
            return False
        try:
            is_asked = self._ask_of(command, way, request, session, batch)
        except ReplyError as error:
            batch.add(b"" if session.is_silent else self.error_reply(error))
            return True
        if is_asked:
            session.last_command = command.name
            self._stats.tally(command.name).calls += 1
        return is_asked

    def _ask_of(self, command: Command, way: Way, request: Request, session: Session, batch: Batch) -> bool:
        protocol, is_silent, deadline_s = session.protocol, session.is_silent, self._upstreams.deadline_s()
        if way is Way.ANY:
            address = next(iter(self._upstreams.slots.counts), None)
            packed = pack(request)
            self._upstreams.send(Ask(packed, 0, protocol, deadline_s, batch, batch.expect(is_silent), address))
            return True
        if way is not Way.KEYS:
            if way is Way.SCAN:
                cursor(request[1])
            Survey(self._upstreams, request, protocol, way, batch, batch.expect(is_silent)).ask()
            return True
        found = split(command.facts, request)
        if found is None:
            return False
        parts, merge = found
        if command.name == LOCATE:
            merge = partial(self._with_address, slot=parts[0].slot)
        joined = Joined(len(parts), merge, batch, batch.expect(is_silent))
        for place, part in enumerate(parts):
            packed = pack(part.request)
            self._upstreams.send(Ask(packed, part.slot, protocol, deadline_s, joined, place))
        return True

    def _with_address(self, replies: Sequence[bytes], slot: int) -> bytes:
        """Name the server in what it said of where a key is."""
        return replies[0].replace(
            encode(b"this server", 2), encode(str(self._upstreams.slots.owners[slot]).encode(), 2)
        )

    def _answer_here(self, call: Call, request: Request, batch: Batch) -> Later | None:
        """Answer a request as a server without keys; one that comes in steps is returned if nothing is before it."""
        reply = self.reply_to(call, request)
        if isinstance(reply, Sliced):
            if call.session.is_silent:
                reply.release()
                return None
            if not batch.missing:
                return reply
            reply = _whole(reply, call.session.protocol)
        elif isinstance(reply, Pending):
            reply = super().pending_reply(call, reply)  # its own answer alone: there are no other processes
        assert isinstance(reply, bytes)
        batch.add(b"" if call.session.is_silent else reply)
        return None


def _fits(rule: Rule, request: Request) -> bool:
    arity = rule.command.facts.arity
    return len(request) == arity if arity > 0 else len(request) >= -arity


def _whole(sliced: Sliced, protocol: int) -> bytes:
    """Return a reply in steps at once: behind others that have to be waited for. Here it is COMMAND's at most."""
    encoder = SlicedEncoder(sliced, protocol)
    steps = []
    try:
        while not encoder.is_done:
            steps.append(encoder.step())
    finally:
        encoder.close()
    return b"".join(steps)
