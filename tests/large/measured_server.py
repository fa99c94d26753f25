"""A server that measures its longest turn: SIGUSR1 writes it to the file of MEASURED_TO and resets it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

from resp_server.client.connection import Connection
from resp_server.programs import serve as process
from resp_server.serving.invalidation_sender import InvalidationSender
from resp_server.serving.server import Server

longest = {"held_ms": 0.0, "held_cpu_ms": 0.0}


def measure(owner: type, name: str) -> None:
    """Measure the turns that begin with a method."""
    turn: Callable[..., None] = getattr(owner, name)

    def measured(*arguments: Any) -> None:
        started, cpu_started = perf_counter(), thread_time()
        turn(*arguments)
        longest["held_ms"] = max(longest["held_ms"], (perf_counter() - started) * 1e3)
        longest["held_cpu_ms"] = max(longest["held_cpu_ms"], (thread_time() - cpu_started) * 1e3)

    setattr(owner, name, measured)


def tell(*ignored: object) -> None:
    path = Path(os.environ["MEASURED_TO"])
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(longest))
    longest.update(held_ms=0.0, held_cpu_ms=0.0)
    unfinished.rename(path)


if __name__ == "__main__":
    for owner, name in (
        (Connection, "_take_turn"),
        (Connection, "data_received"),
        (Server, "_notify"),
        (InvalidationSender, "_step"),
    ):
        measure(owner, name)
    signal.signal(signal.SIGUSR1, tell)
    sys.exit(process.main())
