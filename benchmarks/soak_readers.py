"""The readers of `make soak`, each a process of its own. They end with their standard input.

    python -m benchmarks.soak_readers client PORT PLAN     a Redis client that compares replies with the model
    python -m benchmarks.soak_readers store FOLDER PLAN    reads the complete store at one epoch after another
    python -m benchmarks.soak_readers victim PORT FOLDER   pins an old epoch, stops within a reply; is killed

PLAN is JSON. On standard output: `{"epoch", "compared", "skipped"}` about once a second, and `{"wrong"}` before it ends
with an error.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import redis

from benchmarks.soak_model import LISTS, MAPS, MARKER, SIZES, Model, Plan, StoredValue, key
from state_backend.lmdb.store import LmdbStore
from state_backend.model.clock import now_ms
from state_backend.model.errors import StoreError

KEYS_AT_ONCE = 20
# A client reconnects after this number of requests, so that it may reach another worker.
REQUESTS_PER_CONNECTION = 200
# A key that expires this close to a read may be in the reply or not.
EXPIRY_MARGIN_MS = 50
PAUSE_S = 0.01
STORE_PAUSE_S = 1.0
PINNED_S_MAX = 2.0
REPORT_EVERY_S = 1.0


class MismatchError(Exception):
    """A reply differs from the model."""


def is_running() -> bool:
    """Return whether the standard input is still open."""
    return not select.select([0], [], [], 0)[0] or bool(os.read(0, 4096))


class ComparisonCounts:
    """Counts comparisons, and prints the counts about once a second."""

    def __init__(self) -> None:
        self._compared = self._skipped = 0
        self._reported_s = 0.0

    def count(self, epoch: int, *, compared: int = 0, skipped: int = 0) -> None:
        """Add to the counts."""
        self._compared += compared
        self._skipped += skipped
        if time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(json.dumps({"epoch": epoch, "compared": self._compared, "skipped": self._skipped}), flush=True)
            self._compared = self._skipped = 0


def read_as_client(port: int, plan: Plan) -> None:
    """Read some keys between two reads of the marker; if both markers are equal, compare every reply."""
    model, command_stats, random, newest = Model(plan), ComparisonCounts(), Random(os.getpid()), -1
    while is_running():
        with redis.Redis(port=port) as client:
            for _ in range(REQUESTS_PER_CONNECTION):
                if not is_running():
                    return
                names = _names(random)
                from_ms = now_ms()
                first, *replies, last = _request(client, names, has_mget=random.random() < 0.5)
                to_ms = now_ms()
                if min(first, last) < newest or last < first:
                    raise MismatchError(
                        f"a client that had seen epoch {newest} then read epoch {first}, and epoch {last}"
                    )
                newest = last
                if first != last:
                    command_stats.count(newest, skipped=len(names))
                    continue
                model.advance(newest)
                compared = 0
                for name, reply in zip(names, replies, strict=True):
                    compared += _compare(name, reply, model.values.get(name), newest, from_ms, to_ms)
                command_stats.count(newest, compared=compared, skipped=len(names) - compared)
                time.sleep(PAUSE_S)


def _names(random: Random) -> list[bytes]:
    """Choose keys: half of the time of all kinds, otherwise only values, which the compiled core reads."""
    states = random.choices(list(SIZES), k=KEYS_AT_ONCE) if random.random() < 0.5 else ["value"] * KEYS_AT_ONCE
    return [key(state, random.randrange(SIZES[state])) for state in states]


def _request(client: redis.Redis, names: list[bytes], *, has_mget: bool) -> list[Any]:
    """Return the replies, with the marker as the first and the last one."""
    pipeline = client.pipeline(transaction=False)
    if has_mget and all(name.startswith(key("value", 0)[:-1]) for name in names):
        pipeline.mget([MARKER, *names, MARKER])
        first, *replies, last = pipeline.execute()[0]
    else:
        pipeline.get(MARKER)
        for name in names:
            state = name.split(b":")[1].decode()
            if state in MAPS:
                pipeline.hgetall(name)
            elif state in LISTS:
                pipeline.lrange(name, 0, -1)
            else:
                pipeline.get(name)
        pipeline.get(MARKER)
        first, *replies, last = pipeline.execute()
    if first is None or last is None:
        raise MismatchError("the marker's key does not exist, which every epoch writes")
    # Redis has no empty maps and lists.
    return [int(first), *(reply or None for reply in replies), int(last)]


def _compare(name: bytes, reply: object, stored: StoredValue | None, epoch: int, from_ms: int, to_ms: int) -> bool:
    """Compare a reply; False if an expiry at this time makes it uncertain."""
    margin = EXPIRY_MARGIN_MS
    if stored is not None and not stored.is_certain(from_ms - margin, to_ms + margin):
        return False
    expected = None if stored is None else stored.expected(from_ms) or None
    if reply != expected:
        raise MismatchError(f"{name!r} at epoch {epoch} is {_short(reply)} instead of {_short(expected)}")
    return True


def _short(found: object) -> str:
    text = repr(found)
    return text if len(text) < 300 else f"{text[:200]} ... {text[-80:]} ({len(text)} characters)"


def read_store(folder: Path, plan: Plan) -> None:
    """Compare the complete store at one epoch after another; stay at each epoch for a while, as a slow reader does."""
    model, command_stats, random, newest = Model(plan), ComparisonCounts(), Random(os.getpid()), -1
    for store in _stores(folder):
        with store.snapshot(now_ms()) as snapshot:
            while is_running() and store.path.exists():
                from_ms = now_ms()
                snapshot.renew(from_ms)
                epoch = snapshot.applied.epoch
                if epoch < newest:
                    raise MismatchError(f"a reader of the store that had seen epoch {newest} then saw epoch {epoch}")
                newest = epoch
                model.advance(newest)
                time.sleep(random.uniform(0, STORE_PAUSE_S))
                found = Model()
                found.apply(snapshot.changes())
                to_ms = now_ms()
                compared = 0
                for name in found.values.keys() | model.values.keys():
                    stored = found.values.get(name)
                    reply = None if stored is None else stored.expected(from_ms)
                    compared += _compare(name, reply or None, model.values.get(name), newest, from_ms, to_ms)
                command_stats.count(newest, compared=compared)
        store.close()


def _stores(folder: Path) -> Iterator[LmdbStore]:
    """Open the newest store of a folder; open again once another store replaces it."""
    while is_running():
        path = newest_store(folder)
        try:
            store = None if path is None else LmdbStore(path, path.name.rpartition(".")[0], is_reader=True)
        except StoreError:  # it was removed, or does not exist yet
            store = None
        if store is None:
            time.sleep(PAUSE_S)
            continue
        yield store


def newest_store(folder: Path) -> Path | None:
    """Return the folder of a job's newest store, if there is one."""
    found = [path.parent for path in folder.glob("*.[0-9]*/boot")]
    return max(found, key=lambda path: int(path.name.rpartition(".")[2]), default=None)


def run_victim(port: int, folder: Path) -> None:
    """Pin an old epoch and stop reading a reply, until this process is killed."""
    random = Random(os.getpid())
    request = b"*4\r\n$6\r\nLRANGE\r\n$%d\r\n%b\r\n$1\r\n0\r\n$2\r\n-1\r\n"
    names = [key("feed", number) for number in range(SIZES["feed"])]
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"".join(request % (len(name), name) for name in names))
        client.recv(100)
        for store in _stores(folder):
            with store.snapshot(now_ms()) as snapshot:
                while is_running() and store.path.exists():
                    time.sleep(random.uniform(0, PINNED_S_MAX))
                    snapshot.renew(now_ms())
            store.close()


def main(role: str, *given: str) -> int:
    """Run one reader."""
    roles: dict[str, Callable[[], None]] = {
        "client": lambda: read_as_client(int(given[0]), Plan(**json.loads(given[1]))),
        "store": lambda: read_store(Path(given[0]), Plan(**json.loads(given[1]))),
        "victim": lambda: run_victim(int(given[0]), Path(given[1])),
    }
    try:
        roles[role]()
    except Exception as error:
        print(json.dumps({"wrong": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
