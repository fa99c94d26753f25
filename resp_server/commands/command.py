"""COMMAND: the command table, in the shapes that Redis sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resp_server.command.handler import command
from resp_server.command.keys import keys_of
from resp_server.command.spec import CommandSpec
from resp_server.command.table import Command
from resp_server.pipeline.context import CommandContext
from resp_server.protocol.errors import GenericError, ReplyError, syntax_error
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import Frames, Reply, ReplySet, Sliced, encode
from resp_server.session.session import RESP2

# RESP2 clients read some of these maps by position, so fields are in Redis' order.
SPEC_ORDER = ("index", "keyword", "startfrom", "lastkey", "keystep", "limit")
KEY_SPEC_ORDER = ("notes", "flags", "begin_search", "find_keys")
KEYNUM_ORDER = ("keynumidx", "firstkey", "keystep")
ARGUMENT_ORDER = (
    "name", "type", "display_text", "key_spec_index", "token", "since", "deprecated_since", "flags", "arguments",
)  # fmt: skip


# The reply to COMMAND LIST among the cached rows.
LIST = ("list", "", RESP2)
# Cached rows of a reply that is made at once: all commands (measured: 0.2 ms).
ROWS_AT_ONCE = 512


@command("command")
def command_(context: CommandContext) -> Reply:
    """Returns detailed information about all commands."""
    return _rows(context, list(context.server.table))


def _rows(context: CommandContext, commands: Sequence[Command | None]) -> Reply:
    """Return the commands' rows, nil for None: in steps, until the rows are cached."""
    row, is_cached = _cached(context, info_row)
    if len(commands) <= ROWS_AT_ONCE and all(each is None or is_cached(each) for each in commands):
        return [None if each is None else row(each) for each in commands]
    rows = ([None if each is None else row(each)] for each in commands)
    return Sliced(rows, lambda: None, count=len(commands))


def _cached(
    context: CommandContext, render: Callable[[Command], Reply]
) -> tuple[Callable[[Command], Frames], Callable[[Command], bool]]:
    """Return a function that renders a row and caches its bytes, and whether a row is cached.

    Many clients request all rows when they connect. To render one takes up to half a millisecond.
    """
    rows, protocol, kind = context.server.table.rows, context.session.protocol, render.__name__

    def row(command: Command) -> Frames:
        key = (kind, command.name, protocol)
        cached = rows.get(key)
        if cached is None:
            cached = rows[key] = Frames(encode(render(command), protocol))
        return cached

    return row, lambda command: (kind, command.name, protocol) in rows


@command("command|count")
def command_count(context: CommandContext) -> int:
    """Returns a count of commands."""
    return len(context.server.table)


@command("command|info")
def command_info(context: CommandContext, *names: bytes) -> Reply:
    """Returns information about one, multiple or all commands."""
    table = context.server.table
    return _rows(context, [table.get(name) for name in names] if names else list(table))


@command("command|docs")
def command_docs(context: CommandContext, *names: bytes) -> Reply:
    """Returns documentary information about one, multiple or all commands."""
    table = context.server.table
    commands = [table.get(name) for name in names] if names else list(table)
    found = {each.name.encode(): each for each in commands if each is not None}
    row, is_cached = _cached(context, docs_row)
    if len(found) <= ROWS_AT_ONCE and all(map(is_cached, found.values())):
        return {name: row(each) for name, each in found.items()}
    rows = ([name, row(each)] for name, each in found.items())
    return Sliced(rows, lambda: None, dict, len(found))


@command("command|list")
def command_list(context: CommandContext, *filters: bytes) -> Reply:
    """Returns a list of command names."""
    table = context.server.table
    if not filters:
        if LIST not in table.rows:  # the same in both versions of the protocol
            names: list[Reply] = [each.name.encode() for each in table.with_subcommands()]
            table.rows[LIST] = Frames(encode(names, RESP2))
        return table.rows[LIST]
    all_commands = table.with_subcommands()
    if len(filters) != 3 or filters[0].upper() != b"FILTERBY":
        raise syntax_error()
    match filters[1].upper():
        case b"MODULE":
            return []
        case b"ACLCAT":
            category = "@" + filters[2].decode("utf-8", "replace").lower()
            return [each.name.encode() for each in all_commands if category in each.facts.acl_categories]
        case b"PATTERN":
            matches = matcher(filters[2], ignore_case=True)
            return [each.name.encode() for each in all_commands if matches(each.name.encode())]
        case _:
            raise syntax_error()


@command("command|getkeys")
def command_getkeys(context: CommandContext, name: bytes, *arguments: bytes) -> Reply:
    """Extracts the key names from an arbitrary command."""
    return [key for key, _ in _keys(context, (name, *arguments))]


@command("command|getkeysandflags")
def command_getkeysandflags(context: CommandContext, name: bytes, *arguments: bytes) -> Reply:
    """Extracts the key names and access flags for an arbitrary command."""
    return [[key, ReplySet(flags)] for key, flags in _keys(context, (name, *arguments))]


def _keys(context: CommandContext, request: Sequence[bytes]) -> list[tuple[bytes, Sequence[str]]]:
    try:
        target = context.server.table.find(request)
    except ReplyError:
        raise GenericError("Invalid command specified") from None
    single = target.single_key_at
    if not single and all("not_key" in spec["flags"] for spec in target.facts.key_specs):
        raise GenericError("The command has no key arguments")
    try:
        target.check_arity(request)
    except ReplyError:
        raise GenericError("Invalid number of arguments specified for command") from None
    if single:
        return [(request[single], target.facts.key_specs[0]["flags"])]
    keys = keys_of(target.facts, request) or []
    if not keys and "no_mandatory_keys" not in target.facts.flags:
        raise GenericError("Invalid arguments specified for command")
    return keys


@command("command|help")
def command_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("command")


def info_row(command: Command) -> Reply:
    """Return a command's row of COMMAND INFO: ten fields by position."""
    facts = command.facts
    return [
        command.name.encode(),
        facts.arity,
        ReplySet(facts.flags),
        facts.first_key,
        facts.last_key,
        facts.step,
        ReplySet(facts.acl_categories),
        ReplySet(tip.encode() for tip in facts.tips),
        ReplySet(_key_spec(spec) for spec in facts.key_specs),
        # As in Redis: an array if there are subcommands, an empty set if there are none.
        [info_row(subcommand) for subcommand in command.subcommands.values()] or ReplySet(),
    ]


def _key_spec(spec: Mapping[str, Any]) -> Reply:
    return _ordered(
        {
            **spec,
            "flags": ReplySet(spec["flags"]),
            "begin_search": _search(spec["begin_search"]),
            "find_keys": _search(spec["find_keys"]),
        },
        KEY_SPEC_ORDER,
    )


def _search(search: Mapping[str, Any]) -> Reply:
    order = KEYNUM_ORDER if search["type"] == "keynum" else SPEC_ORDER
    return {b"type": search["type"].encode(), b"spec": _ordered(search["spec"], order)}


def _ordered(row: Mapping[str, Any], order: Sequence[str]) -> dict[bytes, Reply]:
    """Return those fields of a row that are in `order`, in this order; texts as bulk strings."""
    return {
        name.encode(): row[name].encode() if isinstance(row[name], str) else row[name] for name in order if name in row
    }


def docs_row(command: Command) -> Reply:
    """Return a command's row of COMMAND DOCS."""
    facts = command.facts
    row: dict[bytes, Reply] = _texts(facts, "summary", "since", "group", "complexity")
    if facts.doc_flags:
        row[b"doc_flags"] = ReplySet(facts.doc_flags)
    row |= _texts(facts, "deprecated_since", "replaced_by")
    if facts.history:
        row[b"history"] = ReplySet([version.encode(), text.encode()] for version, text in facts.history)
    if facts.arguments:
        row[b"arguments"] = [_argument(argument) for argument in facts.arguments]
    if command.subcommands:
        row[b"subcommands"] = {each.name.encode(): docs_row(each) for each in command.subcommands.values()}
    return row


def _texts(facts: CommandSpec, *names: str) -> dict[bytes, Reply]:
    return {name.encode(): getattr(facts, name).encode() for name in names if getattr(facts, name)}


def _argument(argument: Mapping[str, Any]) -> Reply:
    row = dict(argument)
    if "flags" in row:
        row["flags"] = ReplySet(row["flags"])
    if "arguments" in row:
        row["arguments"] = [_argument(each) for each in row["arguments"]]
    return _ordered(row, ARGUMENT_ORDER)
