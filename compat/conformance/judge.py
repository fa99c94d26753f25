"""Compares two replies to the same request: byte for byte, except where Redis leaves the result open.

Redis leaves open, and the judge compares accordingly:
  order          HGETALL, HKEYS, HVALS, KEYS, CONFIG GET, COMMAND LIST and set reads promise no order
  the clock      TTL, PTTL and TIME are requested a moment apart
  chance         RANDOMKEY, SRANDMEMBER, HRANDFIELD, ZRANDMEMBER: any items, the same number of them
  doubles        7.0 writes 17 digits, 7.2 and later the shortest text that reads back the same
  ranges         by text, in a large sorted set whose scores differ
  ties           of SORT_RO by texts, and the order of a set that it does not sort
  implementation DUMP's format (a test restores dumps); OBJECT IDLETIME, which sparkis does not track; MEMORY USAGE
  cursors        a step of SCAN or HSCAN; another test compares full iterations
  identity       connection ids, addresses, process ids, versions

Every other difference has to be in `deviations.toml`, with its reason.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compat.conformance.wire import Reply, Words

DEVIATIONS = Path(__file__).resolve().parents[1] / "deviations.toml"

# The two servers get a request one after the other, on a machine that may be busy.
CLOCK_MS_MAX = 5_000

# Fields of CLIENT LIST that depend on the connection or on the clock.
CLIENT_IDENTITY = ("id", "addr", "laddr", "age", "idle")

SCORED = (
    *("zscore", "zmscore", "zrange", "zrevrange", "zrangebyscore", "zrevrangebyscore", "zrangebylex", "zrevrangebylex"),
    *("zlexcount", "zunion", "zinter", "zdiff"),
)
# In a larger sorted set, Redis searches a skip list, whose levels are random.
SMALL_SORTED_SET_MAX = 128
UNORDERED = ("hgetall", "hkeys", "hvals", "keys", "smembers", "sinter", "sunion", "sdiff")
# A number, which may have a fraction or an exponent.
LONG_DIGITS = re.compile(rb"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
CONTAINERS = ("client", "command", "config", "function", "memory", "object")


@dataclass(frozen=True, repr=False)
class ReplyDeviation:
    """One intended difference in a reply, with a request that causes it. redis, sparkis: regular expressions."""

    command: str
    request: Sequence[str]
    redis: str
    sparkis: str
    reason: str
    is_password_set: bool = False


@dataclass(frozen=True)
class BytesDeviation:
    """One intended difference in the reply to bytes that are no valid request."""

    data: str
    redis: str
    sparkis: str
    reason: str
    is_password_set: bool = False


@dataclass(frozen=True, repr=False)
class Deviations:
    """The intended differences of `deviations.toml`. Every line has a reason; patterns are globs."""

    reply_deviations: Sequence[ReplyDeviation]
    bytes_deviations: Sequence[BytesDeviation]
    not_served: Mapping[str, str]
    info_added: Mapping[str, str]
    config_added: Mapping[str, str]
    config_missing: Mapping[str, str]
    config_values: Mapping[str, str]
    client_values: Mapping[str, str]
    commands_added: Mapping[str, str]

    @classmethod
    def load(cls, path: Path = DEVIATIONS) -> Deviations:
        """Read the file; an unknown table or key is an error."""
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        reply_deviations = [ReplyDeviation(**row) for row in tables.pop("replies")]
        bytes_deviations = [BytesDeviation(**row) for row in tables.pop("bytes")]
        return cls(reply_deviations, bytes_deviations, **tables)

    def explains(self, command: str, theirs: Reply, ours: Reply) -> bool:
        """Return whether a difference is intended."""
        return any(
            each.command == command and has_text(each.redis, theirs) and has_text(each.sparkis, ours)
            for each in self.reply_deviations
        )


def has_text(pattern: str, reply: Reply) -> bool:
    """Return whether a reply's bytes, without the last line end, match a deviation's regular expression."""
    return re.fullmatch(pattern.encode(), reply.raw.removesuffix(b"\r\n"), re.DOTALL) is not None


def mismatches(listed: Mapping[str, str], differing: Collection[str]) -> list[str]:
    """Return the differing names that not exactly one line of a table explains, and the lines that explain no name."""
    lines = {name: [line for line in listed if fnmatchcase(name, line)] for name in differing}
    unexplained = [f"{name}: explained by {found or 'no line'}" for name, found in lines.items() if len(found) != 1]
    used = {line for found in lines.values() for line in found}
    return sorted(unexplained) + [f"the line {line!r} is not needed" for line in listed if line not in used]


def command_of(request: Words) -> str:
    """Return the name of a request's command; of the containers that are compared, with the subcommand."""
    words = [word.decode("latin-1").lower() for word in request[:2]]
    return "|".join(words) if words and words[0] in CONTAINERS and len(words) > 1 else words[0]


@dataclass(repr=False)
class Judge:
    """Compares replies of a real server (`theirs`) with those of a server under test (`ours`).

    config_names: the settings that the server under test has. commands_alike: the commands whose row in the command
    table is the same in both servers. keys: all keys of the data set.
    """

    deviations: Deviations
    config_names: Collection[bytes] = ()
    commands_alike: Collection[bytes] = ()
    keys: Collection[bytes] = ()
    # The items of keys from which random commands choose: names, with values or scores.
    items: Mapping[bytes, Mapping[bytes, bytes | None]] = field(default_factory=dict)
    _rules: Mapping[str, Callable[[Words, Reply, Reply], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rules = {
            **dict.fromkeys(UNORDERED, self._is_same_set),
            "ttl": self._is_same_time(1),
            "pttl": self._is_same_time(CLOCK_MS_MAX),
            "scan": self._is_same_step,
            "hscan": self._is_same_step,
            "sscan": self._is_same_step,
            "zscan": self._is_same_step,
            **dict.fromkeys(SCORED, self._is_same_but_for_digits),
            **dict.fromkeys(("srandmember", "hrandfield", "zrandmember"), self._is_as_many),
            "sort_ro": self._is_same_sort,
            "randomkey": self._is_a_key,
            "dump": self._are_both_nil_or_not,
            "object|idletime": self._are_both_nil_or_not,
            "memory|usage": self._are_both_nil_or_not,
            "time": self._is_clock,
            "hello": self._is_same_greeting,
            "client|id": self._is_number,
            "client|info": self._is_client_lines,
            "client|list": self._is_client_lines,
            "command": self._are_same_rows,
            "command|info": self._are_same_rows,
            "command|docs": self._is_same_documentation,
            "command|list": self._are_same_names,
            "command|count": self._is_number,
            "config|get": self._is_same_config,
            "info": self._is_info,
        }

    def differences(self, requests: Sequence[Words], theirs: Sequence[Reply], ours: Sequence[Reply]) -> list[str]:
        """Return the differences between replies to a pipeline, as text."""
        found = [
            f"{b' '.join(request)!r}: Redis replies {_shortened(their)}, the server under test {_shortened(our)}"
            for request, their, our in zip(requests, theirs, ours, strict=False)
            if not self.is_same(request, their, our)
        ]
        if len(theirs) != len(ours):
            found.append(f"Redis sends {len(theirs)} replies, the server under test {len(ours)}, to {requests!r}")
        return found

    def is_same(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """Return whether two replies are the same, or differ as a deviation says."""
        if theirs.raw == ours.raw:
            return True
        command = command_of(request)
        rule = self._rules.get(command)
        if rule is not None and theirs.type == ours.type and not theirs.is_error and rule(request, theirs, ours):
            return True
        return self.deviations.explains(command, theirs, ours)

    # -- rules: both replies have the same type byte, and neither is an error -----------------------------------------

    @staticmethod
    def _is_same_set(request: Words, theirs: Reply, ours: Reply) -> bool:
        return _sorted_items(request, theirs) == _sorted_items(request, ours)

    @staticmethod
    def _is_same_time(apart_max: int) -> Callable[[Words, Reply, Reply], bool]:
        def is_same(request: Words, theirs: Reply, ours: Reply) -> bool:
            first, last = sorted(map(int, (theirs.value, ours.value)))
            return first >= 0 and last - first <= apart_max

        return is_same

    @staticmethod
    def _is_same_step(request: Words, theirs: Reply, ours: Reply) -> bool:
        """Compare the items of an iteration that is complete after one step; of other steps compare only the shape."""
        (their_cursor, their_items), (our_cursor, our_items) = theirs.value, ours.value
        are_alike = (their_cursor.type, their_items.type) == (our_cursor.type, our_items.type)
        if not are_alike or not our_cursor.value.isdigit():
            return False
        command = command_of(request)
        is_complete = {request[1 if command == "scan" else 2], their_cursor.value, our_cursor.value} == {b"0"}
        size = 2 if command in ("hscan", "zscan") else 1
        return not is_complete or _items_of(their_items, size) == _items_of(our_items, size)

    def _is_a_key(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        return theirs.value in self.keys and ours.value in self.keys

    @staticmethod
    def _are_both_nil_or_not(request: Words, theirs: Reply, ours: Reply) -> bool:
        return (theirs.value is None) == (ours.value is None)

    def _is_same_but_for_digits(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        items = self.items.get(request[1], {})
        is_by_text = any(word.upper() == b"BYLEX" for word in request) or b"LEX" in request[0].upper()
        if is_by_text and len(items) > SMALL_SORTED_SET_MAX and len(set(items.values())) > 1:
            return True
        return bool(_with_short_digits(theirs) == _with_short_digits(ours))

    def _is_same_sort(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """Items with equal sort keys, and unsorted sets, may have any order."""
        words = [word.upper() for word in request[2:]]
        is_open = b"BY" in words and (b"ALPHA" in words or not any(self.items.get(request[1], {b"": b""}).values()))
        return is_open and len(theirs.value) == len(ours.value)

    def _is_as_many(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """Both replies have the same number of existing items, and no item twice unless the count is negative."""
        items = self.items[request[1]]
        if not isinstance(theirs.value, list):
            return theirs.value in items and ours.value in items
        with_values = len(request) > 3
        flat = [part for item in ours.value for part in (item.value if isinstance(item.value, list) else [item])]
        names = [part.value for part in (flat[::2] if with_values else flat)]
        values = [part.value for part in flat[1::2]] if with_values else [items.get(name) for name in names]
        return (
            len(theirs.value) == len(ours.value)
            and {item.type for item in theirs.value} == {item.type for item in ours.value}
            and all(name in items for name in names)
            and all(_is_value(items[name], value) for name, value in zip(names, values, strict=True))
            and (request[2][:1] == b"-" or len(set(names)) == len(names))
        )

    @staticmethod
    def _is_clock(request: Words, theirs: Reply, ours: Reply) -> bool:
        times = [[int(part.value) for part in reply.value] for reply in (theirs, ours)]
        return (
            all(part.type == "$" for reply in (theirs, ours) for part in reply.value)
            and all(0 <= microseconds < 1_000_000 for _, microseconds in times)
            and abs(times[0][0] - times[1][0]) <= CLOCK_MS_MAX // 1000
        )

    @staticmethod
    def _is_same_greeting(request: Words, theirs: Reply, ours: Reply) -> bool:
        """Version and connection id may differ, and ours ends with sparkis' own version."""
        fields = [dict(_pairs(reply)) for reply in (theirs, ours)]
        if list(fields[1])[-1] != b"sparkis_version":
            return False
        del fields[1][b"sparkis_version"]
        are_texts = all(isinstance(each[b"version"], bytes) and isinstance(each[b"id"], int) for each in fields)
        rest = [{**each, b"version": b"", b"id": 0} for each in fields]
        return are_texts and list(fields[0]) == list(fields[1]) and rest[0] == rest[1]

    @staticmethod
    def _is_number(request: Words, theirs: Reply, ours: Reply) -> bool:
        return theirs.type == ":" and bool(ours.value > 0)

    def _is_client_lines(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """The lines have the same field names in the same order, and the same values that the client itself set."""
        their_lines, our_lines = (client_lines(reply) for reply in (theirs, ours))
        if command_of(request) == "client|list":  # each server also lists other clients
            return bool(their_lines) == bool(our_lines)
        return len(our_lines) == len(their_lines) and all(
            self.is_same_client(their, our) for their, our in zip(their_lines, our_lines, strict=True)
        )

    def is_same_client(self, theirs: Mapping[str, str], ours: Mapping[str, str]) -> bool:
        """Return whether two lines of CLIENT LIST are equal, except for the fields in `deviations.toml`."""
        open_names = {*CLIENT_IDENTITY, *self.deviations.client_values}
        return [name for name in ours if name in theirs] == list(theirs) and all(
            name in open_names or theirs.get(name) == value for name, value in ours.items()
        )

    def _are_same_rows(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """Compare the rows of commands that are the same in both versions; a test of the table compares the others."""
        rows = [[each.raw for each in reply.value if self._is_alike(each)] for reply in (theirs, ours)]
        return rows[0] == rows[1] if request[2:] else sorted(rows[0]) == sorted(rows[1])

    def _is_alike(self, row: Reply) -> bool:
        return row.value is None or row.value[0].value in self.commands_alike

    def _is_same_documentation(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """Both document the same commands; a test of the table compares the texts."""
        names = [{name for name in reply.plain[::2] if name in self.commands_alike} for reply in (theirs, ours)]
        return names[0] == names[1]

    def _are_same_names(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        names = [{each.value for each in reply.value} & set(self.commands_alike) for reply in (theirs, ours)]
        return names[0] == names[1]

    def _is_same_config(self, request: Words, theirs: Reply, ours: Reply) -> bool:
        """Compare the settings that both servers have; a test compares the others with `deviations.toml`."""
        expected = {name: value for name, value in _pairs(theirs) if name.lower() in self.config_names}
        found = dict(_pairs(ours))
        values, added = self.deviations.config_values, self.deviations.config_added
        common = {
            name for name in found if not any(fnmatchcase(name.decode("latin-1").lower(), each) for each in added)
        }
        return expected.keys() == common and all(
            name.decode("latin-1").lower() in values or found[name] == value for name, value in expected.items()
        )

    @staticmethod
    def _is_info(request: Words, theirs: Reply, ours: Reply) -> bool:
        """Sections that both have are in the same order; another test compares their fields."""
        titles = [re.findall(rb"^# (\w+)\r?$", reply.value, re.MULTILINE) for reply in (theirs, ours)]
        return [each for each in titles[1] if each in titles[0]] == [each for each in titles[0] if each in titles[1]]


def client_lines(reply: Reply) -> list[dict[str, str]]:
    """Return CLIENT LIST's or CLIENT INFO's lines as mappings; the fields keep their order."""
    text: str = (reply.value or b"").removeprefix(b"txt:").decode("latin-1")
    return [dict(part.partition("=")[::2] for part in line.split(" ")) for line in text.splitlines()]


def info_fields(reply: Reply) -> dict[str, str]:
    """Return INFO's fields and values."""
    text: str = reply.value.removeprefix(b"txt:").decode("latin-1")
    return dict(line.partition(":")[::2] for line in text.split("\r\n") if line and not line.startswith("#"))


def _pairs(reply: Reply) -> list[tuple[Any, Any]]:
    """Return the pairs of a map, or of RESP2's flat array."""
    flat = reply.plain
    return list(zip(flat[::2], flat[1::2], strict=True))


def _sorted_items(request: Words, reply: Reply) -> list[bytes]:
    is_flat_map = reply.type == "*" and command_of(request) == "hgetall"
    if reply.type == "%":
        return sorted(key.raw + value.raw for key, value in reply.value)
    return _items_of(reply, 2 if is_flat_map else 1)


def _items_of(reply: Reply, size: int) -> list[bytes]:
    """Return an array's items in groups of `size`, sorted."""
    raw = [repr(_with_short_digits(item)).encode() for item in reply.value]
    return sorted(b"".join(raw[at : at + size]) for at in range(0, len(raw), size))


def _with_short_digits(reply: Reply) -> Any:
    """Return a reply as values, with equal texts for equal numbers."""
    if isinstance(reply.value, list):
        return reply.type, [_with_short_digits(each) for each in reply.value]
    if reply.type in "$," and reply.value is not None and LONG_DIGITS.fullmatch(reply.value):
        return reply.type, float(reply.value)
    return reply.raw


def _is_value(expected: bytes | None, found: bytes | None) -> bool:
    return expected == found or (None not in (expected, found) and float(expected or b"") == float(found or b""))


def _shortened(reply: Reply) -> str:
    return repr(reply.raw if len(reply.raw) <= 400 else reply.raw[:400] + b"...")
