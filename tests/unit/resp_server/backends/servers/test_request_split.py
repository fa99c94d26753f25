"""Every command has servers, or the proxy, that answer it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resp_server.command.policies import MOST_USED, POLICIES
from resp_server.command.policy import OF_SERVERS, AnsweredBy
from resp_server.command.table import Command
from resp_server.commands import command_table

# The proxy answers all commands without keys of these groups, which are not about the keys or jobs of servers.
LOCAL_GROUPS = ("pubsub", "scripting")
# The upstream answers these, or the proxy if there is none.
UPSTREAM_COMMANDS = ("command", "config", "lastsave", "lolwut", "memory", "module", "object", "role", "time")


def without_keys() -> Iterator[Command]:
    """Yield the commands and subcommands that sparkis has and that take no keys."""
    for each in command_table():
        for command in (each, *each.subcommands.values()):
            if command.handler is not None and not command.facts.key_specs:
                yield command


@pytest.mark.parametrize("command", list(without_keys()), ids=lambda command: command.name)
def test_keyless_commands_have_known_backend(command: Command) -> None:
    declared = command.policy.answered_by
    is_of_the_upstream = command.name.partition("|")[0] in UPSTREAM_COMMANDS
    assert declared is not None or command.facts.group in LOCAL_GROUPS or is_of_the_upstream
    assert command.answered_without_upstream is (declared if declared in OF_SERVERS else AnsweredBy.LOCAL)


def test_rows_are_those_of_commands() -> None:
    names = {each.name for each in command_table().with_subcommands()}
    assert set(POLICIES) <= names
    assert set(MOST_USED) <= names
