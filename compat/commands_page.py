"""Writes docs/commands.md from the command table: each Redis command, and how servers and proxies serve it.

python -m compat.commands_page          write the page
python -m compat.commands_page --check  fail if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from compat.conformance.judge import Deviations
from resp_server.command.policy import AnsweredBy, SpecialCommand
from resp_server.command.table import Command, CommandTable
from resp_server.commands import command_table
from resp_server.settings.server import REDIS_VERSION

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

# The groups of Redis in the order of the page. A missing group is an error.
GROUPS = {
    "string": "Strings",
    "bitmap": "Bitmaps",
    "hash": "Hashes",
    "list": "Lists",
    "set": "Sets",
    "sorted-set": "Sorted sets",
    "stream": "Streams",
    "geo": "Geo indices",
    "hyperloglog": "HyperLogLogs",
    "generic": "Keys of any kind",
    "transactions": "Transactions",
    "pubsub": "Pub/sub",
    "scripting": "Scripts and functions",
    "connection": "Connections",
    "server": "Servers",
    "cluster": "Clusters",
    "sentinel": "Sentinel",
}

# No state is a stream; some reads of streams reply as for a missing key.
AS_MISSING = "as for a missing key: no state is of this kind"
MISSING_KINDS = ("stream",)

ANSWERED_BY = {
    AnsweredBy.LOCAL: "the proxy itself",
    AnsweredBy.STATES: "the key's server",
    AnsweredBy.ALL_KEYS: "all servers",
    AnsweredBy.ALL_JOBS: "all servers",
    AnsweredBy.ONE_JOB: "a server of the job",
}
# The reasons why some commands reply with an error of Redis, by patterns of their names.
REASONS = {
    "cluster|*": "a node gets its topology from a file or a registry",
    "debug": "the reply of a Redis that does not allow it",
    "evalsha*": "no scripts",
    "wait*": "the reply of a replica: no write can be waited for",
}

HEAD = f"""\
# Commands

All commands of Redis {REDIS_VERSION.rpartition(".")[0]}, and whether sparkis serves them.
`make commands` writes this page from the servers' command table, which clients read with `COMMAND`; a test keeps it up
to date.

- **served**: the reply is that of Redis; tests compare it with a real server.
  [compat/deviations.toml](../compat/deviations.toml) lists each intended difference with its reason.
- **write**: refused with `READONLY You can't write against a read only replica.`: see
  [clients and refused writes](read-only.md).
- **no**: sparkis checks the name, the arity and the subcommand as Redis does, then replies with an error. The row has
  the reason.

*since* is the version of Redis that introduced the command. *cluster* is the position of a request's keys: the first
one (`1`), the first to the last one (`1..-1`; `1..-1/2`: every second argument), or `by its arguments`. *proxy* is the
process that replies through a [proxy](serving.md#a-proxy): a command with keys goes to the server that owns them; a
split command takes keys of several slots.
"""


def page() -> str:
    """Return the page."""
    table = command_table()
    reasons = {**Deviations.load().not_served, **REASONS}
    parts = [HEAD, _counts(table)]
    for group, title in GROUPS.items():
        rows = [each for each in _rows(table) if each.facts.group == group and each.name.partition("|")[0] != "state"]
        if rows:
            parts.append(_section(title, rows, reasons))
    own = [each for each in _rows(table) if each.name.partition("|")[0] == "state"]
    parts.append(_section("sparkis' own: STATE", own, reasons, is_own=True))
    return "\n".join(parts)


def _rows(table: CommandTable) -> Iterator[Command]:
    """Iterate over commands and subcommands, without containers."""
    for each in sorted(table, key=lambda command: command.name):
        if each.facts.group not in GROUPS:
            raise ValueError(f"command {each.name!r} is of the group {each.facts.group!r}, which GROUPS lacks; add it")
        if not each.subcommands or each.handler is not None:
            yield each
        yield from sorted(each.subcommands.values(), key=lambda command: command.name)


def _counts(table: CommandTable) -> str:
    rows = [each for each in _rows(table) if each.name.partition("|")[0] != "state"]
    served = sum(each.handler is not None for each in rows)
    writes = sum(each.handler is None and each.facts.is_write for each in rows)
    return (
        f"Of {len(rows)} commands and subcommands, {served} are served, {writes} are refused as writes, and "
        f"{len(rows) - served - writes} are not applicable.\n"
    )


def _section(title: str, rows: Sequence[Command], reasons: Mapping[str, str], *, is_own: bool = False) -> str:
    lines = [f"## {title}\n", "| command | since | | cluster | proxy |", "|---|---|---|---|---|"]
    for each in rows:
        name = each.name.replace("|", " ").upper()
        status = each.facts.summary if is_own else _status(each, reasons)
        lines.append(f"| `{name}` | {each.facts.since} | {status} | {_keys(each)} | {_proxy(each)} |")
    return "\n".join(lines) + "\n"


def _status(command: Command, reasons: Mapping[str, str]) -> str:
    if command.handler is not None:
        return f"served, {AS_MISSING}" if command.facts.group in MISSING_KINDS else "served"
    if command.facts.is_write:
        return "write"
    reason = next((text for pattern, text in reasons.items() if fnmatchcase(command.name, pattern)), None)
    if reason is None:
        raise ValueError(f"command {command.name!r} is not served, and neither table has a reason; add one")
    return f"no: {reason}"


def _keys(command: Command) -> str:
    facts = command.facts
    if not facts.key_specs:
        return ""
    if "movablekeys" in facts.flags or facts.first_key <= 0:
        return "by its arguments"
    if facts.first_key == facts.last_key:
        return str(facts.first_key)
    step = f"/{facts.step}" if facts.step > 1 else ""
    return f"{facts.first_key}..{facts.last_key}{step}"


def _proxy(command: Command) -> str:
    if command.handler is None:
        return ""
    if command.policy.is_internal:
        return "not for clients of a proxy"
    if command.facts.group == "transactions":
        return "the owners of the keys, at one epoch of each job"
    answered_by = command.answered_without_upstream
    if answered_by is AnsweredBy.STATES and command.policy.is_split_by_slot:
        return "the keys' servers, split"
    return "the servers in turn" if command.policy.special is SpecialCommand.SCAN else ANSWERED_BY[answered_by]


def main(arguments: Sequence[str]) -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is not up to date: make commands", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
