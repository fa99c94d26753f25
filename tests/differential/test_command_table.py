"""The command table equals that of the real server, with the commands and options that came after its version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compat.conformance.judge import Deviations
from compat.conformance.pair import Pair
from compat.conformance.servers import Running
from compat.conformance.wire import Reply
from compat.reference.capture import REFERENCE, Entry, Table, capture, load


@pytest.fixture(scope="session")
def our_table(sparkis: Running) -> Table:
    """The command table as sparkis sends it."""
    return capture("127.0.0.1", sparkis.port)


def rows(table: Table) -> Iterator[tuple[str, Entry]]:
    """Return the rows of commands and subcommands, without the latter in the former."""
    for name, entry in table.items():
        yield name, {field: value for field, value in entry.items() if field != "subcommands"}
        yield from rows(entry.get("subcommands", {}))  # type: ignore[arg-type]  # a table within a table


def test_reference_is_real_servers_table_and_additions(expected_table: Table) -> None:
    assert load(REFERENCE) == expected_table


def test_command_and_docs_equal_reference(our_table: Table, expected_table: Table, deviations: Deviations) -> None:
    expected, found = dict(rows(expected_table)), dict(rows(our_table))
    added = {name for name in found if name.partition("|")[0] in deviations.commands_added}
    assert {name: row for name, row in found.items() if name not in added} == expected


def test_added_commands_are_listed(our_table: Table, expected_table: Table, deviations: Deviations) -> None:
    assert our_table.keys() - expected_table.keys() == deviations.commands_added.keys()


@pytest.mark.parametrize("request_words", [[b"COMMAND"], [b"COMMAND", b"DOCS"], [b"COMMAND", b"INFO"]])
def test_both_protocol_versions_carry_same_table(pair: Pair, request_words: list[bytes]) -> None:
    (in_resp2,) = pair.replies_to([request_words])[1]
    _, in_resp3 = pair.replies_to([[b"HELLO", b"3"], request_words])[1]
    assert in_resp2.plain == in_resp3.plain


def test_fields_of_table_come_in_redis_order_and_shapes(pair: Pair, live_table: Table) -> None:
    """Of commands that both versions know. RESP3 tells maps and sets apart; RESP2 carries the same, as said above."""
    names = [name.encode() for name in live_table]
    for words in ([b"COMMAND", b"INFO", *names], [b"COMMAND", b"DOCS", *names]):
        theirs, ours = (replies[-1] for replies in pair.replies_to([[b"HELLO", b"3"], words]))
        assert sorted({at[-3:] for at in differing_shapes(theirs, ours, ())}, key=repr) == []


def differing_shapes(theirs: Reply, ours: Reply, at: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    """Walk two replies alongside each other and return where a mark, or the order of a map's names, is not the same.

    Arrays are compared as far as both go; of maps, the names that both have.
    """
    if theirs.type != ours.type:
        yield (*at, theirs.type, ours.type)
    elif theirs.type == "%":
        yours, mine = ({name.value: value for name, value in reply.value} for reply in (theirs, ours))
        if is_ordered(at) and [name for name in mine if name in yours] != [name for name in yours if name in mine]:
            yield (*at, *yours)
        for name in yours.keys() & mine.keys():
            yield from differing_shapes(yours[name], mine[name], (*at, name))
    elif isinstance(theirs.value, list):
        for number, (their, our) in enumerate(zip(theirs.value, ours.value, strict=False)):
            yield from differing_shapes(their, our, (*at, number))


def is_ordered(at: tuple[object, ...]) -> bool:
    """Return whether a map's order says something: that of commands and subcommands is a hash table's."""
    return bool(at) and at[-1] != b"subcommands"
