"""Every command has servers, or the proxy, that answer it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resp_server.backends.servers.request_policy import policy_of
from resp_server.command.ours import MOST_USED, ROWS
from resp_server.command.policy import RequestPolicy
from resp_server.command.table import Command
from resp_server.commands import command_table

# The proxy answers all commands without keys of these groups, which are not about the keys or jobs of servers.
LOCAL_GROUPS = ("cluster", "connection", "pubsub", "scripting", "transactions")


def without_keys() -> Iterator[Command]:
    """Yield the commands and subcommands that sparkis has and that take no keys."""
    for each in command_table():
        for command in (each, *each.subcommands.values()):
            if command.handler is not None and not command.facts.key_specs:
                yield command


@pytest.mark.parametrize("command", list(without_keys()), ids=lambda command: command.name)
def test_a_command_without_keys_is_answered_by_servers_or_declared_to_be_the_proxys(command: Command) -> None:
    is_declared = command.policy.at_proxy is not None
    assert is_declared != (command.facts.group in LOCAL_GROUPS)
    assert policy_of(command) is (command.policy.at_proxy or RequestPolicy.LOCAL)


def test_rows_are_those_of_commands() -> None:
    names = {each.name for each in command_table().with_subcommands()}
    assert set(ROWS) <= names
    assert set(MOST_USED) <= names
