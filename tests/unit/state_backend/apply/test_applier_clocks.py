"""Appliers with different clocks: servers of one log have the same state, whenever each of them expires keys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.store import Snapshot
from tests.builders import current_of

TTL = timedelta(seconds=1)
TOTAL = StateDescriptor("total", value="v", reduce="sum", columns={"v": "bigint"}, key_format="total:<k>", ttl=TTL)
RECENT = StateDescriptor("recent", member="m", key_format="recent:<k>", ttl=TTL)
LAST = StateDescriptor("last", value="v", kind="list", key_format="last:<k>", ttl=TTL)
COUNTS = StateDescriptor("counts", field="f", reduce="count", key_format="counts:<k>", ttl=TTL)
STATES = (TOTAL, RECENT, LAST, COUNTS)


class Server:
    """An applier with a clock of its own."""

    def __init__(self, folder: Path, name: str, now_ms: int) -> None:
        self.now_ms = now_ms
        self.applier = Applier(
            ChangeLog(folder / "log"), "job", folder / name, lambda event: None, clock=lambda: self.now_ms
        )
        self.step()

    def step(self) -> None:
        while self.applier.step():
            pass

    @property
    def store(self) -> LmdbStore:
        assert self.applier.store is not None
        return self.applier.store


Write = Callable[[int, int], list[Change]]


def total(number: int, clock_ms: int) -> list[Change]:
    return [Change("total", Op.FOLD, b"total:a", None, (b"100", b"1")[number], clock_ms + 1000)]


def members(number: int, clock_ms: int) -> list[Change]:
    names = ([b"m%d" % each for each in range(5)], [b"new"])[number]
    return [Change("recent", Op.PUT, b"recent:a", name, b"", clock_ms + 1000) for name in names]


def elements(number: int, clock_ms: int) -> list[Change]:
    return [Change("last", Op.APPEND, b"last:a", None, b"%d" % number, clock_ms + 1000)]


def counted(number: int, clock_ms: int) -> list[Change]:
    return [Change("counts", Op.FOLD, b"counts:a", b"f", b"10", clock_ms + 1000)]


READS: dict[Write, Callable[[Snapshot], object]] = {
    total: lambda view: view.value(b"total:a"),
    members: lambda view: set(view.members(b"recent:a")),
    elements: lambda view: list(view.list_elements(b"last:a", 0, view.list_size(b"last:a"))),
    counted: lambda view: view.fields(b"counts:a", [b"f"]),
}
EXPECTED: dict[Write, object] = {
    total: b"101",
    members: {b"m0", b"m1", b"m2", b"m3", b"m4", b"new"},
    elements: [b"0", b"1"],
    counted: [b"20"],
}


@pytest.mark.parametrize("write", [total, members, elements, counted])
@pytest.mark.parametrize("way", ["live", "snapshot", "reader ahead"])
def test_key_expiring_during_batch_is_present_on_all_servers(tmp_path: Path, write: Write, way: str) -> None:
    """The batch's clock was read at 900, before the key's time at 1000; the servers look at 1500 and later."""
    writer = LogWriter(tmp_path / "log", "job", STATES, "q")
    writer.publish(write(0, 0), clock_ms=0)
    live = Server(tmp_path, "live", 0)
    live.now_ms = 1_500 if way == "live" else 10_000_000
    live.step()
    if way == "snapshot":
        compact_log(str(tmp_path / "log"), "job", retention_ms=0)
    writer.publish(write(1, 900), clock_ms=900)
    live.step()
    late = Server(tmp_path, "late", 1_600)
    for server in (live, late):
        with server.store.snapshot(1_600) as view:
            assert READS[write](view) == EXPECTED[write]
        server.applier.close()


def test_clock_of_epochs_never_goes_back(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", "job", STATES, "q")
    writer.publish([], clock_ms=5_000)
    writer.publish([], clock_ms=4_000)
    LogWriter(tmp_path / "log", "job", STATES, "q").publish([], clock_ms=3_000)
    log, current = current_of(tmp_path / "log")
    epochs = [log.epoch(current, number) for number in range(3)]
    assert [each.clock_ms for each in epochs if each is not None] == [5_000, 5_000, 5_000]
