"""The one data set that both servers hold: what is easy to get wrong, in keys, values, fields and expiries."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields

# Some weeks on: no test run lasts until then. Redis keeps milliseconds.
LATER_MS = 4_102_444_799_123

# A Redis hash of more fields than this is a hash table, scanned in steps; so is ours.
SMALL_MAP_FIELDS_MAX = 128


@dataclass(frozen=True)
class Dataset:
    """Keys as a client sees them. `expire_at_ms` names those that expire; the rest never do."""

    strings: Mapping[bytes, bytes]
    hashes: Mapping[bytes, Mapping[bytes, bytes]]
    lists: Mapping[bytes, Sequence[bytes]]
    expire_at_ms: Mapping[bytes, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[bytes]:
        """All keys."""
        return [*self.strings, *self.hashes, *self.lists]

    def part(self, keys: Container[bytes]) -> Dataset:
        """Return the data set of some keys alone."""
        kinds = {each.name: getattr(self, each.name) for each in fields(self)}
        return Dataset(**{name: {key: kind[key] for key in kind if key in keys} for name, kind in kinds.items()})


def standard() -> Dataset:
    """Return the data set that everything is compared on."""
    strings = {
        b"": b"an empty key",
        b"plain": b"value",
        b"Plain": b"keys are compared as they are",
        b"empty": b"",
        b"number": b"42",
        b"float": b"3.25",
        b"\x00\xff\r\n\x80": b"\x00\r\n$5\r\n\xff\xfe",
        b"utf8:schl\xc3\xbcssel": "žluťoučký kůň 🐎".encode(),
        b"with space": b"a b c",
        b"quote\"'\\": b'"quoted"',
        b"{tag}a": b"1",
        b"{tag}b": b"2",
        b"{}notag": b"3",
        b"a{b{c}d}e": b"4",
        b"[abc]": b"5",
        b"a*b?c": b"6",
        b"user:1:name": b"Ada",
        b"user:2:name": b"Grace",
        b"long key " + b"k" * 700: b"beyond what LMDB takes as a key",
        b"big": bytes(range(256)) * 256,
        b"soon": b"expires",
        b"later": b"expires",
    }
    strings |= {b"many:%03d" % number: b"%d" % number for number in range(300)}
    hashes: dict[bytes, dict[bytes, bytes]] = {
        b"hash:one": {b"field": b"value"},
        b"hash:small": {b"f%d" % number: b"v%d" % number for number in range(10)},
        b"hash:edge": {b"f%03d" % number: b"v" for number in range(SMALL_MAP_FIELDS_MAX)},
        b"hash:large": {b"field:%05d" % number: b"value %d" % number for number in range(1500)},
        b"hash:wide": {b"short": b"s", b"long": b"x" * 5000},
        b"hash:odd": {b"": b"empty field", b"empty value": b"", b"\xff\x00": b"\x00\xff", b"{f}": b"b", b"a*": b"c"},
        b"{tag}hash": {b"n": b"1"},
        b"hash:later": {b"f": b"expires as a whole"},
    }
    lists: dict[bytes, list[bytes]] = {
        b"list:one": [b"only"],
        b"list:short": [b"a", b"b", b"a", b"c", b"", b"a", b"b"],
        b"list:odd": [b"\x00\xff", b"\r\n", b"$1\r\na", "ž".encode(), b"x" * 9000],
        b"list:edge": [b"%d" % (number % 10) for number in range(SMALL_MAP_FIELDS_MAX)],
        b"list:long": [b"%d" % (number % 7) for number in range(1500)],
        b"list:later": [b"a", b"b"],
    }
    expiries = {
        b"soon": LATER_MS - 1_000_000_000_001,
        b"later": LATER_MS,
        b"hash:later": LATER_MS - 499,
        b"list:later": LATER_MS - 500,
    }
    return Dataset(strings, hashes, lists, expiries)
