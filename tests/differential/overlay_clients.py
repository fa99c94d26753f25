"""Clients of an overlay, each with a twin at the reference that sends the same, and the comparison of what they get."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from select import select

from compat.conformance.wire import Connection, Reply, Words, request, requests
from compat.waiting import eventually
from tests.differential.overlay_requests import MOVED_PREFIX, NOT_IN_CLUSTERS, PREFERRED_BY_STATES, Line
from tests.worlds import World

OWNED = re.compile(rb"-ERR key '[^']+' is owned by state job:\w+\r\n")
ASYNC = (b"message", b"pmessage", b"smessage", b"invalidate", b"tracking-redir-broken")
# Hash tags whose slots are at different masters.
TAGS = (b"{a}", b"{b}")
DATABASES = 16
# Keys that a change of another field invalidates and notifies of, or that each read invalidates.
FACTS, BOARDS = b"fact/", b"board/"


class Side:
    """One connection of a client: to the world's program, or to the reference."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.id = connection.call("CLIENT", "ID").plain
        self.pushes: list[Reply] = []
        self._replies: list[Reply] = []

    def read(self) -> Reply:
        """Return the next reply; what is pushed before it is kept apart."""
        while not self._replies:
            self._add(self.connection.read())
        return self._replies.pop(0)

    def call(self, *words: object) -> Reply:
        """Send one request, and return its reply."""
        self.connection.send(request(*words))  # type: ignore[arg-type]
        return self.read()

    def has_reply(self) -> bool:
        """Read all that has arrived; return whether there is a reply in it."""
        while self.connection._buffered or select([self.connection], [], [], 0)[0]:
            self._add(self.connection.read())
        return bool(self._replies)

    def _add(self, frame: Reply) -> None:
        is_pushed = frame.type in ">*" and frame.value and frame.value[0].value in ASYNC
        (self.pushes if is_pushed else self._replies).append(frame)

    def pushed(self) -> Counter[object]:
        """Return what was pushed, read up to now: messages, and each invalidated key."""
        found: Counter[object] = Counter()
        for frame in self.pushes:
            kind, *rest = frame.plain
            if isinstance(rest[-1], bytes):
                found[frame.raw] += 1
            elif kind == b"tracking-redir-broken":  # with an id, which is another one at each side
                found[kind] += 1
            else:
                found.update((kind, key) for key in (rest[-1] if rest[-1] is not None else [None]))
        return found


class Client:
    """A client of the world, and its twin at the reference.

    may_repeat: keys that clients may have to read again without a change at the reference: a read of both backends had
    them, or a state has changed, which servers may report late, and again.
    """

    def __init__(self, world: World, number: int, protocol: int, may_repeat: set[bytes]) -> None:
        self._world, self._number, self.protocol, self._may_repeat = world, number, protocol, may_repeat
        self.through, self.alone = Side(world.connect()), Side(world.reference.connect())
        self.sides = self.through, self.alone
        for side in self.sides:
            assert not side.call("HELLO", protocol).is_error
        self.is_blocked = self.is_tracking = self.is_watching = False
        self._database = 0  # in which its next request is executed

    def leave(self) -> None:
        """Close both connections."""
        for side in self.sides:
            side.connection.__exit__()

    def facts(self) -> dict[str, str]:
        """Return what the reference knows of the client."""
        with self._world.reference.connect() as direct:
            row = direct.call("CLIENT", "LIST", "ID", self.alone.id).plain.decode()
        return dict(part.split("=", 1) for part in row.split())

    @property
    def is_subscribed(self) -> bool:
        """Whether it has subscriptions."""
        facts = self.facts()
        return any(facts[each] != "0" for each in ("sub", "psub", "ssub") if each in facts)

    @property
    def is_queueing(self) -> bool:
        """Whether it is in a transaction."""
        return self.facts()["multi"] != "-1"

    @property
    def is_free(self) -> bool:
        """Whether it may send any request, and each has one reply."""
        return not self.is_blocked and not self.is_queueing and not (self.protocol == 2 and self.is_subscribed)

    @property
    def is_plain(self) -> bool:
        """Whether it may send any request, and has no connection of its own."""
        return self.is_free and not (self.is_watching or self.is_tracking or self.is_subscribed)

    def ask(self, asked: Sequence[Line], cuts: Sequence[int] = (), count: int = 1, about: Client | None = None) -> None:
        """Send a pipeline in chunks to both, and compare the replies.

        count: the number of replies to each request. about: the client whose id replaces `<id>`.
        """
        sent = self._prepare(asked)
        data = requests(self._words(words, self.through, about) for words, _ in sent)
        at = 0
        for end in [*sorted(cut % len(data) for cut in cuts if data), len(data)]:
            self.through.connection.send(data[at:end])
            at = end
        # A request that is refused is one at the reference, too: it does nothing, and aborts a transaction.
        alone = [[b"SET"] if is_refused else self._words(words, self.alone, about) for words, is_refused in sent]
        self.alone.connection.send(requests(alone))
        expected = [self.alone.read() for _ in range(count * len(sent))]
        found = [self.through.read() for _ in expected]
        for (words, is_refused), one, other in zip(sent * count, found, expected, strict=True):
            if is_refused:
                is_owned = OWNED.fullmatch(one.raw) or (self.protocol == 2 and one.is_error)
                assert other.is_error and is_owned, (words, one.raw)
            else:
                assert one.raw == other.raw, (words, one.raw, other.raw)

    def ask_silently(self, asked: Sequence[Line], silence: Line) -> None:
        """Send requests whose replies are suppressed: all of them, or the first one."""
        if not (sent := self._prepare(asked)):
            return
        ends: list[Words] = [[b"CLIENT", b"REPLY", b"ON"], [b"PING", b"the end"]]
        for side in self.sides:
            words = [[b"SET"] if is_refused and side is self.alone else words for words, is_refused in sent]
            side.connection.send(requests([silence.words, *words, *ends]))
        for _ in ends:
            assert self.through.read().raw == self.alone.read().raw

    def greet(self, protocol: int) -> None:
        """Change the protocol of both."""
        for side in self.sides:
            assert not side.call("HELLO", protocol).is_error
        self.protocol = protocol

    def block(self, line: Line, is_blocked_alone: Callable[[], bool]) -> None:
        """Send a request that blocks, unless its key has something."""
        ((words, _),) = self._prepare([line])
        self.alone.connection.send(requests([words]))
        eventually(lambda: self.alone.has_reply() or is_blocked_alone())
        self.through.connection.send(requests([words]))
        if self.alone.has_reply():
            assert self.through.read().raw == self.alone.read().raw
        else:
            self.is_blocked = True

    def _prepare(self, asked: Sequence[Line]) -> list[tuple[Words, bool]]:
        """Return the requests, and whether each is refused because it would write a state's key."""
        facts = self.facts()
        if (is_queueing := facts["multi"] != "-1") is False:
            self._database = int(facts["db"])
        can_select = not (self._world.is_cluster or self.is_tracking or self.is_subscribed)
        sent = []
        for line in asked:
            words = [self._replaced(word, may_cross=not is_queueing and not self.is_watching) for word in line.words]
            name, *arguments = words
            is_queueing |= name == b"MULTI"
            if name == b"SELECT":
                if not can_select or (self.is_watching and not is_queueing):
                    continue
                if arguments[0].isdigit():
                    if is_queueing and int(arguments[0]) >= DATABASES:
                        continue  # only EXEC finds that it does not exist
                    self._database = int(arguments[0]) if int(arguments[0]) < DATABASES else self._database
            sent.append((words, line.refused_in == self._database))
            if self.is_tracking and (is_queueing or len(arguments) > 1):
                self._may_repeat.update(arguments)
        if self._world.is_cluster:
            in_one_slot = is_queueing or self.is_watching or any(words[0] == b"WATCH" for words, _ in sent)
            sent = [row for row in sent if may_be_sent_to_cluster(row[0], in_one_slot=in_one_slot)]
        return sent

    def _replaced(self, word: bytes, *, may_cross: bool) -> bytes:
        if b"<" not in word:
            return word
        own, other = (TAGS[self._number % 2], TAGS[1 - self._number % 2]) if self._world.is_cluster else (b"", b"")
        replacements = {b"<tag>": own, b"<other>": other if may_cross else own, b"<client>": b"%d" % self._number}
        for name, text in {**replacements, b"<cars>": self._world.cars}.items():
            word = word.replace(name, text)
        return word

    def _words(self, words: Words, side: Side, about: Client | None) -> Words:
        if about is None:
            return words
        number = about.sides[self.sides.index(side)].id
        return [word.replace(b"<id>", b"%d" % number) for word in words]

    def compare_pushes(self) -> None:
        """Wait until the client has got what its twin has: messages and invalidations.

        A state does not tell which field has changed, so clients are also notified of others.
        """
        expected = self.alone.pushed()

        def arrived() -> Counter[object]:
            assert not self.through.has_reply(), "a reply to no request"
            return self.through.pushed()

        found = eventually(arrived, lambda found: found >= expected, lambda: f"{expected - self.through.pushed()}")
        more = {each for each in found - expected if not self._may_be_more(each)}
        assert not more, more

    def _may_be_more(self, pushed: object) -> bool:
        """Return whether something may be pushed more often than at the reference."""
        if isinstance(pushed, tuple):
            _, key = pushed
            return key is not None and (key.startswith((FACTS, BOARDS)) or key in self._may_repeat)
        return isinstance(pushed, bytes) and b"__:" in pushed and FACTS in pushed


def may_be_sent_to_cluster(words: Words, *, in_one_slot: bool) -> bool:
    """Return whether a Redis Cluster answers a request as a single Redis does. in_one_slot: its keys are in one."""
    return not any(
        word in NOT_IN_CLUSTERS or word.startswith(MOVED_PREFIX) or (in_one_slot and word in PREFERRED_BY_STATES)
        for word in words
    )


def blocked_at(direct: Connection) -> int:
    """Return the number of a server's blocked clients."""
    found = re.search(rb"\r\nblocked_clients:(\d+)\r\n", direct.call("INFO", "clients").plain)
    assert found is not None
    return int(found[1])
