"""`sparkis inspect PATH`: the state in checkpoints, one or all below a folder, or the jobs in a log, without Spark."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.discovery import LOOKED_FOR, FoundQuery, is_checkpoint, queries_below
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.inspection import inspect
from state_backend.checkpoint.states import UnreadableState
from state_backend.log.inspection import facts_of_log, is_log, lines_of
from state_backend.model.errors import CheckpointError, SparkisError
from state_backend.progress_bar import ProgressBar

DESCRIPTION = (
    "Show a query's checkpoint: batches, watermark, operators, states, their schemas and sizes; of a folder, such as a "
    "pipeline's storage, all queries below it; or the jobs of a change log: states, epochs, snapshots, sizes and "
    "writers. Needs no Spark and no server."
)
COLUMNS = ("OPERATOR", "STATE", "ROWS", "BYTES", "PARTITIONS", "SKEW", "TYPE", "KEYS OF sparkis attach")
# Of a folder that cannot be inspected: how many names in it are shown, and how many are tried.
NAMES_SHOWN = 8
NAMES_TRIED = 50
# A buffer of many of one function.
NUMBERED = re.compile(r"(.*)\[\d+\]")
UNITS = ("B", "kB", "MB", "GB", "TB")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "location",
        metavar="PATH",
        help="a checkpoint, a folder with checkpoints below it, or a log's root: a path, s3://, gs://, abfss:// ...",
    )
    parser.add_argument("--job", metavar="NAME", help="of a log: only this job")
    parser.add_argument("--batch", type=int, metavar="N", help="a committed micro-batch (default: the last one)")
    parser.add_argument("--no-counts", action="store_true", help="do not read the state: no rows, bytes and skew")
    parser.add_argument("--partitions", action="store_true", help="also list the rows and bytes of each partition")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the facts; return the exit code."""
    try:
        if is_log(options.location):
            return _print_log(options)
        files = CheckpointFiles.at(options.location)
        if files.size("metadata") is None and not is_checkpoint(files):
            return _print_queries(options, files, queries_below(files))
        facts = _facts(options, files)
    except SparkisError as error:
        print(f"sparkis inspect: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=1) if options.json else "\n".join(_lines(facts, options.partitions)))
    return 0


def _facts(options: argparse.Namespace, files: CheckpointFiles) -> dict[str, Any]:
    with ProgressBar("partitions") as progress:
        checkpoint = Checkpoint(files)
        return inspect(checkpoint, options.batch, progress.show, counts=not options.no_counts)


def _print_queries(options: argparse.Namespace, files: CheckpointFiles, queries: Sequence[FoundQuery]) -> int:
    """Print the facts about each query below a folder; an error takes the place of those that cannot be read."""
    if not queries:
        raise _nothing_found(files)
    pages = []
    for query in queries:
        location = files.name(query.checkpoint)
        try:
            pages.append(_facts(options, CheckpointFiles.at(location)))
        except SparkisError as error:
            pages.append({"location": location, "error": str(error)})
    if options.json:
        print(json.dumps(pages, indent=1))
    else:
        print("\n\n".join("\n".join(_lines(page, options.partitions)) for page in pages))
    return 1 if all("error" in page for page in pages) else 0


def _nothing_found(files: CheckpointFiles) -> CheckpointError:
    """Return the error of a folder without queries, with the files that are there, and the logs among them."""
    names = sorted(files.names(""))
    shown = ", ".join([*names[:NAMES_SHOWN], *(["..."] if len(names) > NAMES_SHOWN else [])])
    logs = [files.name(name) for name in names[:NAMES_TRIED] if is_log(files.name(name))]
    hint = f"; inspect {' or '.join(logs)}" if logs else ""
    return CheckpointError(
        f"{files.location} is neither a query's checkpoint, which has a file `metadata`, nor the root of a change log "
        f"with a job, and no query's checkpoint is below it ({LOOKED_FOR}): "
        f"{f'it has {shown}' if names else 'it is empty, or does not exist'}{hint}"
    )


def _print_log(options: argparse.Namespace) -> int:
    found = facts_of_log(options.location, options.job)
    print(json.dumps(found, indent=1) if options.json else "\n\n".join("\n".join(lines_of(each)) for each in found))
    return 0


def _lines(facts: dict[str, Any], has_partitions: bool) -> Iterator[str]:
    yield facts["location"]
    if "error" in facts:
        yield f"error      {facts['error']}"
        return
    written_by = f", written by Spark {facts['spark']}" if facts["spark"] else ""
    yield f"query      {facts['query']}{written_by}"
    kept = facts["batches"]
    yield f"batch      {facts['batch']} at {facts['time']}; batches {kept['first']} to {kept['last']} are kept"
    if facts["watermark"]:
        yield f"watermark  {facts['watermark']}"
    for source, end in facts["sources"].items():
        yield f"source     {source} up to {json.dumps(end, separators=(',', ':'))}"
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    yield f"store      {facts['provider']}{': ' if settings else ''}{settings}"
    refusals = [
        f"not read: {UnreadableState(operator['operator'], operator['name'], each['state'], each['reason'])}"
        for operator in facts["operators"]
        for each in operator["unread"]
    ]
    states = [(operator, state) for operator in facts["operators"] for state in operator["states"]]
    if not states and not refusals:
        yield "no state: the query has no stateful operator that sparkis can show"
        return
    for line in refusals:
        yield ""
        yield line
    if not states:
        return
    yield ""
    yield from _table([COLUMNS, *(_row(operator, state) for operator, state in states)])
    for operator, state in states:
        yield ""
        yield f"{state['name']} of operator {operator['operator']}"
        yield f"  key    {_columns(state['key'])}"
        yield f"  value  {_columns(state['value'])}{', with a time to live' if state['ttl'] else ''}"
        if has_partitions and "partitions" in state:
            parts = [("PARTITION", "ROWS", "BYTES")]
            parts += [(str(each["partition"]), str(each["rows"]), _size(each["bytes"])) for each in state["partitions"]]
            yield from (f"  {line}" for line in _table(parts))


def _row(operator: dict[str, Any], state: dict[str, Any]) -> tuple[str, ...]:
    name = f"{operator['operator']} {operator['name']}"
    if "partitions" not in state:
        return (name, state["name"], "-", "-", "-", "-", state["type"], state["served_as"])
    rows = [each["rows"] for each in state["partitions"]]
    # The largest partition in units of the mean: 1 is even.
    skew = f"{max(rows) * len(rows) / sum(rows):.2f}" if sum(rows) else "-"
    size = _size(sum(each["bytes"] for each in state["partitions"]))
    return (name, state["name"], str(sum(rows)), size, str(len(rows)), skew, state["type"], state["served_as"])


def _columns(schema: Sequence[dict[str, str]]) -> str:
    """Return the columns of a schema; adjacent ones `MS[0]`, `MS[1]` ... of one type as `MS[0] to MS[51]`."""
    found: list[str] = []
    for numbered, group in groupby(schema, key=_numbered):
        columns = list(group)
        if numbered is None or len(columns) == 1:
            found += (f"{column['name']} {column['type']}" for column in columns)
        else:
            found.append(f"{columns[0]['name']} to {columns[-1]['name']} {columns[0]['type']}")
    return ", ".join(found) or "none"


def _numbered(column: dict[str, str]) -> tuple[str, str] | None:
    """Return the name without its number and the type of a column such as `MS[0]`; None for others."""
    found = NUMBERED.fullmatch(column["name"])
    return None if found is None else (found[1], column["type"])


def _size(size: float) -> str:
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
