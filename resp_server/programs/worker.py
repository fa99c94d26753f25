"""A worker process, which the master of `--workers` starts (see `workers.master`).

python -m resp_server.programs.worker DESCRIPTOR      the descriptor of the channel to the master
"""

from __future__ import annotations

import signal
import socket
import sys

from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.net import event_loop
from resp_server.workers.worker import Worker


async def _run(descriptor: int) -> None:
    await Worker(socket.socket(fileno=descriptor), pipeline_of_stores).run()


def main() -> None:
    """Run a worker until its channel closes."""
    # Signals to all processes of a group are for the master, which drains the workers.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    event_loop.run(_run(int(sys.argv[1])), is_worker=True)


if __name__ == "__main__":
    main()
