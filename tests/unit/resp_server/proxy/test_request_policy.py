"""Every command has servers, or the proxy, that answer it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resp_server.command.table import Command
from resp_server.commands import command_table
from resp_server.proxy.dispatcher import INTERNAL_COMMANDS
from resp_server.proxy.request_policy import (
    LOCAL_COMMANDS,
    LOCAL_CONTAINERS,
    LOCAL_GROUPS,
    POLICIES,
    RequestPolicy,
    policy_of,
)


def without_keys() -> Iterator[Command]:
    """Yield the commands and subcommands that sparkis has and that take no keys."""
    for each in command_table():
        for command in (each, *each.subcommands.values()):
            if command.declaration is not None and not command.facts.key_specs:
                yield command


def is_local(command: Command) -> bool:
    is_in_local = command.facts.group in LOCAL_GROUPS or command.name.partition("|")[0] in LOCAL_CONTAINERS
    return is_in_local or command.name in LOCAL_COMMANDS


@pytest.mark.parametrize("command", list(without_keys()), ids=lambda command: command.name)
def test_a_command_without_keys_is_answered_by_servers_or_declared_to_be_the_proxys(command: Command) -> None:
    assert (command.name in POLICIES) != is_local(command)
    assert (policy_of(command) is RequestPolicy.LOCAL) == is_local(command)


def test_nothing_is_declared_that_does_not_exist() -> None:
    names = {command.name for command in without_keys()}
    assert set(POLICIES) <= names
    assert names | {name.partition("|")[0] for name in names} >= LOCAL_COMMANDS
    assert set(INTERNAL_COMMANDS) <= LOCAL_COMMANDS
