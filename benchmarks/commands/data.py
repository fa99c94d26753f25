"""The keys that all commands are measured with: values of three sizes of each kind, at sparkis and at its peers.

<prefix>:<kind>:<size>:<number>   a value of a kind with 1, 20 or 1,000 elements; the number has 12 digits

All keys of a kind and size have the same elements, so the replies to two of them have the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.load import DIGITS, NUMBER
from compat.conformance.dataset import Dataset
from compat.conformance.dataset_log import JOB
from state_backend.codec.geohash import score_of

SIZES = (1, 20, 1000)
# The size of the keys that every command is measured with.
SIZE = 20
KEYS = 20
# The number of keys of a request that takes several.
MANY_KEYS = 3
# The number of strings of that size: a request that walks all keys shows.
STRINGS = 10_000
# The prefixes of the keys of states, and of those of an upstream.
STATES, UPSTREAM = JOB, "cache"
# The states that have the values of each kind, by their names in `compat.conformance.dataset_log`.
STATE_OF = {name: name for name in ("text", "map", "list", "set", "ranks")} | {"places": "ranks:places"}
ELEMENT_BYTES = len("element:00000")


def key(prefix: str, kind: str, size: int = SIZE) -> str:
    """Return a key of a kind and size, with the placeholder of its number."""
    return f"{prefix}:{STATE_OF[kind]}:{size}:{NUMBER}"


def missing_key(prefix: str) -> str:
    """Return a key that a state could have, and does not."""
    return f"{prefix}:{STATE_OF['text']}:missing"


def key_together(prefix: str, kind: str, number: int) -> str:
    """Return one of a few keys of a kind, all in one slot."""
    return f"{prefix}:{STATE_OF[kind]}:{{together}}:{number}"


def numbered(text: str, number: int) -> bytes:
    """Return a text with a number in place of its placeholders."""
    return text.replace(NUMBER, f"{number:0{DIGITS}}").encode()


def element(number: int) -> bytes:
    """Return an element: a field and its value, an element of a list, a member. A string has some of them in a row."""
    return b"element:%05d" % number


def dataset(prefix: str, sizes: Sequence[int] = SIZES) -> Dataset:
    """Return all keys of these sizes with this prefix."""

    def keys(kind: str, size: int, count: int = KEYS) -> list[bytes]:
        together = [key_together(prefix, kind, number).encode() for number in range(MANY_KEYS)] if size == SIZE else []
        return [*(numbered(key(prefix, kind, size), number) for number in range(count)), *together]

    elements = {size: [element(number) for number in range(size)] for size in sizes}
    scores = {size: {each: b"%d" % at for at, each in enumerate(elements[size])} for size in sizes}
    places = {size: {each: _place(at) for at, each in enumerate(elements[size])} for size in sizes}
    return Dataset(
        strings={
            each: b"".join(elements[size])
            for size in sizes
            for each in keys("text", size, STRINGS if size == SIZE else KEYS)
        },
        hashes={
            each: dict(zip(elements[size], elements[size], strict=True)) for size in sizes for each in keys("map", size)
        },
        lists={each: elements[size] for size in sizes for each in keys("list", size)},
        sets={each: elements[size] for size in sizes for each in keys("set", size)},
        sorted_sets={
            **{each: scores[size] for size in sizes for each in keys("ranks", size)},
            **{each: places[size] for size in sizes for each in keys("places", size)},
        },
    )


def _place(number: int) -> bytes:
    """Return the score of a place; all places are within some 50 km."""
    return b"%d" % score_of(13.3 + number * 37 % 200 / 997, 38.1 + number * 91 % 200 / 991)
