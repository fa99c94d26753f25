"""Requests as they were sent, told apart by how they begin.

    *2 $3 GET $5 key:1 *2 $3 GET $5 key:2        (each of these words is a line)
     └──head──┘└─────┘  └──── whole ────┘

A buffer cut at every `*` gives a *whole* per request, without its `*`. Its *head* reaches up to its second `$`, and so
tells the command and the number of words; its *subject*, up to the end of the second word. A text with a `*` in it
gives pieces that are no requests, and so does what has not come to its end. But where a piece is a request, so it was
sent: a request cannot begin as another one does and go on behind it, so bytes can be read in one way only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TEXT_BYTES_MAX = 1024  # of a key (guess); the general way reads longer ones

_MANY_HEAD = re.compile(rb"([1-9][0-9]{0,6})\r\n\$(?:4\r\n(?:MGET|mget)|(5\r\nSTATE))\r\n\$")
_STATE_MGET = b"4\r\nMGET\r\n$"


def pieces_of(data: bytes) -> list[bytes]:
    """Return what stands before the first `*`, nothing if a request begins there, and the pieces behind each `*`."""
    return data.split(b"*")


def head(words: int, name: bytes) -> bytes:
    """Return the head of requests of so many words and that name."""
    return b"%d\r\n$%d\r\n%b\r\n$" % (words, len(name), name)


GET_HEAD = head(2, b"GET")
_GET_START = b"*" + GET_HEAD

# By the length of `<length>\r\n<text>\r\n` the part before the text.
_LENGTH_LINES = {len(b"%d\r\n\r\n" % each) + each: b"%d\r\n" % each for each in range(TEXT_BYTES_MAX + 1)}
# By the length of a text the line before it; None for a longer one.
_size_line = {each: b"$%d" % each for each in range(TEXT_BYTES_MAX + 1)}.get


def head_of(whole: bytes) -> bytes:
    """Return how a request begins, up to the `$` of its second word; something else if it has no second word."""
    return whole[: whole.find(b"$", whole.find(b"$") + 1) + 1]


def by_head(wholes: Sequence[bytes]) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    """Iterate over (head, those that begin with it); most often, all begin with the same one."""
    first = head_of(wholes[0])
    if len(wholes) == 1 or b"*".join((b"", *wholes)).count(b"*" + first) == len(wholes):
        yield first, wholes
        return
    groups: dict[bytes, list[bytes]] = {}
    for whole in wholes:
        groups.setdefault(head_of(whole), []).append(whole)
    yield from groups.items()


def is_subject(whole: bytes) -> bool:
    """Tell whether a request is nothing but a name and a key."""
    return whole.startswith(b"2\r\n")


def subject_of(whole: bytes) -> bytes:
    """Return what a request of more words begins with, up to the end of its key."""
    return b"\r\n".join((*whole.split(b"\r\n", 5)[:5], b""))


def second_of(whole: bytes) -> bytes:
    """Return the second word of a request; anything of a piece that is none."""
    if is_subject(whole):
        return whole.split(b"\r\n", 4)[-1][:-2]  # there may be line ends in it
    lines = whole.split(b"\r\n", 5)
    return lines[4] if len(lines) > 4 else b""


def arguments_of(wholes: Sequence[bytes], its_head: bytes, count: int) -> list[Sequence[bytes]]:
    """Return the words behind the name, so many, of requests that begin with a head, up to one that is not whole."""
    found: list[Sequence[bytes]] = []
    add, at = found.append, len(its_head)
    if count == 1:
        for whole in wholes:
            line = _LENGTH_LINES.get(len(whole) - at)
            if line is None or not (whole.startswith(line, at) and whole.endswith(b"\r\n")):
                break
            add((whole[at + len(line) : -2],))
        return found
    for whole in wholes:
        lines = whole.split(b"\r\n")
        arguments = lines[4::2]
        if len(arguments) != count or lines[-1] or lines[3:-1:2] != list(map(_size_line, map(len, arguments))):
            break
        add(arguments)
    return found


def lone_key_of(whole: bytes) -> bytes:
    """Return the key of a GET, nothing if it is none or not whole (or has no key)."""
    line = _LENGTH_LINES.get(len(whole) - len(GET_HEAD))
    if line is None or not whole.startswith(GET_HEAD + line) or not whole.endswith(b"\r\n"):
        return b""
    return whole[len(GET_HEAD) + len(line) : -2]


class Many(NamedTuple):
    """MGET, or STATE MGET: how a request begins, up to the `$` of its first key, and how many keys it has."""

    name: str
    start: bytes
    keys: int

    def gets(self, whole: bytes) -> list[bytes]:
        """Return the GETs that ask for the same keys; not all of them are requests if it is not whole."""
        return whole[len(self.start) - 1 :].replace(b"$", _GET_START).split(b"*")[1:]


def many_of(its_head: bytes) -> Many | None:
    """Return what requests with this head may be, if that is one of the two: whether they begin so has to be seen."""
    matched = _MANY_HEAD.fullmatch(its_head)
    if matched is None:
        return None
    words = int(matched[1])
    if matched[2]:
        return Many("state|mget", its_head + _STATE_MGET, words - 2)
    return Many("mget", its_head, words - 1)
