"""`sparkis diff JOB FROM TO --log LOG`: the keys that differ between two epochs of a job.

Both states are built in temporary stores on this machine's disk, and read side by side in store order. So memory holds
only the two values of one key at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from state_backend.apply.temporary_store import past_snapshot
from state_backend.history.whole_values import key_in_json, shown_key, whole_value
from state_backend.log.change_log import ChangeLog
from state_backend.log.time_travel import AS_OF_HELP, AsOf, moment_of
from state_backend.model.errors import LogError, SparkisError
from state_backend.model.slots import hash_position
from state_backend.store.store import KeyInfo, Snapshot

DESCRIPTION = (
    "Show which keys were added, removed or changed between two past moments of a job. Needs no server and no Spark."
)
SCANNED_KEYS = 1_000


class Difference(NamedTuple):
    """A key that differs.

    Args:
        change: `added`, `removed` or `changed`.
    """

    change: str
    state: str
    key: bytes


def differences(before: Snapshot, after: Snapshot, state: str | None = None) -> Iterator[Difference]:
    """Iterate over the keys that were added, removed or changed, in store order.

    A key is changed if its value differs, or if another state has it.

    Args:
        state: Only keys of this state.
    """
    before_keys, after_keys = _keys(before, state), _keys(after, state)
    old, new = next(before_keys, None), next(after_keys, None)
    while old is not None or new is not None:
        if new is None or (old is not None and _store_order(old) < _store_order(new)):
            assert old is not None
            yield Difference("removed", old.state, old.key)
            old = next(before_keys, None)
        elif old is None or _store_order(new) < _store_order(old):
            yield Difference("added", new.state, new.key)
            new = next(after_keys, None)
        else:
            if old.state != new.state or whole_value(before, old) != whole_value(after, new):
                yield Difference("changed", new.state, new.key)
            old, new = next(before_keys, None), next(after_keys, None)


def _store_order(info: KeyInfo) -> tuple[int, bytes]:
    return hash_position(info.key), info.key


def _keys(snapshot: Snapshot, state: str | None) -> Iterator[KeyInfo]:
    """Iterate over the keys in the order of `_store_order`: a call of scan never ends within a position."""
    cursor = -1
    while cursor:
        cursor, keys = snapshot.scan(max(cursor, 0), SCANNED_KEYS)
        for info in map(snapshot.key_info, sorted(keys, key=lambda key: (hash_position(key), key))):
            if info is not None and state in (None, info.state):
                yield info


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument("begin", type=_as_of, metavar="FROM", help=AS_OF_HELP)
    parser.add_argument("end", type=_as_of, metavar="TO", help="as FROM")
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument("--state", metavar="NAME", help="only this state")
    parser.add_argument("--limit", type=_limit, metavar="N", help="at most so many keys (default: all)")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")


def _as_of(text: str) -> AsOf:
    try:
        return AsOf.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of keys")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Print the differences; return the exit code."""
    try:
        log = ChangeLog(options.log)
        if options.job not in log.jobs():
            raise log.no_such_job(options.job)
        job = log.job(options.job)
        begin, end = moment_of(job, options.begin), moment_of(job, options.end)
        names = [state.name for state in job.description(end.generation).all_states]
        if options.state not in (None, *names):
            raise LogError(f"job {options.job!r} has no state {options.state!r}; states: {', '.join(names)}")
        with past_snapshot(log, options.job, begin) as before, past_snapshot(log, options.job, end) as after:
            for each in islice(differences(before, after, options.state), options.limit):
                if options.json:
                    print(json.dumps({"change": each.change, "state": each.state, **key_in_json(each.key)}))
                else:
                    print(f"{each.change:<8}{each.state:<20}  {shown_key(each.key)}")
    except SparkisError as error:
        print(f"sparkis diff: {error}", file=sys.stderr)
        return 1
    return 0
