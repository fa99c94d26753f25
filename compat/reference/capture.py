"""Capture the command table of a running Redis server, and derive the table that is shipped.

This module reads COMMAND and COMMAND DOCS over RESP3, merges the hand-written additions into an older server's table,
and writes the result in two text forms. It knows no single command: these are in `additions-7.4.json`, and README.md
has the source of each line there.

A table maps a command name to an entry, and an entry maps a field name to its value, both as the server names
them. Subcommands are entries under "subcommands", by their full name (`client|kill`).

    python -m compat.reference.capture --port 6379    server -> redis-7.4.json
    python -m compat.reference.capture --shipped      redis-7.4.json -> resp_server/command/redis.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, cast

import redis

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Entry: TypeAlias = dict[str, Json]
Table: TypeAlias = dict[str, Entry]

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "redis-7.4.json"
ADDITIONS = HERE / "additions-7.4.json"
SHIPPED = HERE.parents[1] / "resp_server" / "command" / "redis.json"

# The elements of one COMMAND reply row after the name and before the subcommands, in the server's order.
ROW_FIELDS = ("arity", "flags", "first_key", "last_key", "step", "acl_categories", "tips", "key_specs")

# A new command in the additions needs all of these fields, because there is no older entry to inherit them from.
REQUIRED_FIELDS = frozenset((*ROW_FIELDS, "summary", "since", "group"))

# Arguments that only group others; since 7.2 the server has a display text for all other arguments.
GROUPING_TYPES = frozenset(("oneof", "block"))


class BadAdditionError(ValueError):
    """An addition names an unknown container, or is a new command that lacks a field."""


def capture(host: str, port: int) -> Table:
    """Read the whole command table of the server at host:port."""
    with redis.Redis(host=host, port=port, protocol=3, decode_responses=True) as client:
        client.response_callbacks.clear()  # the reply as it was sent, not converted by redis-py
        rows = cast("list[list[Json]]", _plain(client.execute_command("COMMAND")))
        docs = cast("Table", _plain(client.execute_command("COMMAND", "DOCS")))
    return {cast("str", row[0]): _entry(row, docs) for row in rows}


def merge(table: Table, additions: Table) -> Table:
    """Merge additions into a table and return a new one.

    An addition has the full name of a command and replaces complete fields; null removes a field. A name that is not in
    the table is a new command or subcommand. Arguments get the display text that servers return since 7.2: their own
    name, unless an addition has another text.
    """
    merged: Table = json.loads(json.dumps(table))
    for name, fields in additions.items():
        container = _container_of(merged, name)
        missing = REQUIRED_FIELDS - fields.keys()
        if name not in container and missing:
            raise BadAdditionError(f"{name}: a new command lacks {sorted(missing)}")
        entry = {**container.get(name, {}), **fields}
        container[name] = {field: value for field, value in entry.items() if value is not None}
    for entry in merged.values():
        _add_display_texts(entry)
    return merged


def render_reference(table: Table) -> str:
    """Render a table for people and diffs: names and fields sorted, one field per line."""
    return "\n".join(_entries_lines(table, "")) + "\n"


def render_shipped(table: Table) -> str:
    """Render a table for the server: the same content, one command with its subcommands per line."""
    lines = (
        f"{json.dumps(name)}:{json.dumps(entry, sort_keys=True, separators=(',', ':'))}"
        for name, entry in sorted(table.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(path: Path) -> Table:
    """Read a table or the additions from a file."""
    return cast("Table", json.loads(path.read_text(encoding="utf-8")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m compat.reference.capture", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--as-is", action="store_true", help="do not merge additions-7.4.json into the capture")
    parser.add_argument("--shipped", action="store_true", help="derive the shipped table, without a server")
    parser.add_argument("--output", type=Path, help="write here instead of to the usual file")
    options = parser.parse_args(arguments)
    if options.shipped:
        path, text = options.output or SHIPPED, render_shipped(load(REFERENCE))
    else:
        table = capture(options.host, options.port)
        if not options.as_is:
            table = merge(table, load(ADDITIONS))
        path, text = options.output or REFERENCE, render_reference(table)
    path.write_text(text, encoding="utf-8")
    return 0


def _plain(value: object) -> Json:
    """Turn a reply into JSON values; a RESP3 set keeps the server's order if the client kept it."""
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case set() | frozenset():
            return sorted((_plain(item) for item in value), key=str)
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"a command table has no {type(value).__name__}")


def _entry(row: list[Json], docs: Table) -> Entry:
    """Join one COMMAND row and its COMMAND DOCS entry."""
    name, subcommands = cast("str", row[0]), cast("list[list[Json]]", row[9])
    documented = docs.get(name, {})
    entry: Entry = {**dict(zip(ROW_FIELDS, row[1:9], strict=True)), **documented}
    entry.pop("subcommands", None)
    if subcommands:
        subcommand_docs = cast("Table", documented.get("subcommands", {}))
        entry["subcommands"] = {cast("str", sub[0]): _entry(sub, subcommand_docs) for sub in subcommands}
    return entry


def _container_of(table: Table, name: str) -> Table:
    """Return the mapping in which the entry of a full name is, or belongs."""
    parent, separator, _ = name.partition("|")
    if not separator:
        return table
    if parent not in table:
        raise BadAdditionError(f"{name}: there is no command {parent}")
    return cast("Table", table[parent].setdefault("subcommands", {}))


def _add_display_texts(entry: Entry) -> None:
    """Add a display text to every argument that is not a group, also in subcommands."""
    pending = list(cast("list[Entry]", entry.get("arguments", [])))
    while pending:
        argument = pending.pop()
        pending.extend(cast("list[Entry]", argument.get("arguments", [])))
        if argument["type"] not in GROUPING_TYPES:
            argument.setdefault("display_text", argument["name"])
    for subcommand in cast("Table", entry.get("subcommands", {})).values():
        _add_display_texts(subcommand)


def _entries_lines(table: Table, indent: str) -> list[str]:
    """Return the lines of an object of entries, without its own name and trailing comma."""
    lines = ["{"]
    for name, entry in sorted(table.items()):
        lines.append(f"{indent} {json.dumps(name)}: {{")
        for field, value in sorted(entry.items()):
            if field == "subcommands":
                first, *rest = _entries_lines(cast("Table", value), indent + "  ")
            else:
                first, rest = json.dumps(value, sort_keys=True), []
            lines.append(f"{indent}  {json.dumps(field)}: {first}")
            lines.extend(rest)
            lines[-1] += ","
        lines[-1] = lines[-1].removesuffix(",")
        lines.append(f"{indent} }},")
    lines[-1] = lines[-1].removesuffix(",")
    lines.append(f"{indent}}}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
