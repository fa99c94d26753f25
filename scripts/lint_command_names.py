"""Find names of commands outside of `resp_server/command`. Exit code 1 if there are any.

    python scripts/lint_command_names.py

What a command is stands in its row of `resp_server/command/policies.py`, so a module that compares names, or has a
table of them, is a second place to change. Names in upper case, of requests that a process sends itself, are allowed.
So are the functions of commands and their declarations, in `resp_server/commands`. `make check` runs it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from resp_server.commands import command_table  # noqa: E402  # after the path to it

# The names are those of options, reports and settings here.
OTHER_PACKAGES = ("command", "commands", "exporter", "programs", "settings")
# Redis has events, frames, categories and reasons with the names of commands.
OTHER_NAMES = (
    "acl/log.py",
    "acl/selector.py",
    "acl/user.py",
    "acl/users.py",
    "backends/servers/field_notifications.py",
    "backends/servers/relay_connection.py",
    "push/keyspace_notifications.py",
    "push/pubsub.py",
    "backends/redis/pushed_frames.py",
)
# Words that are flags and groups of commands, or keys of reports, more often than commands.
ORDINARY_WORDS = frozenset(
    ["client", "cluster", "command", "config", "info", "keys", "pubsub", "readonly", "role", "state", "type"]
)


def names_in(path: Path, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each text in a file that is the name of a command."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        text = text.decode("latin-1") if isinstance(text, bytes) else text
        if isinstance(text, str) and text in names:
            yield node.lineno, text


def main() -> int:
    names = frozenset(each.name for each in command_table().with_subcommands()) - ORDINARY_WORDS
    package, found = ROOT / "resp_server", 0
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if relative.parts[0] in OTHER_PACKAGES or relative.as_posix() in OTHER_NAMES:
            continue
        for line, name in names_in(path, names):
            found += 1
            print(
                f"{path.relative_to(ROOT)}:{line}: '{name}' is the name of a command: "
                "make what differs a field of its row in resp_server/command/policies.py"
            )
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
