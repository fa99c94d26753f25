"""What is known about a command apart from its body: the facts of COMMAND and COMMAND DOCS.

For Redis' own commands they stand in `reference.json`, captured from a real server (see `compat/reference`), and
nowhere else; a command of ours states them in its declaration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

Json = Mapping[str, Any]

# A tip of our own: the keys of a request may be of several slots, all of them the node's.
ANY_SLOTS = "slots:any"


@dataclass(frozen=True)
class Facts:
    """One row of the command table, in Redis' words. `key_specs` and `arguments` are as in the JSON file."""

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
    subcommands: Mapping[str, Facts] = field(default_factory=dict)

    @classmethod
    def of_json(cls, row: Json) -> Facts:
        """Read one row, its subcommands included; a name that is not known here is an error."""
        subcommands = {name: cls.of_json(each) for name, each in row.get("subcommands", {}).items()}
        return cls(**{**row, "subcommands": subcommands})

    @property
    def is_write(self) -> bool:
        """Tell whether the command may change a key."""
        return "write" in self.flags

    @property
    def needs_auth(self) -> bool:
        """Tell whether a client has to authenticate first."""
        return "no_auth" not in self.flags

    def with_subcommand(self, name: str, facts: Facts) -> Facts:
        """Return the container's facts with one subcommand more."""
        return replace(self, subcommands={**self.subcommands, name: facts})


def redis_facts() -> dict[str, Facts]:
    """Read the table of Redis 7.4: about 250 commands by their names."""
    text = files("resp_server.commands").joinpath("reference.json").read_text("utf-8")
    return {name: Facts.of_json(row) for name, row in json.loads(text).items()}
