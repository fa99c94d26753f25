"""Slots that move to a new owner: the time to take over a million keys, and for a replica to load ten million.

A registry and two state servers, started by hand, read one log, which gets an epoch a second as in the benchmarks of
reads. The time is measured from the start of the new server's process to the topology in which it owns its slots.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.options import Options
from benchmarks.processes import below, cpu_s
from benchmarks.results import Row, single_row
from benchmarks.servers import BenchmarkError, key, load_log, publish, runs_of_values, temporary_folder, value
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client, ClientError
from state_backend.apply.compact import compact_log
from state_backend.log.log_writer import LogWriter

MOVED_KEYS = 1_000_000
LOADED_KEYS = 1_000_000
LOADED_KEYS_FULL = 10_000_000
ROUNDS_MAX = 3
CHANGED_SHARE = 0.01
PERIOD_S = 1.0
TIMEOUT_S = 600.0
SAMPLE = 200
# Of the registry and its servers.
TOKEN = "moves"


def run(options: Options) -> Iterator[Row]:
    """Yield a row for a new master, and one for a new replica."""
    moved = max(2_000, int(MOVED_KEYS * options.scale))
    yield _row("move half of the slots to a new server", 2 * moved, moved, replicas=0, options=options)
    loaded = max(2_000, int((LOADED_KEYS_FULL if options.is_full else LOADED_KEYS) * options.scale))
    yield _row(f"a new replica loads {loaded:,} keys", loaded, loaded, replicas=1, options=options)


def _row(name: str, keys: int, moved: int, *, replicas: int, options: Options) -> Row:
    times = []
    with temporary_folder() as folder:
        options.report(f"moves: writing {keys:,} keys")
        log = folder / "log"
        writer = load_log(log, keys, has_maps_and_lists=False)
        try:
            compact_log(str(log), writer.job, retention_ms=0)
            rounds = min(options.rounds, ROUNDS_MAX)
            for number in range(rounds):
                options.report(f"moves: {name}, round {number + 1} of {rounds}")
                times.append(_timed(log, folder / f"round{number}", writer, keys, replicas))
        finally:
            writer.close()
    seconds, used_s = [each for each, _ in times], median(each for _, each in times)
    note = f"{moved:,} keys in {used_s:.1f} s of the new server's processor time, of {keys:,}"
    return single_row(name, "moves", seconds, unit="s", note=note)


def _timed(log: Path, folder: Path, writer: LogWriter, keys: int, replicas: int) -> tuple[float, float]:
    """Start a second server; return the seconds until it serves its slots, and its processor time."""
    with ExitStack() as stack:
        stack.enter_context(program("registry", log, "--port", "0", "--replicas", str(replicas)))
        stack.enter_context(_state_server(log, folder / "first"))
        eventually(
            lambda: online(log) == 1, awaited="the first server has loaded", timeout_s=TIMEOUT_S, error=BenchmarkError
        )
        stack.enter_context(_changing(writer, keys))
        began_s = time.perf_counter()
        process, port = stack.enter_context(_state_server(log, folder / "second"))
        eventually(
            lambda: online(log) == 2 and _has_slots(log, port, replicas),
            awaited="moving",
            timeout_s=TIMEOUT_S,
            interval_s=0.01,
            error=BenchmarkError,
        )
        seconds = time.perf_counter() - began_s
        used_s = sum(cpu_s(pid) for pid in (process.pid, *below(process.pid)))
        _check(port, keys, is_replica=replicas > 0)
        return seconds, used_s


def command_of(*words: str | Path) -> list[str]:
    """Return the command of a program that ends with this process; words: its name, the log, options."""
    command = [sys.executable, "-m", "sparkis", words[0], "--child", "--log", *words[1:], "--loglevel", "error"]
    return [str(word) for word in command]


@contextmanager
def program(*words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a registry or a state server of a log."""
    environment = children.environment() | {TOKEN_VARIABLE: TOKEN}
    process = subprocess.Popen(command_of(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _state_server(log: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with program("state-server", log, "--port", "0", "--store", folder) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchmarkError("a state server did not start; the line above has the reason")
        yield process, json.loads(line)["port"]


@contextmanager
def _changing(writer: LogWriter, keys: int) -> Iterator[None]:
    """Publish an epoch a second, which writes the current values of some keys again."""
    ends = threading.Event()
    numbers = np.arange(max(1, int(keys * CHANGED_SHARE)))

    def change() -> None:
        while not ends.wait(PERIOD_S):
            publish(writer, runs_of_values(numbers, 0))

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _nodes(log: Path) -> Sequence[dict[str, str | int]]:
    try:
        nodes: list[dict[str, str | int]] = json.loads((log / "registry.json").read_text())["topology"]["nodes"]
    except (OSError, KeyError, TypeError):
        return []
    return nodes


def online(log: Path) -> int:
    """Return the number of a registry's servers that have loaded their slots."""
    return sum(node.get("health", "online") == "online" for node in _nodes(log))


def _has_slots(log: Path, port: int, replicas: int) -> bool:
    return any(node["port"] == port and (replicas > 0 or node.get("slots")) for node in _nodes(log))


def _has_key(client: Client, name: str) -> bool:
    """Return whether the server replies a value, and not MOVED."""
    try:
        return client.call("GET", name) is not None
    except ClientError as error:
        if "MOVED" in str(error):
            return False
        raise


def _check(port: int, keys: int, *, is_replica: bool) -> None:
    """Read some keys from the new server; it replies MOVED for slots that it does not own."""
    with Client("127.0.0.1", port) as client:
        if is_replica:
            client.call("READONLY")
            # The server learns of its master a moment after the registry has published it.
            eventually(lambda: _has_key(client, key(0)), awaited="the replica's first reply", error=BenchmarkError)
        for number in range(0, keys, max(1, keys // SAMPLE)):
            try:
                found = client.call("GET", key(number))
            except ClientError as error:
                if "MOVED" in str(error) and not is_replica:
                    continue
                raise
            if found != value(number, 0):
                raise BenchmarkError(f"{key(number)} is {found!r} at the new server instead of {value(number, 0)!r}")
