"""The data set of both servers, with difficult keys, values, fields and expiries."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields

from state_backend.codec.geohash import LATITUDE_MAX, LONGITUDE_MAX, score_of

# Far in the future. Redis stores milliseconds.
LATER_MS = 4_102_444_799_123

# A hash with more fields than this is scanned in steps, in Redis (a hash table) and here.
SMALL_MAP_FIELDS_MAX = 128


@dataclass(frozen=True)
class Dataset:
    """Keys as a client sees them. `expire_at_ms` has the expiry of keys; other keys never expire.

    Sorted sets are members and scores, as in ZADD. One key of each kind is larger than all others: of several largest
    keys, redis-cli --bigkeys reports the first one of its scan.
    """

    strings: Mapping[bytes, bytes]
    hashes: Mapping[bytes, Mapping[bytes, bytes]]
    lists: Mapping[bytes, Sequence[bytes]]
    sets: Mapping[bytes, Sequence[bytes]]
    sorted_sets: Mapping[bytes, Mapping[bytes, bytes]]
    expire_at_ms: Mapping[bytes, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[bytes]:
        """All keys."""
        return [*self.strings, *self.hashes, *self.lists, *self.sets, *self.sorted_sets]

    @property
    def items(self) -> dict[bytes, Mapping[bytes, bytes | None]]:
        """The possible results of random choices by key: hash fields with values, set members, members with scores."""
        return {**self.hashes, **{key: dict.fromkeys(each) for key, each in self.sets.items()}, **self.sorted_sets}

    def part(self, keys: Container[bytes]) -> Dataset:
        """Return a data set of only these keys."""
        kinds = {each.name: getattr(self, each.name) for each in fields(self)}
        return Dataset(**{name: {key: kind[key] for key in kind if key in keys} for name, kind in kinds.items()})


def standard() -> Dataset:
    """Return the data set of all comparisons."""
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
        b"long text": b"the quick brown fox jumps over the lazy dog " * 4,
        b"other text": b"a quick dog jumps over the brown lazy ox, " * 5,
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
    sets: dict[bytes, list[bytes]] = {
        b"set:one": [b"only"],
        b"set:small": [b"a", b"b", b"c", b"d", b"f0"],
        b"set:numbers": [b"%d" % number for number in (3, -1, 0, 70000, 9223372036854775807)],
        b"set:odd": [b"", b"\xff\x00", b"\r\n", b"$1\r\na", b"a*", b"x" * 500],
        b"set:edge": [b"f%03d" % number for number in range(SMALL_MAP_FIELDS_MAX)],
        b"set:large": [b"member:%05d" % number for number in range(1500)],
        b"{tag}set": [b"a", b"b", b"n", b"x"],
        b"{tag}set2": [b"b", b"n", b"y"],
        b"{tag}ids": [b"1", b"2", b"30"],
        b"set:later": [b"a", b"b"],
    }
    sorted_sets: dict[bytes, dict[bytes, bytes]] = {
        b"zset:one": {b"only": b"1"},
        b"zset:small": {b"a": b"1", b"b": b"2", b"c": b"2", b"d": b"3.1", b"e": b"-0.5", b"f": b"inf", b"f0": b"-inf"},
        b"zset:same": dict.fromkeys([b"", b"a", b"aa", b"b", b"ba", b"c", b"d", b"\xff"], b"0"),
        b"zset:odd": {b"\xff\x00": b"1e300", b"\r\n": b"1e-7", b"3": b"1234567.891", b"a*": b"0.1", b"z": b"100000000"},
        b"zset:wide": {b"x" * 500: b"5", b"a": b"5", b"b": b"5"},
        b"zset:edge": {b"f%03d" % number: b"%d" % (number // 2) for number in range(SMALL_MAP_FIELDS_MAX)},
        b"zset:large": {b"member:%05d" % number: b"%r" % (number * 37 % 1000 / 8) for number in range(1500)},
        b"zset:texts": {b"text:%05d" % (number * 7): b"2" for number in range(1499)},
        b"{tag}zset": {b"a": b"1", b"b": b"2.5", b"n": b"-3", b"x": b"inf"},
        b"{tag}zset2": {b"b": b"0.1", b"n": b"0.2", b"x": b"-inf", b"y": b"7"},
        b"zset:later": {b"a": b"1"},
        **_places(),
    }
    expiries = {
        b"soon": LATER_MS - 1_000_000_000_001,
        b"later": LATER_MS,
        b"hash:later": LATER_MS - 499,
        b"list:later": LATER_MS - 500,
        b"set:later": LATER_MS - 1,
        b"zset:later": LATER_MS - 2,
    }
    return Dataset(strings, hashes, lists, sets, sorted_sets, expiries)


def _places() -> dict[bytes, dict[bytes, bytes]]:
    """Return sorted sets whose scores are geohashes, also at the map's edges, and invalid geohashes."""
    cities = {
        b"Palermo": (13.361389, 38.115556),
        b"Catania": (15.087269, 37.502669),
        b"Agrigento": (13.583333, 37.316667),
        b"Praha": (14.43724, 50.07552),
        b"Nuku'alofa": (-175.21072, -21.13938),
        b"Suva": (178.44149, -18.14161),
        b"Troms\xc3\xb8": (18.9553, 69.6492),
        b"Punta Arenas": (-70.9171, -53.1638),
        b"Svalbard": (15.6469, 81.2232),
    }
    edges = {
        b"north east": (LONGITUDE_MAX, LATITUDE_MAX),
        b"south west": (-LONGITUDE_MAX, -LATITUDE_MAX),
        b"origin": (0.0, 0.0),
        b"last of the east": (179.99999, 10.0),
        b"first of the west": (-179.99999, 10.0),
    }
    many = {
        b"at:%05d" % number: (number * 7919 % 36_000 / 100 - 180 + number / 1e6, number * 104_729 % 17_000 / 100 - 85)
        for number in range(1200)
    }
    near = {
        b"by:%03d" % number: (13.3 + number * 37 % 200 / 997, 38.1 + number * 91 % 200 / 991) for number in range(200)
    }
    odd = {b"a": b"-1.5", b"b": b"inf", b"c": b"4503599627370496", b"d": b"1e19", b"e": b"3e15", b"f": b"-inf"}
    found = {b"geo:cities": cities, b"geo:edges": edges, b"geo:many": many, b"geo:near": near}
    scores = {key: {member: b"%d" % score_of(*place) for member, place in each.items()} for key, each in found.items()}
    return {**scores, b"geo:odd": odd}
