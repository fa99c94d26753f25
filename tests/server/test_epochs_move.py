"""Many clients send pipelines of reads while epochs are published: no connection sees an epoch go back."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job
from tests.builders import apply_epoch

STATES = [StateDescriptor("temp", key="k", value="v")]
KEYS = [b"job:temp:%d" % number for number in range(60)]
EPOCHS = 150
READERS = 6
GETS = b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in KEYS)
MGET = b"*%d\r\n$4\r\nMGET\r\n" % (1 + len(KEYS)) + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in KEYS)

Reply = bytes | None


def value_at(number: int, epoch: int) -> Reply:
    """Return what stands at a key in an epoch: the epoch that changed it last, or nothing if that deleted it.

    The first key is changed by every epoch, each other one by every fifth, and by one in seven of these deleted.
    """
    last = epoch if number == 0 else next(each for each in range(epoch, -6, -1) if (each + number) % 5 == 0)
    last = max(last, 0)
    return None if number and last % 7 == 6 else b"%b %d" % (KEYS[number], last)


def publish(store: LmdbStore, epoch: int) -> None:
    before = [value_at(number, epoch - 1) if epoch else None for number in range(len(KEYS))]
    after = [value_at(number, epoch) for number in range(len(KEYS))]
    changes = [
        Change("temp", Op.DELETE, key) if new is None else Change("temp", Op.PUT, key, None, new)
        for key, old, new in zip(KEYS, before, after, strict=True)
        if old != new
    ]
    apply_epoch(store, STATES, changes, epoch, clock_ms=epoch + 1)


class Reader:
    """A client that knows from which epoch on it may be answered."""

    def __init__(self, server: Any) -> None:
        peer: socket.socket = server.connect().socket
        self._send, self._file = peer.sendall, peer.makefile("rb")
        self.epoch = 0

    def read_until_the_last(self) -> int:
        """Read all keys again and again; return how many times."""
        rounds = 0
        while self.epoch < EPOCHS - 1:
            rounds += 1
            self._send(GETS + MGET)
            self._take([self._bulk() for _ in KEYS])
            assert self._file.readline() == b"*%d\r\n" % len(KEYS)
            self._take([self._bulk() for _ in KEYS], is_one_epoch=True)
        return rounds

    def _bulk(self) -> Reply:
        size = int(self._file.readline()[1:])
        return self._file.read(size + 2)[:-2] if size >= 0 else None

    def _take(self, replies: Sequence[Reply], is_one_epoch: bool = False) -> None:
        """Find the earliest epochs, none before the last one seen, at which these answers are right."""
        for number, reply in enumerate(replies):
            epochs = range(self.epoch, EPOCHS)
            at = next((epoch for epoch in epochs if value_at(number, epoch) == reply), None)
            assert at is not None, f"{KEYS[number]!r} was {reply!r} after epoch {self.epoch}"
            self.epoch = at
        if is_one_epoch:
            assert list(replies) == [value_at(number, self.epoch) for number in range(len(KEYS))]


def test_no_reader_sees_older_value_after_newer_one(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve()
    store = LmdbStore(tmp_path, "g2")
    publish(store, 0)
    server.call(lambda: server.server.context.keyspace.put(Job("job", "g2", STATES, store)))
    with ThreadPoolExecutor(READERS) as threads:
        readers = [threads.submit(Reader(server).read_until_the_last) for _ in range(READERS)]
        for epoch in range(1, EPOCHS):
            publish(store, epoch)
        assert all(reader.result() > 0 for reader in readers)
    server.call(server.server.context.close)
    store.close()
