"""A writer of the chaos' job without Spark, on a host: it commits epochs when it is told to.

    python -m tests.hosts.writer LOG

Commands on its standard input are `one`, an epoch now, `go`, an epoch every quarter of a second, and `pause`. It prints
`{"epoch": N}` when it has committed one by `one`, and `{"writes": true}` or `false` for the others. A commit that fails
ends it with its error.
"""

from __future__ import annotations

import json
import select
import sys

from benchmarks.chaos.judge import FIELDS, GROUPS, JOB, PAIR, STATE, key, text
from resp_server.registry.announcer import Announcer
from state_backend.codec import packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

PERIOD_S = 0.25
STATES = [StateDescriptor(STATE, key="key", value="value"), StateDescriptor(PAIR, key="key", value=FIELDS)]


def changes(epoch: int) -> list[Change]:
    """Return an epoch's changes: its number to all keys."""
    made = []
    for group in range(GROUPS):
        for member in "ab":
            name, pair = key(group, member), key(group, member, PAIR)
            value = text(epoch, name)
            made.append(Change(STATE, Op.PUT, name, value=value))
            made.append(Change(PAIR, Op.PUT, pair, value=packed_map.pack((each.encode(), value) for each in FIELDS)))
    return made


def main(log: str) -> None:
    """Write until the standard input ends."""
    announcer = Announcer(log, [])
    with LogWriter(log, JOB, STATES, takeover=True, announce=announcer.announce) as writer:
        newest = writer.log.newest(writer.current)
        epoch = -1 if newest is None else newest.epoch
        print(json.dumps({"epoch": epoch}), flush=True)
        is_writing = False
        while True:
            if select.select([0], [], [], PERIOD_S if is_writing else None)[0]:
                command = sys.stdin.readline().strip()
                if not command:
                    return
                is_writing = command == "go"
                if command != "one":
                    print(json.dumps({"writes": is_writing}), flush=True)
                    continue
            epoch += 1
            committed = writer.publish(changes(epoch))
            assert committed == epoch
            if not is_writing:
                print(json.dumps({"epoch": epoch}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
