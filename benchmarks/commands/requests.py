"""The requests of the benchmark of all commands, generated from the command table.

A request has the arguments that its command's row requires, each with a value that its name and type say. A new command
gets a row by itself; if an argument has no value here, a test fails, and the command needs a line in `ARGUMENTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat

from benchmarks.commands.budgets import Work, work_of
from benchmarks.commands.data import MANY_KEYS, SIZE, SIZES, element, key, key_together, missing_key, numbered
from benchmarks.load import request_of
from resp_server.command.policy import Comparison, UpstreamDenial
from resp_server.command.spec import Json
from resp_server.command.table import Command
from resp_server.commands import command_table

UNKNOWN_ID = "999999999"
ELEMENTS = [element(number).decode() for number in range(SIZE)]
MIDDLE = ELEMENTS[SIZE // 2]
# The kind of the keys of each group of commands. There are no streams, so their keys are missing.
KINDS = {
    "string": "text",
    "bitmap": "text",
    "generic": "text",
    "stream": "",
    "transactions": "text",
    "server": "text",
    "hash": "map",
    "list": "list",
    "set": "set",
    "sorted-set": "ranks",
    "geo": "places",
}
KIND_OF = {"sort_ro": "list"}
# The values of arguments by name; a range has half of the elements.
VALUES: Mapping[str, str] = {
    "field": MIDDLE,
    "member": MIDDLE,
    "member1": MIDDLE,
    "member2": ELEMENTS[0],
    "element": MIDDLE,
    "start": "0",
    "stop": "9",
    "end": "9",
    "offset": "7",
    "bit": "1",
    "index": "10",
    "cursor": "0",
    "min": "0",
    "max": "9",
    "longitude": "13.4",
    "latitude": "38.1",
    "radius": "200",
    "unit": "km",
    "count": "10",
    "slot": "0",
    "numkeys": str(MANY_KEYS),
    "channel": "news",
    "shardchannel": "news",
    "pattern": "news*",
    "message": "text",
    "username": "default",
    "event": "command",
    "sha1": "f" * 40,
    "connection-name": "reader",
}
TEXT_VALUES = {"min": f"[{ELEMENTS[0]}", "max": f"[{ELEMENTS[9]}"}
# The arguments that cannot be generated. K is a key of the command's kind, E one of its elements, N a node's own id.
ARGUMENTS: Mapping[str, str] = {
    "acl|deluser": "nobody",
    "acl|dryrun": "default GET K",
    "acl|setuser": "somebody off",
    "auth": "default any",
    "bitfield_ro": "K GET u8 0",
    "client|caching": "YES",
    "client|kill": f"ID {UNKNOWN_ID}",
    "client|no-evict": "off",
    "client|no-touch": "off",
    "client|pause": "0 WRITE",
    "client|reply": "ON",
    "client|setinfo": "LIB-NAME reader",
    "client|tracking": "OFF",
    "client|unblock": UNKNOWN_ID,
    "cluster|count-failure-reports": "N",
    "cluster|keyslot": "K",
    "cluster|replicas": "N",
    "cluster|slaves": "N",
    "command|docs": "GET",
    "command|getkeys": "GET K",
    "command|getkeysandflags": "GET K",
    "command|info": "GET",
    "config|get": "maxmemory",
    "config|set": "timeout 0",
    "geohash": "K E",
    "geopos": "K E",
    "geosearch": "K FROMLONLAT 13.4 38.1 BYRADIUS 200 km ASC",
    "hello": "3",
    "hexpiretime": "K FIELDS 1 E",
    "hpexpiretime": "K FIELDS 1 E",
    "hrandfield": "K 5",
    "hpttl": "K FIELDS 1 E",
    "httl": "K FIELDS 1 E",
    "keys": "*:text:1:*",
    "lolwut": "VERSION 1",
    "select": "0",
    "sort_ro": "K ALPHA",
    "srandmember": "K 5",
    "zrandmember": "K 5",
}
# Further requests of a command.
VARIANTS: Mapping[str, str] = {"info": "server", "scan": "0 MATCH *:text:1:* COUNT 100"}
# Commands that only make sense in a sequence, which is measured as a whole.
SEQUENCES: Mapping[str, Sequence[str]] = {
    "multi": ("MULTI", "DISCARD"),
    "discard": ("MULTI", "DISCARD"),
    "exec": ("MULTI", "GET K", "GET K", "EXEC"),
}
# What a connection sends before.
BEFORE: Mapping[str, Sequence[str]] = {"client|caching": ("HELLO 3", "CLIENT TRACKING ON OPTIN")}
# A connection that has sent one of these sends nothing more.
LAST_OF_A_CONNECTION = ("monitor", "quit")
# What is measured at a redis-server that is older than the command.
STAND_INS: Mapping[str, str] = {
    **dict.fromkeys(("hexpiretime", "hpexpiretime", "hpttl", "httl"), "HMGET K E"),
    "client|no-touch": "CLIENT NO-EVICT off",
    "client|setinfo": "CLIENT SETNAME reader",
    "cluster|myshardid": "CLUSTER MYID",
}

Words = tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """Requests that are sent together, each of which has one reply.

    Args:
        name: The command, in upper case, or the shape.
        group: Redis' group of the command.
        size: The number of elements.
        counted: The command that servers count, and how often; empty: the requests are about no key.
        before: What a connection sends first.
        is_last: A connection sends nothing after it.
        is_split: A proxy divides it among servers, as other commands if it has to.
        is_denied: It reaches no upstream.
        is_open: The replies to two keys may differ, so their bytes are not counted.
        stand_in: The request that takes its place at a server that does not know the command.
    """

    name: str
    group: str
    work: Work
    requests: tuple[Words, ...]
    size: int = SIZE
    counted: tuple[str, int] = ("", 0)
    before: tuple[Words, ...] = ()
    is_last: bool = False
    is_split: bool = False
    is_denied: bool = False
    is_open: bool = True
    stand_in: Words = ()

    def packed(self) -> tuple[bytes, list[int]]:
        """Return the encoded requests, and the offsets of their random numbers."""
        data, numbers_at = b"", []
        for words in self.requests:
            packed, found = request_of(words)
            numbers_at += [len(data) + at for at in found]
            data += packed
        return data, numbers_at

    def numbered(self, number: int) -> list[list[bytes]]:
        """Return the requests with a number in place of each random number."""
        return [[numbered(word, number) for word in words] for words in self.requests]

    def of_node(self, node: str) -> Exchange:
        """Return it with a node's id."""
        return replace(self, requests=tuple(tuple(node if word == "N" else word for word in w) for w in self.requests))


def served() -> list[Command]:
    """Return Redis' commands that are served, in the table's order."""
    return [each for each in command_table().with_subcommands() if each.handler and each.handler.ours is None]


def exchanges(prefix: str) -> Iterator[Exchange]:
    """Return an exchange for each served command, about keys with a prefix."""
    for command in served():
        yield exchange_of(command, prefix)
        if command.name in VARIANTS:
            yield exchange_of(command, prefix, VARIANTS[command.name])


def exchange_of(command: Command, prefix: str, variant: str = "") -> Exchange:
    """Return the exchange of a command, about keys with a prefix. variant: its arguments."""
    name, facts = command.name, command.facts
    kind = KIND_OF.get(name) or KINDS.get(facts.group, "text")
    given = {"K": key(prefix, kind) if kind else missing_key(prefix), "E": MIDDLE}

    def words(line: str) -> Words:
        return tuple(given.get(word, word) for word in line.split())

    own = words(" ".join(name.upper().split("|")))
    if variant or name in ARGUMENTS:
        own += words(variant or ARGUMENTS[name])
    else:
        arguments = [argument for argument in facts.arguments if "optional" not in argument.get("flags", ())]
        keys = _keys_of(command, arguments, given["K"], prefix, kind)
        own += tuple(word for argument in arguments for word in _words_of(argument, keys))
    requests = tuple(map(words, SEQUENCES[name])) if name in SEQUENCES else (own,)
    is_about_keys = bool(command.keys_in([word.encode() for word in own]))
    return Exchange(
        name=_title(name, variant),
        group=facts.group,
        work=work_of(command, variant),
        requests=requests,
        counted=(name, 1) if is_about_keys else ("", 0),
        before=tuple(map(words, BEFORE.get(name, ()))),
        is_last=name in LAST_OF_A_CONNECTION,
        is_split=command.policy.is_split_by_slot,
        is_denied=command.policy.denial is not UpstreamDenial.NO,
        is_open=not is_about_keys or command.policy.comparison is Comparison.NEVER,
        stand_in=words(STAND_INS.get(name, "")),
    )


def _title(name: str, variant: str) -> str:
    """Return the name of a row: the command with its options, but without numbers and patterns."""
    options = [word for word in variant.split() if word.isalpha()]
    return " ".join([*name.upper().split("|"), *options])


def _keys_of(command: Command, arguments: Sequence[Json], single: str, prefix: str, kind: str) -> Iterator[str]:
    """Return keys for a command's arguments: of one slot, if the command takes several that have to be in one."""
    keys = [each for each in arguments if each["type"] == "key"]
    takes_several = len(keys) > 1 or any("multiple" in each.get("flags", ()) for each in keys)
    if takes_several and command.policy.split is None:
        return (key_together(prefix, kind, number) for number in range(MANY_KEYS))
    return repeat(single)


def _words_of(argument: Json, keys: Iterator[str]) -> Words:
    """Return the words of an argument that a command requires."""
    token = (argument["token"],) if "token" in argument else ()
    match argument["type"]:
        case "key":
            return (*token, *islice(keys, MANY_KEYS if "multiple" in argument.get("flags", ()) else 1))
        case "string" if argument["name"] in TEXT_VALUES:
            return (*token, TEXT_VALUES[argument["name"]])
        case _:
            return (*token, VALUES[argument["name"]])


def shapes(prefix: str) -> Iterator[Exchange]:
    """Return an exchange of each shape and size, about keys with a prefix."""
    for size in SIZES:
        ranks, text = key(prefix, "ranks", size), key(prefix, "text", 1)
        last = element(size - 1).decode()
        get = ("GET", text)
        found = [
            ("point", Work.POINT, (("ZSCORE", ranks, last),), ("zscore", 1)),
            ("count", Work.POINT, (("ZCOUNT", ranks, "0", str(size // 2)),), ("zcount", 1)),
            ("range", Work.ELEMENTS, (("LRANGE", key(prefix, "list", size), "0", str(size // 2)),), ("lrange", 1)),
            ("whole value", Work.ELEMENTS, (("HGETALL", key(prefix, "map", size)),), ("hgetall", 1)),
            ("many keys", Work.ELEMENTS, (("MGET", *[text] * size),), ("mget", 1)),
            ("connection", Work.OWN, (("ECHO", "x" * size),), ("", 0)),
            ("transaction", Work.TRANSACTION, (("MULTI",), *[get] * size, ("EXEC",)), ("get", size)),
        ]
        for name, work, requests, counted in found:
            is_split = name == "many keys"
            yield Exchange(name, name, work, requests, size, counted, is_split=is_split, is_open=name == "connection")
