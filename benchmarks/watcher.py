"""Polls a store and a server, in a process of its own, and prints when epochs arrive.

    python -m benchmarks.watcher PORT FOLDER KEY ROWS

FOLDER contains a server's stores of one job. The value of KEY divided by ROWS is the number of the batch that wrote it.
Prints `["applied" or "read", batch, milliseconds since 1970]` for each batch that it sees; ends with its standard
input.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path

from benchmarks.servers import BenchmarkError
from compat.waiting import eventually
from resp_server.net.client import Client
from state_backend.lmdb.store import LmdbStore
from state_backend.model.clock import now_ms

# The pause between two polls: much shorter than the measured delays, but long enough to leave them the processor.
PAUSE_S = 0.0005
TIMEOUT_S = 120.0


def main(port: int, folder: Path, key: str, rows: int) -> None:
    """Poll until the input ends."""
    eventually(
        lambda: any(folder.glob("*.[0-9]*/boot")),
        awaited="the opening of the store",
        timeout_s=TIMEOUT_S,
        error=BenchmarkError,
    )
    path = next(folder.glob("*.[0-9]*/boot")).parent
    store = LmdbStore(path, path.name.rpartition(".")[0], is_reader=True)
    snapshot = store.snapshot(now_ms())
    applied, read, version = -1, -1, snapshot.version
    with Client("127.0.0.1", port, timeout_s=30) as client:
        while not select.select([0], [], [], 0)[0] or os.read(0, 4096):
            snapshot.renew(0)
            if snapshot.version != version:
                version = snapshot.version
                applied = _seen("applied", applied, snapshot.applied.epoch)
            found = client.call("GET", key)
            read = _seen("read", read, -1 if found is None else int(found) // rows)
            time.sleep(PAUSE_S)
    snapshot.close()


def _seen(step: str, before: int, now: int) -> int:
    if now != before:
        print(json.dumps([step, now, time.time_ns() / 1e6]), flush=True)
    return now


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
