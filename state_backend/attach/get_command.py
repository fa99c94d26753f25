"""`sparkis get CHECKPOINT KEY`: the value of one key, from a query's checkpoint, without Spark."""

from __future__ import annotations

import argparse
import sys

from state_backend.attach.key_lookup import indented, look_up
from state_backend.attach.states import pairs
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.inspection import key_forms
from state_backend.codec.json_text import JsonForm
from state_backend.model.errors import SparkisError
from state_backend.progress_bar import ProgressBar

DESCRIPTION = (
    "Look a key up in a query's checkpoint, and print its value as JSON, by state, with the columns and texts of "
    "`sparkis attach`. It reads the whole state."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the checkpoint: a path, s3://, gs://, abfss:// ...")
    parser.add_argument(
        "key",
        metavar="KEY",
        help="the key's columns, joined by `:`; a window is its start; `all` if there are no columns",
    )
    parser.add_argument("--state", metavar="NAME", help="only this state, by its name in `sparkis inspect`")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=SQL",
        help="a column of the value, by an SQL expression or a function of the query, as of `sparkis attach`",
    )
    parser.add_argument(
        "--json-decimals",
        choices=("number", "text"),
        default="number",
        help="decimals: numbers, or texts, which no reader rounds (default %(default)s)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="a committed micro-batch (default: the last one)")


def run(options: argparse.Namespace) -> int:
    """Print the value; return the exit code: 1 if there is no such key."""
    try:
        with ProgressBar("partitions") as progress:
            checkpoint = Checkpoint.at(options.checkpoint)
            batch, found = look_up(
                checkpoint,
                options.key,
                options.state,
                options.batch,
                progress.show,
                expressions=pairs("--column", options.column),
                form=JsonForm(has_text_decimals=options.json_decimals == "text"),
            )
            forms, unread = ({}, "") if found else key_forms(checkpoint, batch)
    except SparkisError as error:
        print(f"sparkis get: {error}", file=sys.stderr)
        return 1
    if not found:
        forms_of = [f"{form} (state {name})" for name, form in forms.items() if options.state in (None, name)]
        hint = f"; keys have the form {', '.join(forms_of)}" if forms_of else ""
        print(f"sparkis get: no state has the key {options.key!r} after batch {batch}{hint}{unread}", file=sys.stderr)
        return 1
    print(indented(found))
    return 0
