"""The time to commit an epoch, and from the commit until readers see it, in an S3 bucket and in a local folder.

The S3 server is that of the tests, on this machine. So the cost of sparkis and obstore is measured, and the number of
sequential requests; each request to a real store takes 10 to 50 ms. Two more rows for each of several delays of every
request show that number: for one announced epoch, and for each epoch of a server that catches up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.options import Options
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import BenchmarkError, load_log, publish, runs_of_values, temporary_folder
from compat.object_store import faulty_proxy, s3_server
from resp_server.net import children

EPOCHS = 40
CASES = (("small epoch", 100), ("epoch with a file", 5_000))
PEER = "a local folder"
# The delay of each request of a server; the last two are those of a store in another region.
DELAYS_MS = (20, 50, 200)
DELAYED_EPOCHS, WAITING_EPOCHS, DELAYED_KEYS = 10, 40, 5_000


def run(options: Options) -> Iterator[Row]:
    """Yield two rows for each size of epoch."""
    epochs = max(3, int(EPOCHS * options.scale))
    with temporary_folder() as folder, s3_server.running("bench") as port:
        os.environ.update(s3_server.environment(port))
        for name, keys in CASES:
            rounds = []
            for number in range(options.rounds):
                options.report(f"object_store: {name}, round {number + 1} of {options.rounds}")
                round_folder = folder / f"{keys}-{number}"
                rounds.append(
                    (
                        _timed(f"s3://bench/{keys}-{number}", round_folder / "s3", keys, epochs),
                        _timed(str(round_folder / "log"), round_folder / "local", keys, epochs),
                    )
                )
            for index, step in enumerate(("commit", "commit until readable")):
                pairs = [(ours[index], peer[index]) for ours, peer in rounds]
                note = f"{keys:,} changes; {epochs} epochs a round, their median"
                title = f"{name}, {step}"
                yield compared_row(title, "object_store", pairs, unit="ms", better="less", peer_name=PEER, note=note)
        yield from _delayed_rows(port, folder, options)


def _delayed_rows(s3_port: int, folder: Path, options: Options) -> Iterator[Row]:
    """Yield the rows with a delay of the server's requests; the writer's have none."""
    with faulty_proxy.running(s3_port) as proxy:
        for delay_ms in DELAYS_MS:
            options.report(f"object_store: requests that take {delay_ms} ms")
            proxy.delay_s = delay_ms / 1000
            log = f"s3://bench/delayed-{delay_ms}"
            writer = load_log(log, DELAYED_KEYS, has_maps_and_lists=False)
            numbers = np.arange(DELAYED_KEYS)
            environment = s3_server.environment(proxy.port)
            with _applier(log, writer.job, folder / f"delayed-{delay_ms}", environment) as applier:
                applier.reach(writer.last.epoch if writer.last else 0)
                one_each = []
                for turn in range(max(2, int(DELAYED_EPOCHS * options.scale))):
                    epoch = publish(writer, runs_of_values(numbers, turn))
                    committed_s = time.perf_counter()
                    applier.reach(epoch)
                    one_each.append((time.perf_counter() - committed_s) * 1000)
                waiting = max(2, int(WAITING_EPOCHS * options.scale))
                for turn in range(waiting):
                    epoch = publish(writer, runs_of_values(numbers, turn))
                began_s = time.perf_counter()
                applier.reach(epoch)
                each_ms = (time.perf_counter() - began_s) * 1000 / waiting
            writer.close()
            title, note = f"requests of {delay_ms} ms", f"{DELAYED_KEYS:,} changes, in a file"
            yield single_row(f"{title}, commit until readable", "object_store", one_each, unit="ms", note=note)
            note = f"{waiting} epochs wait; the time for each"
            yield single_row(f"{title}, catching up", "object_store", [each_ms], unit="ms", note=note)


def _timed(log: str, store: Path, keys: int, epochs: int) -> tuple[float, float]:
    """Return the median times, in ms, of a commit, and from the commit until readers see the epoch."""
    commits, seen = [], []
    writer = load_log(log, keys, has_maps_and_lists=False)
    numbers = np.arange(keys)
    with _applier(log, writer.job, store) as applier:
        applier.reach(writer.last.epoch if writer.last else 0)
        for turn in range(1, epochs + 1):
            began_s = time.perf_counter()
            epoch = publish(writer, runs_of_values(numbers, turn))
            committed_s = time.perf_counter()
            applier.reach(epoch)
            commits.append((committed_s - began_s) * 1000)
            seen.append((time.perf_counter() - committed_s) * 1000)
    writer.close()
    return median(commits), median(seen)


class _Applier:
    """A server's applier process, which gets an announcement of each epoch, as from a driver."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def reach(self, epoch: int) -> None:
        """Announce an epoch, and wait until readers see it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"epoch 0 {epoch}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            event = json.loads(line)
            if event.get("error"):
                raise BenchmarkError(event["error"])
            if event["applied"] >= epoch:
                return
        raise BenchmarkError("the applier ended")


@contextmanager
def _applier(log: str, job: str, store: Path, environment: Mapping[str, str] | None = None) -> Iterator[_Applier]:
    command = [sys.executable, "-m", "state_backend.apply.applier", "--log", log, "--job", job, "--store", str(store)]
    of_child = children.environment() | dict(environment or {})
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=of_child)
    try:
        yield _Applier(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
