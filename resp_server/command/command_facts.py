"""Parses an upstream's reply to COMMAND: where the keys of each command are, also of modules' commands. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hiredis

from resp_server.command.spec import CommandSpec, Json

# The fields of a row that all versions have: name, arity, flags, and the first, the last and the step of the keys.
OLD_FIELDS = 6
# The positions of fields that rows have since Redis 7.
TIPS, KEY_SPECS, SUBCOMMANDS = 7, 8, 9


def facts_in(reply: bytes) -> dict[str, CommandSpec]:
    """Return the facts of each command by name; ValueError, TypeError or LookupError for an unexpected reply."""
    reader = hiredis.Reader(encoding="utf-8", errors="surrogateescape", notEnoughData=None)
    reader.feed(reply)
    rows = reader.gets()
    if not isinstance(rows, list):
        raise ValueError(f"the reply to COMMAND is not an array: {str(rows)[:200]}")
    return {str(row[0]).lower(): _facts(row) for row in rows}


def _facts(row: Sequence[Any]) -> CommandSpec:
    _, arity, flags, first, last, step = row[:OLD_FIELDS]
    has_specs = len(row) > KEY_SPECS
    subcommands = row[SUBCOMMANDS] if len(row) > SUBCOMMANDS else []
    flag_names = [str(flag) for flag in flags]
    specs = [_spec(each) for each in row[KEY_SPECS]] if has_specs else _old_specs(flag_names, first, last, step)
    return CommandSpec(
        since="",
        group="",
        arity=arity,
        flags=flag_names,
        tips=[str(tip) for tip in row[TIPS]] if has_specs else (),
        first_key=first,
        last_key=last,
        step=step,
        key_specs=specs,
        subcommands={str(subcommand[0]).partition("|")[2].lower(): _facts(subcommand) for subcommand in subcommands},
    )


def _old_specs(flags: Sequence[str], first: int, last: int, step: int) -> list[Json]:
    """Return the key specifications of a command, from the fields that Redis before 7 has."""
    access = ["RW" if "write" in flags else "RO"]
    if "movablekeys" in flags:
        unknown = {"type": "unknown", "spec": {}}
        return [{"flags": access, "begin_search": unknown, "find_keys": unknown}]
    if not first:
        return []
    lastkey = last - first if last > 0 else last
    return [
        {
            "flags": access,
            "begin_search": {"type": "index", "spec": {"index": first}},
            "find_keys": {"type": "range", "spec": {"lastkey": lastkey, "keystep": step, "limit": 0}},
        }
    ]


def _spec(pairs: Sequence[Any]) -> Json:
    """Return a key specification as in the command table, from flat arrays of names and values."""
    found = _mapping(pairs)
    made: dict[str, Any] = {"flags": [str(flag) for flag in found["flags"]]}
    for part in ("begin_search", "find_keys"):
        search = _mapping(found[part])
        made[part] = {"type": search["type"], "spec": _mapping(search.get("spec") or ())}
    return made


def _mapping(pairs: Sequence[Any]) -> Mapping[str, Any]:
    return dict(zip(map(str, pairs[::2]), pairs[1::2], strict=True))


def tells_all_keys(facts: CommandSpec) -> bool:
    """Return whether the key specifications find every key of a request."""
    return not any(
        "incomplete" in spec["flags"] or "unknown" in (spec["begin_search"]["type"], spec["find_keys"]["type"])
        for spec in facts.key_specs
    )
