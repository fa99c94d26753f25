"""docs/commands.md is what the command table says."""

from __future__ import annotations

from compat.commands_page import PAGE, page
from resp_server.commands import command_table


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it with make commands"


def test_every_command_has_its_line() -> None:
    names = [each.name for one in command_table() for each in (one, *one.subcommands.values())]
    lines = page().splitlines()
    listed = [line.split("`")[1].lower().replace(" ", "|") for line in lines if line.startswith("| `")]
    containers = {name.partition("|")[0] for name in names if "|" in name} - {"command"}
    assert sorted(listed) == sorted(set(names) - containers)
