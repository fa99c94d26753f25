"""docs/state.md describes each subcommand of STATE as COMMAND DOCS does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resp_server.commands import command_table

PAGE = (Path(__file__).parents[3] / "docs" / "state.md").read_text()
SECTION = re.compile(
    r"^## (STATE \w+)\n\n```\n(.*?)\n```\n\nAvailable since (\S+)\. Time complexity: (.*?)\.\n"
    r"ACL categories: (.*?)\.\n\n(.*?)(?=^## )",
    re.MULTILINE | re.DOTALL,
)
INTERNAL = re.compile(r"^\| `(STATE \w+)", re.MULTILINE)
STATE = command_table().find([b"STATE"])
HELP = dict(zip(*[iter(command_table().help_lines("state")[1:])] * 2, strict=True))


@pytest.mark.parametrize(("title", "syntax", "since", "complexity", "categories", "text"), SECTION.findall(PAGE))
def test_section_has_facts_of_its_command_reply_and_example(
    title: str, syntax: str, since: str, complexity: str, categories: str, text: str
) -> None:
    name = title.removeprefix("STATE ")
    facts = STATE.subcommands[name.lower().encode()].facts
    assert (facts.since, facts.complexity) == (since, complexity)
    assert [f"`{each}`" for each in facts.acl_categories] == categories.split(", ")
    [help_line] = [line for line in HELP if line.split()[0] == name]
    assert syntax == "STATE " + help_line.replace("<", "").replace(">", "")
    assert re.search("^Reply: ", text, re.MULTILINE)
    [example] = re.findall(r"^```\n\$ redis-cli(.*?)^```\n", text, re.MULTILINE | re.DOTALL)
    assert title in example


def test_every_subcommand_is_on_page() -> None:
    public = {title for title, *_ in SECTION.findall(PAGE)}
    internal = set(INTERNAL.findall(PAGE))
    assert public | internal == {f"STATE {name.decode().upper()}" for name in STATE.subcommands}
    assert internal == {
        f"STATE {name.decode().upper()}" for name, each in STATE.subcommands.items() if each.policy.is_internal
    }
