"""The short way of a connection whose user may not do everything: what it may ask for is answered as for anybody.

Requests are looked at as they were sent (see `protocol.wholes`): whether each is of a command that the user may run,
and names a key that it may read. Where one is not, or that cannot be told quickly, the short way ends, and the general
way checks in Redis' order. What passes here is safe whatever the bytes are: the short way answers a request only if it
has read it as the one that was checked, the second word being its key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import cast

from resp_server.access.rules import Selector, Use, User, alternatives, short_ones
from resp_server.commands.table import CommandTable
from resp_server.instance import Instance
from resp_server.protocol.session import Session
from resp_server.protocol.wholes import head, head_of, many_of, second_of
from resp_server.short_cuts import short_cuts
from resp_server.short_way import BYTES_MAX, ShortWay


class CheckedWay:
    """A short way, and the checks before it."""

    def __init__(self, way: ShortWay, instance: Instance) -> None:
        self._way = way
        self._instance = instance

    def answer(self, session: Session, data: bytes) -> tuple[bytes, bytes]:
        """Answer as the short way does, as far as the user may be answered."""
        if not session.is_ordinary or self._instance.is_loading:
            return b"", data
        allowed: QuickCheck | None = session.user.quick
        if allowed is None:
            allowed = session.user.quick = QuickCheck(cast("User", session.user), self._instance.table)
        if data.count(b"*") == 1 and data.startswith(b"*"):
            return self._way.take(session, data) if allowed.is_allowed(data[1:]) else (b"", data)
        text = data if len(data) <= BYTES_MAX else data[:BYTES_MAX]
        wholes = text.split(b"*")
        if wholes.pop(0):
            return b"", data  # an inline command
        if text is data and allowed.are_of_two_words(wholes):
            return self._way.take(session, data)
        size = sum(len(whole) + 1 for whole in takewhile(allowed.is_allowed, wholes))
        if not size:
            return b"", data
        reply, rest = self._way.take(session, data[:size])
        return reply, rest + data[size:]


class QuickCheck:
    """What a user may ask for by requests that have a short cut."""

    def __init__(self, user: User, table: CommandTable) -> None:
        self._selectors = [_OfSelector(each, table) for each in user.selectors]
        patterns = [pattern for each in self._selectors for pattern in each.of_two_words]
        # Requests of a name and a key are told by one look.
        self._of_two_words = re.compile(b"|".join(patterns) or b"(?!)", re.DOTALL).fullmatch

    def are_of_two_words(self, wholes: Sequence[bytes]) -> bool:
        """Tell whether requests are all of a name and a key, and may be answered."""
        return all(map(self._of_two_words, wholes))

    def is_allowed(self, whole: bytes) -> object:
        """Tell whether a request, as it was sent, may be answered."""
        return self._of_two_words(whole) or any(each.is_allowed(whole) for each in self._selectors)


class _OfSelector:
    """The same of one selector."""

    def __init__(self, selector: Selector, table: CommandTable) -> None:
        cuts = [cut for cut in short_cuts(2) if _may_run(selector, table, cut.name.encode())]
        heads = {words: _heads(words, [cut.name for cut in cuts if cut.words == words]) for words in {2, 3, 4}}
        patterns = short_ones(selector.patterns(Use.READ))  # what only a longer one matches goes the general way
        self._heads = frozenset(each for words, some in heads.items() if words > 2 for each in some)
        self._takes_key = re.compile(alternatives(patterns) if patterns else b"(?!)", re.DOTALL).fullmatch
        self._takes = {name: _may_run(selector, table, name.encode()) for name in ("mget", "state|mget")}
        self.of_two_words: Sequence[bytes] = [
            rb"(?:%b)[0-9]+\r\n(?:%b)\r\n" % (b"|".join(map(re.escape, heads[2])), alternatives(patterns))
        ] * bool(heads[2] and patterns)

    def is_allowed(self, whole: bytes) -> bool:
        """Tell whether a request of more words than two may be answered."""
        its_head = head_of(whole)
        if its_head in self._heads:
            return bool(self._takes_key(second_of(whole)))
        many = many_of(its_head)
        if many is None or not self._takes[many.name] or not whole.startswith(many.start):
            return False
        return all(self._takes_key(second_of(each)) for each in many.gets(whole))


def _may_run(selector: Selector, table: CommandTable, name: bytes) -> bool:
    found = table.get(name)
    return found is not None and selector.allows(found)


def _heads(words: int, names: Sequence[str]) -> list[bytes]:
    return [head(words, each.encode()) for name in names for each in (name, name.upper())]
