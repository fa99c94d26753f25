"""Details that programs meet: echoed names, the order of checks, the keys of a request."""

from __future__ import annotations

import pytest

from compat.conformance.pair import Pair
from compat.conformance.wire import Words

# What clients of RESP2 may not do while they are subscribed is said before anything about the command, also of those
# that are not served here.
WHILE_SUBSCRIBED = ["WAIT 0 0", "EVALSHA x 0", "FUNCTION LIST", "XREAD STREAMS a 0", "CLUSTER INFO"]
NAMES_AS_TYPED = ["acl cat a b", "Acl Cat read b", "ACL CAT a b", "acl GenPass 1 2", "Acl log 1 2", "slowlog gEt 1 2"]
NAMES_AS_TYPED += [
    "client unBlock 1 error x",
    "client pause 1 all x",
    "pubsub channels a b",
    "PUBSUB shardchannels a b",
]
CHECKED_FIRST = ["CLIENT UNBLOCK xx foo", "CLIENT UNBLOCK xx error", "CLIENT UNBLOCK 999999 foo"]
CHECKED_FIRST += ["CLIENT UNBLOCK 999999", "CLIENT PAUSE x foo", "CLIENT PAUSE -1 write"]
KEYS_OF = [
    "MIGRATE h 1 k 0 10",
    "MIGRATE h 1  0 10 KEYS a b",
    "MIGRATE h 1 k 0 10 KEYS a b",
    "MIGRATE h 1  0 10 COPY REPLACE AUTH keys KEYS a b",
    "MIGRATE h 1  0 10 AUTH2 keys b KEYS x",
    "MIGRATE h 1  0 10 copy keys",
    "SORT a STORE b",
    "SORT a BY store GET store LIMIT 0 1 STORE b store c",
    "SORT a STORE",
    "SORT a",
]
FUNCTION_LIST = ["", " WITHCODE", " LIBRARYNAME x", " libraryname x withcode", " FOO", " LIBRARYNAME"]
FUNCTION_LIST += [" LIBRARYNAME x LIBRARYNAME y", " withcode WITHCODE"]


@pytest.mark.parametrize("line", WHILE_SUBSCRIBED)
def test_subscriber_of_resp2_gets_that_error_first(pair: Pair, line: str) -> None:
    pair.check([[b"SUBSCRIBE", b"a"], line.encode().split()])


@pytest.mark.parametrize("line", [*NAMES_AS_TYPED, *CHECKED_FIRST])
def test_unknown_subcommand_is_refused_as_by_redis(pair: Pair, line: str) -> None:
    pair.check_line(line)


@pytest.mark.parametrize("line", KEYS_OF)
def test_command_getkeys_equals_redis(pair: Pair, line: str) -> None:
    pair.check_line(f"COMMAND GETKEYS {line}")
    if line.startswith("MIGRATE"):
        pair.check_line(f"COMMAND GETKEYSANDFLAGS {line}")


@pytest.mark.parametrize("options", FUNCTION_LIST)
def test_no_libraries_of_functions_are_listed(pair: Pair, options: str) -> None:
    pair.check_line(f"FUNCTION LIST{options}")


@pytest.mark.parametrize(
    "words", [["é" * 90, "a"], ["é" * 30, "é" * 60, "b"], ["x" * 127, "é", "c"], ["x" * 129], [""] * 70]
)
def test_unknown_command_is_echoed_by_bytes(pair: Pair, words: list[str]) -> None:
    request: Words = [b"NOPE", *[word.encode() for word in words]]
    pair.check([request, [("é" * 100).encode(), b"a"]])
