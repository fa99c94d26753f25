"""`sparkis swap-check`: the owner that each key of an upstream would have behind a proxy, and a first rules file."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from resp_server.backends.routing.key_analysis import AnalyzedKeys, AnalyzedState, KeyAnalysis, decisions, printable
from resp_server.backends.routing.rules import parse_rules
from resp_server.backends.routing.rules_file import RulesFile
from resp_server.backends.routing.rules_template import first_rules
from resp_server.net.client import Client
from resp_server.net.tls import files_of
from resp_server.programs.analyzed_states import compare, states_of_log, states_of_server
from resp_server.programs.command_line import message_of
from resp_server.programs.status import table
from resp_server.programs.swap_copies import add_copies_options, delete_copies
from resp_server.programs.upstream_calls import UpstreamCalls
from resp_server.programs.upstream_options import upstream_of
from resp_server.settings.groups import UPSTREAM_VARIABLE
from resp_server.settings.option_values import whole_number
from resp_server.settings.programs import add_settings
from resp_server.settings.setting import SWAP_CHECK
from state_backend.model.clock import MS_PER_S
from state_backend.model.errors import SparkisError
from state_backend.progress_bar import ProgressBar

DESCRIPTION = """\
Read the names of an upstream's keys. Show which keys states would own behind `sparkis proxy --upstream`, which keys
would stay the upstream's, and what has to be decided. Nothing is changed, except by --delete-copies.
"""
EXAMPLES = """\
examples:
  sparkis swap-check --upstream redis://cache:6379 --log /data/sparkis-log --write-rules routes.toml
  sparkis swap-check --upstream redis://cache:6379 --server redis://host1:7379
  sparkis swap-check --upstream redis://cache:6379 --delete-copies --proxy redis://host3:6379
"""
KEYS_MAX = 1_000_000
# The names of so many keys take an hour to read (guess).
KEYS_MAX_MAX = 1_000_000_000
GROUPS_SHOWN = 30
EXAMPLES_SHOWN = 2
INTERRUPTED = 130


class Analysis(NamedTuple):
    """The result of an analysis."""

    address: str
    keys: int
    read: int
    rows: Sequence[AnalyzedKeys]

    @property
    def is_complete(self) -> bool:
        """Return whether all keys were read."""
        return self.read >= self.keys


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_settings(parser, SWAP_CHECK, "upstream")
    parser.add_argument(
        "--log", action="append", default=[], metavar="ROOT", help="a log root, whose states count; may be repeated"
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="a state server, or a proxy without an upstream: its states count, and samples of the upstream's keys are "
        "looked up in them",
    )
    parser.add_argument("--routes", type=Path, metavar="FILE", help="rules that the proxy has, or will have")
    parser.add_argument(
        "--write-rules", type=Path, metavar="FILE", help="write a first rules file; FILE must not exist"
    )
    parser.add_argument(
        "--keys-max",
        type=whole_number(1, KEYS_MAX_MAX, "a number of keys"),
        default=KEYS_MAX,
        metavar="N",
        help="read the names of at most N keys, which are a random sample (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_copies_options(parser)
    add_settings(parser, SWAP_CHECK, "tls")


def run(options: argparse.Namespace) -> int:
    """Print the analysis; return the exit code."""
    # Connections log each failure; the command's error reports a failure that lasts.
    logging.getLogger("sparkis.proxy").addHandler(logging.NullHandler())
    try:
        _check(options)
        if options.delete_copies:
            asyncio.run(delete_copies(options))
        else:
            _print_analysis(options)
    except (SparkisError, ValueError, OSError) as error:
        print(f"sparkis swap-check: {message_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print_analysis(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        server = None
        if options.server:
            server = stack.enter_context(Client.from_url(options.server, tls=files_of(options)))
        analysis = asyncio.run(_analyze(options, _states(options, server)))
        if server is not None:
            compare(server, analysis.rows)
    if options.write_rules is not None:
        _write(options.write_rules, first_rules(analysis.rows))
    print(json.dumps(_as_json(analysis), indent=1) if options.json else _as_text(analysis))


def _check(options: argparse.Namespace) -> None:
    """Check what the parser cannot; ValueError."""
    if not options.upstream:
        raise ValueError(f"give the upstream: --upstream URL, or {UPSTREAM_VARIABLE} in the environment")
    if options.delete_copies:
        if not options.proxy:
            raise ValueError("--delete-copies needs --proxy URL: only the proxies know the owners of keys")
        if options.log or options.server or options.routes is not None or options.write_rules is not None:
            raise ValueError("--delete-copies asks the proxies for owners: give no --log, --server or rules with it")
        return
    if options.proxy or options.yes:
        raise ValueError("--proxy and --yes are for --delete-copies")
    if not (options.log or options.server):
        raise ValueError("give the states: --log ROOT, or --server URL")
    if options.write_rules is not None and options.routes is not None:
        raise ValueError("--write-rules writes a first file, and --routes has rules already: give one of them")
    if options.write_rules is not None and options.write_rules.exists():
        raise ValueError(f"--write-rules: {options.write_rules} exists; give another name, or remove it")


def _states(options: argparse.Namespace, server: Client | None) -> Sequence[AnalyzedState]:
    found = [state for root in options.log for state in states_of_log(root)]
    if server is not None:
        found += [state for state in states_of_server(server) if state not in found]
    if not found:
        raise ValueError(f"{', '.join([*options.log, *filter(None, [options.server])])} has no states yet: start a job")
    return found


async def _analyze(options: argparse.Namespace, states: Sequence[AnalyzedState]) -> Analysis:
    analysis = KeyAnalysis(states, () if options.routes is None else RulesFile(options.routes).read())
    async with UpstreamCalls(upstream_of(options), options.upstream_timeout / MS_PER_S) as upstream:
        keys = await upstream.key_count()
        with ProgressBar("keys") as progress:
            for node in range(upstream.node_count):
                # Each node may use its share of `keys_max`, and what the nodes before it have not used.
                until = options.keys_max * (node + 1) // upstream.node_count
                async for batch in upstream.scan(node):
                    for key in batch:
                        analysis.add(key)
                    progress.show(analysis.count, min(keys, options.keys_max))
                    if analysis.count >= until:
                        break
        rows = analysis.rows()
        await _add_types(upstream, rows)
        return Analysis(upstream.address, keys, analysis.count, rows)


async def _add_types(upstream: UpstreamCalls, rows: Sequence[AnalyzedKeys]) -> None:
    for row in rows:
        replies = await upstream.call_all([(sample.node, (b"TYPE", sample.name)) for sample in row.samples])
        found = [reply.decode() for reply in replies if isinstance(reply, bytes)]
        row.types.update(each for each in found if each != "none")  # deleted meanwhile


def _write(path: Path, text: str) -> None:
    parse_rules(text, str(path))
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def _as_json(analysis: Analysis) -> dict[str, Any]:
    return {
        "upstream": analysis.address,
        "keys": analysis.keys,
        "read": analysis.read,
        "is_complete": analysis.is_complete,
        "rows": [
            {
                "keys": row.keys,
                "owner": row.owner.value,
                "state": None if row.state is None else row.state.name,
                "rule": None if row.rule is None else row.rule.name,
                "count": row.count,
                "types": dict(row.types),
                "state_type": None if row.state is None else row.state.type,
                "compared": row.compared,
                "absent": row.absent,
                "examples": [printable(sample.name) for sample in row.samples[:EXAMPLES_SHOWN]],
            }
            for row in analysis.rows
        ],
        "decisions": list(decisions(analysis.rows)),
    }


def _as_text(analysis: Analysis) -> str:
    states = [row for row in analysis.rows if row.state is not None and row.rule is None]
    ruled = [row for row in analysis.rows if row.rule is not None]
    groups = [row for row in analysis.rows if row.state is None and row.rule is None]
    copied, not_copied = [row for row in states if row.count], [row for row in states if not row.count]
    how = "all were read" if analysis.is_complete else f"{analysis.read:,} were read, a random sample"
    parts = [f"{analysis.address} has {analysis.keys:,} keys; {how}."]
    if ruled:
        rows = [(row.keys, row.owner.value, *_cells(row, analysis)) for row in ruled]
        parts.append(f"Keys of rules:\n{table([('KEYS', 'OWNER', *CELLS), *rows])}")
    if copied:
        rows = [(row.keys, _name(row), *_cells(row, analysis)) for row in copied]
        parts.append(f"Keys that states would answer:\n{table([('KEYS', 'STATE', *CELLS), *rows])}")
    if not_copied:
        rows = [(row.keys, _name(row)) for row in not_copied]
        parts.append(
            "States whose keys the upstream does not have, so that nobody reads them there today:\n"
            + table([("KEYS", "STATE"), *rows])
        )
    if groups:
        rows = [(row.keys, *_cells(row, analysis)) for row in groups[:GROUPS_SHOWN]]
        more = groups[GROUPS_SHOWN:]
        rest = f"\nand {sum(row.count for row in more):,} keys of {len(more):,} other names" if more else ""
        parts.append(f"Keys that stay the upstream's:\n{table([('KEYS', *CELLS), *rows])}{rest}")
    decided = [f"- {each}." for each in decisions(analysis.rows)]
    parts.append("\n".join(["To decide, by a rule for each:", *decided]) if decided else "Nothing has to be decided.")
    return "\n\n".join(parts)


CELLS = ("COUNT", "SHARE", "TYPE", "EXAMPLES")


def _cells(row: AnalyzedKeys, analysis: Analysis) -> tuple[str, ...]:
    share = f"{row.count / analysis.read:.1%}" if analysis.read else "-"
    examples = ", ".join(printable(sample.name) for sample in row.samples[:EXAMPLES_SHOWN])
    return (f"{row.count:,}", share, ", ".join(sorted(row.types)) or "-", examples or "-")


def _name(row: AnalyzedKeys) -> str:
    return "" if row.state is None else f"{row.state.name} ({row.state.type})"
