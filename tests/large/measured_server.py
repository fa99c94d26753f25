"""A server that knows its longest turn: SIGUSR1 has it written to the file that MEASURED_TO names, and forgotten."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from time import perf_counter, thread_time

from resp_server import process
from resp_server.connection import Connection

longest = {"held_ms": 0.0, "held_cpu_ms": 0.0}
turn = Connection._turn


def measured(self: Connection) -> None:
    started, cpu_started = perf_counter(), thread_time()
    turn(self)
    longest["held_ms"] = max(longest["held_ms"], (perf_counter() - started) * 1e3)
    longest["held_cpu_ms"] = max(longest["held_cpu_ms"], (thread_time() - cpu_started) * 1e3)


def tell(*ignored: object) -> None:
    path = Path(os.environ["MEASURED_TO"])
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(longest))
    longest.update(held_ms=0.0, held_cpu_ms=0.0)
    unfinished.rename(path)


if __name__ == "__main__":
    Connection._turn = measured  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, tell)
    sys.exit(process.main())
