"""Commands that are not served: the same checks in the same order, and writes are refused as by a replica."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compat.conformance.judge import Deviations, mismatches
from compat.conformance.pair import Pair
from compat.conformance.wire import Words, replies_to
from compat.reference.capture import REFERENCE, Entry, Table, load
from resp_server.commands import command_table

# Answered with one exact text of Redis', compared below; a container stands for its subcommands.
REFUSED = ("asking", "cluster", "debug", "evalsha", "evalsha_ro", "readonly", "readwrite", "wait", "waitaof")


def rows(table: Table) -> Iterator[tuple[str, Entry]]:
    """Return all commands and subcommands."""
    for name, entry in table.items():
        yield name, entry
        yield from rows(entry.get("subcommands", {}))  # type: ignore[arg-type]  # a table within a table


EXPECTED: dict[str, Entry] = dict(rows(load(REFERENCE)))
WRITES = [name for name, entry in EXPECTED.items() if "write" in entry["flags"]]  # type: ignore[operator]
CONTAINERS = [name for name, entry in EXPECTED.items() if "subcommands" in entry]


def request(name: str, words: int) -> list[bytes]:
    """Return a request of so many words, arguments included."""
    named = [part.encode() for part in name.split("|")]
    return [*named, *([b"1"] * (words - len(named)))]


def test_wrong_number_of_arguments_is_refused_as_by_redis(pair: Pair, live_table: Table) -> None:
    """Of every command whose arity is the same in both versions. Nothing of it is run, on either server."""
    pipeline: list[Words] = []
    for name, entry in rows(live_table):
        arity = entry["arity"]
        if arity != EXPECTED[name]["arity"] or not isinstance(arity, int):
            continue
        pipeline += [request(name, count) for count in range(1 + name.count("|"), abs(arity))]
        pipeline += [request(name, arity + more) for more in (1, 3) if arity > 0]
    assert len(pipeline) > 400
    pair.check(pipeline)


@pytest.mark.parametrize("arguments", [[b"nope"], [b"NoPe", b"a"], [b"", b"a", b"b"], [b"x" * 200], [b"\xff\r\n"]])
def test_unknown_subcommands_are_refused_as_by_redis(pair: Pair, arguments: list[bytes]) -> None:
    pair.check([[name.encode(), *arguments] for name in CONTAINERS])


@pytest.mark.parametrize("greeting", [[], [[b"HELLO", b"3"]]])
def test_writes_are_refused_as_read_only_replica_does(
    replica_pair: Pair, live_table: Table, greeting: list[Words]
) -> None:
    known = dict(rows(live_table))
    pipeline = [request(name, abs(known[name]["arity"])) for name in WRITES if name in known]  # type: ignore[arg-type]
    assert len(pipeline) > 100
    replica_pair.check([*greeting, *pipeline])
    assert {reply.raw for reply in replica_pair.replies_to(pipeline)[1]} == {
        b"-READONLY You can't write against a read only replica.\r\n"
    }


@pytest.mark.parametrize("name", [name for name in WRITES if EXPECTED[name]["since"] > "7.0"])  # type: ignore[operator]
def test_writes_that_are_newer_than_real_server_are_refused_too(pair: Pair, name: str) -> None:
    (reply,) = pair.replies_to([request(name, abs(EXPECTED[name]["arity"]))])[1]  # type: ignore[arg-type]
    assert reply.raw == b"-READONLY You can't write against a read only replica.\r\n"


@pytest.mark.parametrize(
    "line",
    [
        "ASKING",
        "READONLY",
        "READWRITE",
        "CLUSTER INFO",
        "CLUSTER SLOTS",
        "CLUSTER NODES",
        "CLUSTER KEYSLOT a",
        "CLUSTER MYID",
        "DEBUG SLEEP 0",
        "DEBUG nope",
        "EVALSHA 0123456789012345678901234567890123456789 0",
        "EVALSHA_RO 0123456789012345678901234567890123456789 1 a",
    ],
)
def test_commands_with_one_answer_equal_redis(pair: Pair, line: str) -> None:
    pair.check_line(line)


def test_wait_at_replica_is_error(replica_pair: Pair) -> None:
    replica_pair.check_line("WAIT 0 0")


def test_unserved_commands_are_listed_and_refused(pair: Pair, deviations: Deviations) -> None:
    commands = [each for one in command_table() for each in (one, *one.subcommands.values())]
    candidates = [
        each.name
        for each in commands
        if each.handler is None
        and not each.subcommands
        and each.name not in WRITES
        and each.name.partition("|")[0] not in REFUSED
    ]
    assert mismatches(deviations.not_served, candidates) == []
    pipeline = [request(name, abs(EXPECTED[name]["arity"])) for name in candidates]  # type: ignore[arg-type]
    replies = replies_to(pair.sparkis.port, pipeline)  # the real server would shut down
    assert [reply.raw for reply in replies] == [
        b"-ERR command '%b' is not served by sparkis\r\n" % name.encode() for name in candidates
    ]
