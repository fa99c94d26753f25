"""Snapshots, and the files of a log that they make superfluous."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from state_backend.apply import file_split, log_status, snapshots
from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog
from state_backend.log.checked_json import with_checksum
from state_backend.log.epochs import Epoch
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.filesystems.arrow import ArrowFilesystem
from state_backend.log.garbage_collector import sweep
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import LogError, RewoundCheckpointError
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.store import as_bytes
from tests.builders import current_of, write_log

STATES = [StateDescriptor("v", key="k", value="v"), StateDescriptor("m", key="k", value="v", field="f")]
FAR_MS = 4_102_444_800_000


def put_number(number: int, value: str) -> Change:
    return Change("v", Op.PUT, b"job:v:%d" % number, None, value.encode())


def publish(log: Path, epochs: range, *, keys: int = 50) -> None:
    with LogWriter(log, "job", STATES, "q") as writer:
        for epoch in epochs:
            field = Change("m", Op.PUT, b"job:m:1", b"f%d" % epoch, b"x", FAR_MS if epoch % 2 else None)
            writer.publish([put_number(epoch % keys, f"e{epoch}"), field], clock_ms=1_000 + epoch)


def values_in_log(log: Path, **options: Any) -> dict[bytes, Any]:
    """Return the whole state by key, expiries included."""
    with read_snapshot(log, "job", **options) as snapshot:
        return {(each.key, each.field): each for each in snapshot.changes()}  # type: ignore[misc]


def follower(log: Path, folder: Path) -> tuple[Applier, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return Applier(ChangeLog(log), "job", folder, events.append), events


def test_snapshot_equals_collected_state(tmp_path: Path) -> None:
    log = tmp_path / "log"
    publish(log, range(200))
    before = values_in_log(log)
    compact_log(str(log), "job", retention_ms=0)
    assert len(ChangeLog(log).job("job").numbers("q.1")) == 1
    assert values_in_log(log) == before
    publish(log, range(200, 230))
    with read_snapshot(log, "job") as snapshot:
        assert snapshot.value(b"job:v:29") == b"e229"
        assert snapshot.map_size(b"job:m:1") == 230


def test_newest_snapshot_before_retention_stays_with_later_epochs(tmp_path: Path) -> None:
    """Epochs are 1 ms apart, with a snapshot at each fifth; the retention is 20 ms."""
    publish(tmp_path, range(0))
    log = ChangeLog(tmp_path).job("job")
    models: list[dict[bytes, Any]] = []
    for number in range(60):
        publish(tmp_path, range(number, number + 1))
        models.append(values_in_log(tmp_path))
        current = log.current()
        assert current is not None
        if number % 5 == 4:
            with read_snapshot(tmp_path, "job") as snapshot:
                snapshots.write(log, current, snapshot)
            sweep(log, current, at_ms=1_000 + number, retention_ms=20)
            for past in range(max(0, number - 20), number + 1, 3):
                assert values_in_log(tmp_path, epoch=past) == models[past]
    assert log.snapshot_numbers("q.1") == [34, 44, 54, 59], "besides the two newest, they are half the retention apart"
    assert log.numbers("q.1") == list(range(35, 60))
    sweep(log, current, at_ms=1_059 + 20, retention_ms=20)
    assert (log.snapshot_numbers("q.1"), log.numbers("q.1")) == ([54, 59], list(range(55, 60)))


def test_nothing_is_collected_without_snapshot(tmp_path: Path) -> None:
    publish(tmp_path, range(20))
    log, current = current_of(tmp_path)
    assert sweep(log, current, at_ms=FAR_MS, retention_ms=0) == 0
    assert log.numbers("q.1") == list(range(20))


def test_unlisted_files_are_removed_after_later_epoch(tmp_path: Path) -> None:
    publish(tmp_path, range(3))
    changes = tmp_path / "job" / "q.1" / "changes"
    (changes / "1-orphan.arrow").write_bytes(b"of a failed task")
    (changes / "3-running.arrow").write_bytes(b"of a task of the batch in hand")
    compact_log(str(tmp_path), "job", retention_ms=FAR_MS)
    assert [file.name for file in changes.iterdir()] == ["3-running.arrow"]


def test_reader_without_its_epochs_continues_from_snapshot(tmp_path: Path) -> None:
    log = tmp_path / "log"
    publish(log, range(10))
    applier, events = follower(log, tmp_path / "store")
    applier.step()
    publish(log, range(10, 40))
    compact_log(str(log), "job", retention_ms=0)
    publish(log, range(40, 42))
    applier.step()
    assert events[-1]["applied"] == 41
    assert events[-1]["error"] == ""
    assert applier.store is not None
    with applier.store.snapshot(2_000) as snapshot:
        assert snapshot.value(b"job:v:41") == b"e41"
        assert snapshot.map_size(b"job:m:1") == 42
    applier.close()


def test_reader_at_snapshots_epoch_keeps_its_store(tmp_path: Path) -> None:
    log = tmp_path / "log"
    publish(log, range(10))
    applier, events = follower(log, tmp_path / "store")
    applier.step()
    compact_log(str(log), "job", retention_ms=0)
    publish(log, range(10, 12))
    applier.step()
    assert [event["event"] for event in events].count("open") == 1
    assert events[-1]["applied"] == 11
    applier.close()


def test_snapshot_without_manifest_does_not_exist(tmp_path: Path) -> None:
    publish(tmp_path, range(5))
    log = ChangeLog(tmp_path).job("job")
    compact_log(str(tmp_path), "job", retention_ms=FAR_MS)
    current = log.current()
    assert current is not None
    (tmp_path / "job" / "q.1" / "snapshots" / "4" / "manifest.json").unlink()
    assert snapshots.newest(log, current) is None


def test_first_of_two_snapshots_of_epoch_stands(tmp_path: Path) -> None:
    publish(tmp_path, range(5))
    log, current = current_of(tmp_path)
    with read_snapshot(tmp_path, "job") as snapshot:
        first = snapshots.write(log, current, snapshot)
        second = snapshots.write(log, current, snapshot)
    assert first == second
    assert len(log.filesystem.names(log.snapshot_folder("q.1", 4))) == 1 + len(first.files)


def test_files_of_snapshot_end_between_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_split, "STATE_FILE_BYTES_MAX", 2_000)
    monkeypatch.setattr("state_backend.model.records.RUN_ROWS_MAX", 20)
    write_log(tmp_path, "job", STATES, (put_number(number, "x") for number in range(1_000)), query_id="q")
    compact_log(str(tmp_path), "job", retention_ms=0)
    log, current = current_of(tmp_path)
    manifest = snapshots.newest(log, current)
    assert manifest is not None
    assert len(manifest.files) > 5
    ends = [(file.runs[0][0], file.runs[-1][1]) for file in manifest.files]
    assert all(last < first for (_, last), (first, _) in pairwise(ends))
    keys = [key for run in snapshots.changes(log, "q.1", manifest).runs for key in run.column("key").to_pylist()]
    assert [slot_of(key) for key in keys] == sorted(slot_of(key) for key in keys)
    assert len(keys) == 1_000


def test_rewind_before_oldest_epoch_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, range(30))
    compact_log(str(tmp_path), "job", retention_ms=0)
    with (
        LogWriter(tmp_path, "job", STATES, "q", on_rewind="truncate") as writer,
        pytest.raises(RewoundCheckpointError, match="no longer has the epoch before it"),
    ):
        writer.publish([], 7)


def test_rewind_leaves_later_snapshots_behind(tmp_path: Path) -> None:
    publish(tmp_path, range(10))
    compact_log(str(tmp_path), "job", retention_ms=FAR_MS)
    with LogWriter(tmp_path, "job", STATES, "q", on_rewind="truncate") as writer:
        writer.publish([put_number(1, "again")], 5)
    log, current = current_of(tmp_path)
    assert snapshots.newest(log, current) is None
    with read_snapshot(tmp_path, "job") as snapshot:
        assert snapshot.value(b"job:v:1") == b"again"
        assert snapshot.value(b"job:v:7") is None


def test_store_of_log_without_its_first_epochs_is_incomplete(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LogWriter(log, "job", STATES, "q") as writer:
        for epoch in range(7, 12):
            writer.publish([put_number(epoch, "x")], epoch)
    compact_log(str(log), "job", retention_ms=0)
    applier, events = follower(log, tmp_path / "store")
    applier.step()
    assert next(event for event in events if event["event"] == "open")["is_incomplete"]
    applier.close()


def test_replaced_generations_are_removed_when_new_one_is_old_enough(tmp_path: Path) -> None:
    publish(tmp_path, range(3))
    with LogWriter(tmp_path, "job", STATES, "other") as writer:
        writer.publish([put_number(1, "x")], clock_ms=5_000)
    log, current = current_of(tmp_path)
    sweep(log, current, at_ms=5_100, retention_ms=500)
    assert (tmp_path / "job" / "q.1").exists()
    sweep(log, current, at_ms=6_000, retention_ms=500)
    assert not (tmp_path / "job" / "q.1").exists()
    assert (tmp_path / "job" / "other.2").exists()


def test_epoch_before_snapshot_cannot_be_read_any_more(tmp_path: Path) -> None:
    publish(tmp_path, range(10))
    compact_log(str(tmp_path), "job", retention_ms=0)
    with pytest.raises(LogError, match="epoch 3 cannot be read any more: the log reaches back to epoch 9"):
        read_snapshot(tmp_path, "job", epoch=3)


@pytest.mark.slow
def test_disk_and_replay_stay_bounded_over_ten_thousand_epochs(tmp_path: Path) -> None:
    """The log is on a filesystem without fsync, for the sake of the clock; nothing is asserted of time."""
    unsynced = ArrowFilesystem(pyarrow.fs.LocalFileSystem(), str(tmp_path / "log"), "unsynced")
    log = ChangeLog(unsynced).job("job")
    store = tmp_path / "store"
    events: list[dict[str, Any]] = []
    most = 0
    with LogWriter(unsynced, "job", STATES, "q") as writer:
        applier = Applier(ChangeLog(unsynced), "job", store, events.append)
        for epoch in range(10_000):
            writer.publish([put_number(epoch % 100, f"e{epoch}")], clock_ms=1_000 + epoch)
            if epoch % 500 == 499:
                applier.step()
                assert applier.store is not None
                current = log.current()
                assert current is not None
                with applier.store.snapshot(2_000) as snapshot:
                    snapshots.write(log, current, snapshot)
                sweep(log, current, at_ms=1_000 + epoch, retention_ms=100)
                most = max(most, sum(1 for _ in (tmp_path / "log").rglob("*")))
        applier.close()
    assert most < 1_200, "the epochs of one interval between snapshots, and few snapshots"
    assert events[-1]["applied"] == 9_999
    with read_snapshot(LocalFilesystem(tmp_path / "log").root, "job") as snapshot:
        assert snapshot.applied.key_count == 100
        assert snapshot.value(b"job:v:99") == b"e9999"


def test_manifest_is_read_back_as_it_was_written() -> None:
    manifest = Epoch(7, 2, None, 1_000, rows=3, origin=4, state_bytes={"v": 5})
    assert Epoch.from_bytes(manifest.to_bytes(), "here") == manifest


def test_snapshot_has_bytes_of_each_state_of_all_writers(tmp_path: Path) -> None:
    """Of three parts the last has slots of the others: their rows are written again."""
    log = tmp_path / "log"
    publish(log, range(40))
    job = ChangeLog(log).job("job")
    current = job.current()
    assert current is not None
    for number, slots in enumerate(("0-9999", "9000-13999", "12000-16383")):
        applier = Applier(ChangeLog(log), "job", tmp_path / slots, lambda event: None, slots=SlotSet.parse(slots))
        while applier.step():
            pass
        assert applier.store is not None
        with applier.store.snapshot(0) as snapshot:
            joined = snapshots.write(job, current, snapshot)
        assert (joined is not None) == (number == 2)
        applier.close()
    with read_snapshot(log, "job") as snapshot:
        values = sum(len(key) + len(snapshot.value(key) or b"") for key in snapshot.scan(0, 1_000, {Kind.VALUE})[1])
        fields = sum(len(name) + len(as_bytes(value)) for name, value in snapshot.map_pairs(b"job:m:1"))
    assert joined is not None and joined.state_bytes == {"v": values, "m": len(b"job:m:1") + fields}


def test_snapshot_with_part_of_older_version_has_no_bytes_of_states(tmp_path: Path) -> None:
    log = tmp_path / "log"
    publish(log, range(40))
    job = ChangeLog(log).job("job")
    current = job.current()
    assert current is not None
    joined = None
    for slots in ("0-8191", "8192-16383"):
        applier = Applier(ChangeLog(log), "job", tmp_path / slots, lambda event: None, slots=SlotSet.parse(slots))
        while applier.step():
            pass
        assert applier.store is not None
        with applier.store.snapshot(0) as snapshot:
            joined = snapshots.write(job, current, snapshot)
        applier.close()
        for path in (log / "job").glob("*/snapshots/39/part-*.json"):
            part = json.loads(path.read_bytes())
            del part["checksum"]
            part.pop("state_bytes", None)  # of the first part only
            path.write_bytes(with_checksum(part))
    assert joined is not None and joined.rows == 80
    assert joined.state_bytes is None


def test_server_reports_bytes_in_newest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    publish(log, range(10), keys=1)
    applier, events = follower(log, tmp_path / "store")
    applier.step()
    assert events[-1]["state_bytes"] is None
    compact_log(str(log), "job", retention_ms=0)
    applier.step()
    assert events[-1]["state_bytes"] is None, "it is not due yet"
    monkeypatch.setattr(log_status, "SNAPSHOT_INTERVAL_S", 0.0)
    applier.close()
    applier, events = follower(log, tmp_path / "store")
    applier.step()
    assert events[-1]["state_bytes"]["v"] == len(b"job:v:0") + len(b"e9")
    publish(log, range(10, 11), keys=3)
    compact_log(str(log), "job", retention_ms=0)
    applier.step()
    assert events[-1]["state_bytes"]["v"] == 2 * len(b"job:v:0") + len(b"e9") + len(b"e10")
    applier.close()


# Damage ---------------------------------------------------------------------------------------------------------------


def two_snapshots(log: Path) -> list[Path]:
    """Write a log with two snapshots, and the epochs after the older one; return their folders, the newer one first."""
    for epochs in (range(10), range(10, 20)):
        publish(log, epochs)
        compact_log(str(log), "job", retention_ms=1 << 41)  # nothing is swept yet
    publish(log, range(20, 25))
    return sorted((log / "job").glob("*/snapshots/*"), key=lambda path: -int(path.name))


def damage_files(folder: Path) -> None:
    for file in folder.glob("*.arrow"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def epochs_of(log: Path) -> list[Path]:
    return sorted((log / "job").glob("*/epochs/*.json"), key=lambda path: int(path.stem))


@pytest.mark.parametrize("damage", [damage_files, damage_manifest])
@pytest.mark.parametrize("has_first_epochs", [True, False])
def test_damaged_newest_snapshot_is_left_out_for_one_before(
    tmp_path: Path, damage: Callable[[Path], None], has_first_epochs: bool
) -> None:
    log = tmp_path / "log"
    newer, _ = two_snapshots(log)
    before = values_in_log(log)
    damage(newer)
    if not has_first_epochs:
        for path in epochs_of(log)[:10]:
            path.unlink()
    applier, events = follower(log, tmp_path / "store")
    applier.step()
    assert (events[-1]["applied"], events[-1]["error"]) == (24, "")
    assert applier.store is not None
    with applier.store.snapshot(2_000) as snapshot:
        assert {(each.key, each.field): each for each in snapshot.changes()} == before
    applier.close()


def test_irreplaceable_damaged_snapshot_is_error_until_restored(tmp_path: Path) -> None:
    log = tmp_path / "log"
    newer = two_snapshots(log)[0]
    kept = {path: path.read_bytes() for path in newer.glob("*.arrow")}
    damage_files(newer)
    for path in epochs_of(log)[:20]:
        path.unlink()
    applier, events = follower(log, tmp_path / "store")
    for _ in range(3):
        applier.step()
    assert newer.name in events[-1]["error"]
    for path, content in kept.items():
        path.write_bytes(content)
    applier.step()
    assert (events[-1]["applied"], events[-1]["error"]) == (24, "")
    applier.close()
