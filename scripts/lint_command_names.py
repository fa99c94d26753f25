"""Find names of commands outside of `resp_server/command`. Exit code 1 if there are any.

    python scripts/lint_command_names.py

What a command is stands in its row of `resp_server/command/policies.py`, so a module that compares names, or has a
table of them, is a second place to change. Names in upper case, of requests that a process sends itself, are allowed.
So are the functions of commands and their declarations, in `resp_server/commands`, and the core's table of commands,
`native/rows.pyx`. `make check` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from resp_server.commands import command_table  # noqa: E402  # after the path to it

SUFFIXES = (".py", ".pyx", ".pxd")
# The names are those of options, reports and settings here.
OTHER_PACKAGES = ("command", "commands", "exporter", "programs", "settings")
# Redis has events, frames, categories and reasons with the names of commands.
OTHER_NAMES = (
    "native/bits.pxd",
    "native/rows.pyx",
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


# A text of one word in a Cython module.
CYTHON_TEXT = re.compile(r'(?<!")"([a-z_|]+)"(?!")')


def names_in(path: Path, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each text in a file that is the name of a command."""
    return ((line, text) for line, text in _texts_in(path) if text in names)


def _texts_in(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix != ".py":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for found in CYTHON_TEXT.finditer(line.partition("  # ")[0]):
                yield number, found[1]
        return
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        text = text.decode("latin-1") if isinstance(text, bytes) else text
        if isinstance(text, str):
            yield node.lineno, text


def main() -> int:
    names = frozenset(each.name for each in command_table().with_subcommands()) - ORDINARY_WORDS
    package, found = ROOT / "resp_server", 0
    for path in sorted(path for path in package.rglob("*") if path.suffix in SUFFIXES):
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
