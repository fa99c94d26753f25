"""The facts of a command that COMMAND and COMMAND DOCS list.

Those of Redis' own commands are in `redis.json`, captured from a real server (see `compat/reference`). Those of our
own commands are in their declarations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

Json = Mapping[str, Any]

# A command tip of ours: the keys of a request may be in several slots, which must all be owned by the node.
ANY_SLOTS = "slots:any"
# The version that our own commands are in since then.
SINCE = "0.1.0"


@dataclass(frozen=True)
class CommandSpec:
    """One row of the command table, with Redis' names. `key_specs` and `arguments` are as in the JSON file."""

    since: str
    group: str
    arity: int = 0
    summary: str = ""
    complexity: str = ""
    flags: Sequence[str] = ()
    acl_categories: Sequence[str] = ()
    tips: Sequence[str] = ()
    first_key: int = 0
    last_key: int = 0
    step: int = 0
    key_specs: Sequence[Json] = ()
    arguments: Sequence[Json] = ()
    doc_flags: Sequence[str] = ()
    history: Sequence[Sequence[str]] = ()
    deprecated_since: str = ""
    replaced_by: str = ""
    subcommands: Mapping[str, CommandSpec] = field(default_factory=dict)

    @classmethod
    def of_json(cls, row: Json) -> CommandSpec:
        """Return one row with its subcommands; an unknown name in it raises TypeError."""
        subcommands = {name: cls.of_json(each) for name, each in row.get("subcommands", {}).items()}
        return cls(**{**row, "subcommands": subcommands})

    @property
    def is_write(self) -> bool:
        """Whether the command may change a key."""
        return "write" in self.flags

    @property
    def needs_auth(self) -> bool:
        """Whether a client must authenticate before it uses the command."""
        return "no_auth" not in self.flags

    def has_arity_of(self, request: Sequence[bytes]) -> bool:
        """Return whether the number of a request's words matches the arity."""
        arity = self.arity
        return len(request) == arity if arity > 0 else len(request) >= -arity

    def with_subcommand(self, name: str, facts: CommandSpec) -> CommandSpec:
        """Return the container's facts with an additional subcommand."""
        return replace(self, subcommands={**self.subcommands, name: facts})


def redis_facts() -> dict[str, CommandSpec]:
    """Return the commands of Redis 7.4 by name, about 250."""
    text = files("resp_server.command").joinpath("redis.json").read_text("utf-8")
    return {name: CommandSpec.of_json(row) for name, row in json.loads(text).items()}


# The keys of our own commands, which begin after the subcommand.
ONE_KEY: Json = {
    "flags": ["RO", "access"],
    "begin_search": {"type": "index", "spec": {"index": 2}},
    "find_keys": {"type": "range", "spec": {"lastkey": 0, "keystep": 1, "limit": 0}},
}
ALL_KEYS: Json = {**ONE_KEY, "find_keys": {"type": "range", "spec": {"lastkey": -1, "keystep": 1, "limit": 0}}}


def our_facts(
    complexity: str,
    flags: str,
    acl_categories: str,
    *arguments: Json,
    keys: Json | None = None,
    tips: Sequence[str] = (),
) -> CommandSpec:
    """Return the facts of a command of ours.

    Args:
        flags, acl_categories: Names, with spaces between them.
        keys: `ONE_KEY` or `ALL_KEYS`; None: it has no keys.
    """
    last_key = 0 if keys is None else 2 if keys is ONE_KEY else -1
    return CommandSpec(
        SINCE,
        "server",
        complexity=complexity,
        flags=tuple(flags.split()),
        acl_categories=tuple(acl_categories.split()),
        tips=tips,
        first_key=0 if keys is None else 2,
        last_key=last_key,
        step=0 if keys is None else 1,
        key_specs=() if keys is None else [keys],
        arguments=arguments,
    )


def argument(name: str, type: str = "string", *flags: str, **others: object) -> Json:
    """Return an argument of a command of ours, such as an `optional` one."""
    return {"name": name, "type": type, "display_text": name, **({"flags": list(flags)} if flags else {}), **others}


def block(name: str, *arguments: Json, flags: Sequence[str] = ()) -> Json:
    """Return arguments that come together."""
    return {"name": name, "type": "block", **({"flags": list(flags)} if flags else {}), "arguments": list(arguments)}
