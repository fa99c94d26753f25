"""Groups the names of keys by patterns while they are read: session:ada, session:bob, ... are `session:<a>`. Pure.

Names are split at separators, into a tree with a level for each part. A part that varies stands for all of them:
numbers and ids from the start, any other part once a place has more names than a person would give it. So the tree is
small, whatever the names are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from string import ascii_lowercase
from typing import NamedTuple

SEPARATORS = re.compile(r"([:/|.,;#@{}]+)")
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{8,}|\d+", re.IGNORECASE)
# Texts that no key format has as a literal, or no rule: bytes that are not UTF-8, marks of placeholders and patterns.
NO_LITERAL = re.compile(r"[\ud800-\udfff<>*]")
VARIES = "<>"
# Different parts at one place in names, and at the first place, where applications have their names (guesses). With
# more parts the place varies.
PARTS_MAX = 12
FIRST_PARTS_MAX = 64
# More names than this that differ only in their last part are one group (guess).
SINGLE_NAMES_MAX = 3
# Levels of the tree; what is behind the last one varies. A longer name is cut (guesses).
LEVELS_MAX = 24
NAME_CHARACTERS_MAX = 512
EXAMPLES_MAX = 3


class FoundKey(NamedTuple):
    """A key, and the number of the upstream's node that has it."""

    node: int
    name: bytes


class NameGroup(NamedTuple):
    """Keys whose names are alike.

    Args:
        pattern: Written as a key format.
    """

    pattern: str
    key_count: int
    examples: Sequence[FoundKey]


class _Part:
    """A part of names, and the parts that follow it.

    Args:
        text: The part if all names have the same; None: it varies.
        shape: The part, with `VARIES` in place of ids.

    Attributes:
        count: The names that end here.
    """

    __slots__ = ("count", "examples", "following", "parts_max", "shape", "text")

    def __init__(self, shape: str, text: str | None, parts_max: int = PARTS_MAX) -> None:
        self.shape, self.text, self.parts_max = shape, text, parts_max
        self.count = 0
        self.examples: list[FoundKey] = []
        self.following: dict[str, _Part] = {}

    def follow(self, text: str) -> _Part:
        """Return the following part for a text; add it if it is missing."""
        is_literal = NO_LITERAL.search(text) is None
        shape = ID.sub(VARIES, text) if is_literal else VARIES
        if VARIES in self.following:
            shape = VARIES
        part = self.following.get(shape)
        if part is None:
            part = self.following[shape] = _Part(shape, text if is_literal else None)
            if len(self.following) > self.parts_max:
                part = self.join(list(self.following.values()))
        elif part.text != text:
            part.text = None
        return part

    def join(self, parts: Sequence[_Part]) -> _Part:
        """Replace parts that follow by one that varies."""
        joined = _Part(VARIES, None)
        for part in parts:
            del self.following[part.shape]
            joined.take(part)
        self.following[VARIES] = joined
        return joined

    def take(self, other: _Part) -> None:
        """Add the names of another part."""
        self.count += other.count
        self.examples = [*self.examples, *other.examples][:EXAMPLES_MAX]
        for shape, part in other.following.items():
            mine = self.following.get(VARIES) or self.following.get(shape)
            if mine is None:
                self.following[shape] = part
                if len(self.following) > self.parts_max:
                    self.join(list(self.following.values()))
            else:
                mine.text = mine.text if mine.text == part.text else None
                mine.take(part)

    def join_single_names(self) -> None:
        """Join parts that end one name each, if they are many."""
        for part in self.following.values():
            part.join_single_names()
        single = [part for part in self.following.values() if part.count == 1 and not part.following]
        if len(single) > SINGLE_NAMES_MAX and VARIES not in self.following:
            self.join(single)

    def groups(self, before: Sequence[str | None]) -> Iterator[NameGroup]:
        """Iterate over the groups of the names that end here, or follow."""
        if self.count:
            yield NameGroup(_pattern(before), self.count, self.examples)
        for part in self.following.values():
            yield from part.groups([*before, *part.texts()])

    def texts(self) -> Iterator[str | None]:
        """Iterate over the texts of the part; None is a text that varies."""
        if self.text is not None:
            yield self.text
            return
        first, *others = self.shape.split(VARIES)
        yield first
        for each in others:
            yield None
            yield each


class NameGroups:
    """The groups of the names that were added."""

    def __init__(self) -> None:
        self._first = _Part("", "", FIRST_PARTS_MAX)

    def add(self, key: FoundKey) -> None:
        """Add the name of a key."""
        name = key.name[:NAME_CHARACTERS_MAX].decode("utf-8", "surrogateescape")
        parts = [part for part in SEPARATORS.split(name) if part]
        if len(parts) > LEVELS_MAX:
            parts[LEVELS_MAX - 1 :] = [VARIES]
        at = self._first
        for part in parts:
            at = at.follow(part)
        at.count += 1
        if len(at.examples) < EXAMPLES_MAX:
            at.examples.append(key)

    def groups(self) -> Sequence[NameGroup]:
        """Return the groups, the largest first. No names may be added later."""
        self._first.join_single_names()
        by_pattern: dict[str, NameGroup] = {}
        for group in self._first.groups([]):
            same = by_pattern.get(group.pattern, NameGroup(group.pattern, 0, ()))
            examples = [*same.examples, *group.examples][:EXAMPLES_MAX]
            by_pattern[group.pattern] = NameGroup(group.pattern, same.key_count + group.key_count, examples)
        return sorted(by_pattern.values(), key=lambda group: (-group.key_count, group.pattern))


def _pattern(texts: Sequence[str | None]) -> str:
    """Return a key format; texts that vary and have nothing between them are one placeholder."""
    pattern, placeholders, is_varying = "", 0, False
    for text in texts:
        if text is None and not is_varying:
            name = ascii_lowercase[placeholders] if placeholders < len(ascii_lowercase) else f"p{placeholders}"
            pattern += f"<{name}>"
            placeholders += 1
        pattern += text or ""
        is_varying = text is None or (is_varying and not text)
    return pattern
