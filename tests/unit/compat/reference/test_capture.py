"""The captured command table: additions are merged into it, and the shipped table is the captured one."""

from __future__ import annotations

import pytest

from compat.reference.capture import (
    REFERENCE,
    SHIPPED,
    BadAdditionError,
    Entry,
    Table,
    load,
    merge,
    render_reference,
    render_shipped,
)

ENTRY: Entry = {
    "arity": 2,
    "flags": ["readonly"],
    "first_key": 1,
    "last_key": 1,
    "step": 1,
    "acl_categories": ["@read"],
    "tips": [],
    "key_specs": [],
    "summary": "Reads.",
    "since": "1.0.0",
    "group": "string",
}


def test_shipped_table_is_reference() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == render_shipped(load(REFERENCE))


def test_reference_is_written_in_its_one_form() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == render_reference(load(REFERENCE))


def test_addition_replaces_whole_fields_and_takes_away_those_that_are_null() -> None:
    table: Table = {"get": {**ENTRY, "complexity": "O(1)"}}
    merged = merge(table, {"get": {"flags": ["fast"], "complexity": None}})
    assert merged["get"] == {**ENTRY, "flags": ["fast"]}
    assert table["get"] == {**ENTRY, "complexity": "O(1)"}


def test_addition_may_be_command_or_subcommand() -> None:
    merged = merge({"client": ENTRY}, {"new": ENTRY, "client|new": ENTRY})
    assert merged["new"] == ENTRY
    assert merged["client"]["subcommands"] == {"client|new": ENTRY}


def test_new_command_without_its_facts_is_refused() -> None:
    with pytest.raises(BadAdditionError, match="lacks"):
        merge({}, {"new": {"arity": 2}})


def test_subcommand_of_nothing_is_refused() -> None:
    with pytest.raises(BadAdditionError, match="there is no command nope"):
        merge({}, {"nope|new": ENTRY})


def test_every_argument_that_is_no_group_gets_display_text() -> None:
    arguments = [
        {"name": "key", "type": "key"},
        {"name": "given", "type": "string", "display_text": "as given"},
        {"name": "choice", "type": "oneof", "arguments": [{"name": "one", "type": "pure-token"}]},
    ]
    merged = merge({"get": {**ENTRY, "arguments": arguments}}, {})
    assert merged["get"]["arguments"] == [
        {"name": "key", "type": "key", "display_text": "key"},
        {"name": "given", "type": "string", "display_text": "as given"},
        {
            "name": "choice",
            "type": "oneof",
            "arguments": [{"name": "one", "type": "pure-token", "display_text": "one"}],
        },
    ]
