"""The command table: bad rows, and the table as it is against Redis' own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resp_server.command.handler import CommandHandler, DeclarationError, command
from resp_server.command.policies import POLICIES
from resp_server.command.spec import CommandSpec, redis_facts
from resp_server.command.table import Command, CommandTable
from resp_server.commands import command_table
from resp_server.protocol.errors import GenericError, ReadOnlyError

REDIS = {
    "get": CommandSpec("1.0.0", "string", arity=2, summary="Reads.", flags=("readonly",)),
    "set": CommandSpec("1.0.0", "string", arity=-3, summary="Writes.", flags=("write",)),
    "box": CommandSpec("1.0.0", "server", arity=-2, subcommands={"box|open": CommandSpec("1.0.0", "server", arity=2)}),
}


def declare(name: str, ours: CommandSpec | None = None) -> CommandHandler:
    @command(name, ours)
    def body(context: Any, key: bytes) -> bytes:
        """Reads."""
        return key

    return body


def table_of(*declarations: CommandHandler) -> CommandTable:
    return CommandTable(REDIS, declarations)


@command("get")
def of_two_keys(context: Any, key: bytes, more: bytes) -> None:
    """Reads."""


@command("get")
def without_docstring(context: Any, key: bytes) -> None: ...


@pytest.mark.parametrize(
    ("declarations", "error"),
    [
        ([declare("get"), declare("get")], "'get' is declared twice"),
        ([declare("gett")], "'gett' is not one of Redis"),
        ([declare("get", CommandSpec("0.1.0", "server"))], "'get' is one of Redis"),
        ([declare("set")], "'set' is a write"),
        ([of_two_keys], "arity 3; Redis has 2"),
        ([without_docstring], "no docstring"),
        ([declare("GET")], "lower case"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_wrong_declarations_are_refused(declarations: list[CommandHandler], error: str) -> None:
    with pytest.raises(DeclarationError, match=error):
        table_of(*declarations)


def test_commands_are_found_in_any_case() -> None:
    table = table_of(declare("get"))
    assert table.find([b"gEt", b"a"]).name == "get"
    assert table.find([b"BOX", b"Open"]).name == "box|open"
    assert table.get(b"box|OPEN") is table.find([b"box", b"open"])
    assert table.get(b"nope") is table.get(b"box|nope") is None


def test_unknown_command_is_named_as_typed() -> None:
    table = table_of()
    with pytest.raises(GenericError, match=r"^unknown command 'Foo', with args beginning with: 'a' 'b' $"):
        table.find([b"Foo", b"a", b"b"])
    with pytest.raises(GenericError, match=r"^unknown command 'Foo', with args beginning with: $"):
        table.find([b"Foo"])
    with pytest.raises(GenericError, match=r"^unknown subcommand 'Shut'. Try BOX HELP.$"):
        table.find([b"box", b"Shut"])


def test_command_of_ours_has_container_of_its_own() -> None:
    table = table_of(declare("state|list", CommandSpec("0.1.0", "server")))
    assert table.find([b"state", b"list"]).facts.arity == 3
    assert table.find([b"state"]).facts.arity == -2


# -- the table as it is -------------------------------------------------------------------

TABLE = command_table()
REFERENCE = redis_facts()


def every_command(commands: CommandTable | Command) -> Iterator[Command]:
    for each in commands if isinstance(commands, CommandTable) else commands.subcommands.values():
        yield each
        yield from every_command(each)


def reference_of(name: str) -> CommandSpec | None:
    found = REFERENCE.get(name.partition("|")[0])
    return found.subcommands.get(name) if found is not None and "|" in name else found


# Served differently from what Redis' table says; nothing yet.
DIFFERENCES: frozenset[str] = frozenset()


@pytest.mark.parametrize("each", [each for each in every_command(TABLE) if each.handler], ids=lambda each: each.name)
def test_served_command_is_redis_own_or_of_state(each: Command) -> None:
    reference = reference_of(each.name)
    if reference is None:
        assert each.name.startswith("state|")
    elif each.name not in DIFFERENCES:
        assert each.facts == reference


def test_every_command_of_redis_is_known() -> None:
    assert {each.name for each in every_command(TABLE)} >= set(REFERENCE)


def test_no_write_is_served_and_all_are_refused_as_writes() -> None:
    writes = [each for each in every_command(TABLE) if each.facts.is_write]
    assert len(writes) > 100
    assert all(each.handler is None and isinstance(each.refusal(), ReadOnlyError) for each in writes)


def test_command_that_is_not_served_has_its_error() -> None:
    xread = TABLE.find([b"xread"])
    assert str(xread.refusal()) == "command 'xread' is not served by sparkis"
    pause = TABLE.find([b"client", b"pause"])
    assert str(pause.refusal()) == "command 'client|pause' is not served by sparkis"


def test_every_exact_refusal_is_of_command_that_is_not_served() -> None:
    for name in (name for name, policy in POLICIES.items() if policy.refusal is not None):
        found = TABLE.get(name.encode())
        assert found is not None
        assert found.handler is None
