"""Snapshots whose slots are written by several servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from state_backend.apply import snapshots
from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog, CurrentGeneration
from state_backend.log.epochs import Epoch
from state_backend.log.garbage_collector import sweep
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogCorruptError
from state_backend.model.records import Change, Op, changes_in
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import slot_of

STATES = [
    StateDescriptor("v", key="k", value="v").for_job("job"),
    StateDescriptor("l", key="k", value="v", kind="list").for_job("job"),
]
LOW, HIGH = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")
FOR_EVER_MS = 1 << 50


class Scene:
    """A log, and servers that each own some slots of it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "log"
        self.folder = folder
        self.log = ChangeLog(self.root).job("job")
        self.writer = LogWriter(self.root, "job", STATES, "q", on_rewind="truncate", sends_heartbeats=False)
        self.servers = self.published = 0

    @property
    def current(self) -> CurrentGeneration:
        current = self.log.current()
        assert current is not None
        return current

    def publish(self, epochs: int = 1, epoch: int | None = None) -> None:
        for _ in range(epochs):
            value = b"%d" % self.published
            self.published += 1
            changes = [Change("v", Op.PUT, b"v:%d" % each, None, value) for each in range(50)]
            changes += [Change("l", Op.APPEND, b"l:%d" % each, None, value) for each in range(20)]
            self.writer.publish(changes, epoch)
            epoch = None

    def write(self, slots: SlotSet) -> Epoch | None:
        """Write what a server with these slots writes at the newest epoch."""
        self.servers += 1
        store = self.folder / f"store{self.servers}"
        applier = Applier(ChangeLog(self.root), "job", store, lambda event: None, slots=slots)
        applier.step()
        assert applier.store is not None
        with applier.store.snapshot(1) as shown:
            manifest = snapshots.write(self.log, self.current, shown)
        applier.close()
        return manifest

    def newest(self) -> Epoch | None:
        return snapshots.newest(self.log, self.current)

    def of_log(self) -> dict[bytes, Any]:
        with read_snapshot(self.root, "job") as shown:
            return {
                key: shown.value(key)
                if shown.key_info(key).state == "v"
                else list(shown.list_elements(key, 0, shown.list_size(key)))
                for key in shown.scan(0, 1 << 30)[1]
            }

    def folder_of(self, epoch: int) -> Path:
        return self.root / self.log.snapshot_folder(self.current.generation, epoch)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path)
    scene.publish(5)
    return scene


def forget(scene: Scene) -> dict[bytes, Any]:
    """Sweep all that a snapshot covers; return what the log said before."""
    before = scene.of_log()
    assert len(before) == 70
    sweep(scene.log, scene.current, FOR_EVER_MS, retention_ms=0)
    assert len(scene.log.numbers(scene.current.generation)) == 1
    return before


def test_parts_of_all_slots_are_snapshot(scene: Scene) -> None:
    assert scene.write(LOW) is None
    assert scene.newest() is None
    manifest = scene.write(HIGH)
    assert manifest is not None
    assert (manifest.epoch, manifest.rows, manifest.slots) == (4, 70, ALL)
    assert manifest == scene.newest()
    before = forget(scene)
    assert scene.of_log() == before
    scene.publish()
    assert scene.of_log()[b"l:1"] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_older_version_reads_manifest_as_it_always_was(scene: Scene) -> None:
    scene.write(LOW)
    scene.write(HIGH)
    content = json.loads((scene.folder_of(4) / "manifest.json").read_bytes())
    assert content["format"] == 1
    assert "slots" not in content
    found = [change for file in content["files"] for change in changes_of(scene.folder_of(4) / file["name"])]
    assert sorted(found) == sorted(
        [Change("v", Op.PUT, b"v:%d" % each, None, b"4") for each in range(50)]
        + [change for change in found if change.state == "l"]
    )


def changes_of(path: Path) -> list[Change]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [change for index in range(reader.num_record_batches) for change in changes_in(reader.get_batch(index))]


def test_slot_without_part_prevents_snapshot(scene: Scene) -> None:
    assert scene.write(SlotSet.parse("0-8190")) is None
    assert scene.write(HIGH) is None
    assert scene.newest() is None
    assert sweep(scene.log, scene.current, FOR_EVER_MS, retention_ms=0) == 0
    assert scene.write(SlotSet.parse("8191")) is not None


def test_slots_that_several_wrote_are_taken_from_one_of_them(scene: Scene) -> None:
    assert scene.write(SlotSet.parse("0-9000,16000")) is None
    assert scene.write(SlotSet.parse("5000-15000")) is None
    assert scene.write(SlotSet.parse("9000-9999,14000-16383")) is not None
    before = forget(scene)
    assert scene.of_log() == before
    assert all(len(value) == 5 for key, value in before.items() if key.startswith(b"l:"))


@pytest.mark.parametrize("slots", ["0-9000", "9000-16383"])
def test_reader_of_some_slots_reads_files_of_any_part(scene: Scene, slots: str, tmp_path: Path) -> None:
    for part in ("0-5000,16000-16383", "4000-12000", "11000-16100"):
        scene.write(SlotSet.parse(part))
    before = forget(scene)
    wanted = SlotSet.parse(slots)
    applier = Applier(ChangeLog(scene.root), "job", tmp_path / "reader", lambda event: None, slots=wanted)
    applier.step()
    assert applier.store is not None
    with applier.store.snapshot(1) as shown:
        keys = set(shown.scan(0, 1 << 30)[1])
        assert keys == {key for key in before if slot_of(key) in wanted}
        assert all(shown.list_size(key) == 5 for key in keys if key.startswith(b"l:"))
    applier.close()


def test_one_of_several_owners_of_slot_writes(scene: Scene) -> None:
    scene.write(LOW)
    files = sorted(scene.folder_of(4).iterdir())
    assert scene.write(LOW) is None
    assert sorted(scene.folder_of(4).iterdir()) == files
    manifest = scene.write(HIGH)
    assert manifest is not None
    assert manifest.rows == 70


def test_parts_of_different_epochs_do_not_go_together(scene: Scene) -> None:
    scene.write(LOW)
    scene.publish()
    assert scene.write(HIGH) is None
    assert scene.newest() is None
    assert scene.write(LOW) is not None


def test_parts_and_snapshots_from_before_rewind_do_not_count(scene: Scene) -> None:
    scene.write(LOW)
    scene.publish(epoch=2)
    scene.publish(2)
    assert scene.write(HIGH) is None
    assert scene.write(LOW) is not None
    before = forget(scene)
    assert scene.of_log() == before
    assert before[b"l:1"] == [b"0", b"1", b"5", b"6", b"7"]


def test_manifest_from_before_rewind_does_not_count(scene: Scene) -> None:
    scene.write(ALL)
    old = scene.newest()
    scene.publish(epoch=2)
    scene.publish(2)
    assert scene.newest() is None
    manifest = scene.write(ALL)
    assert manifest is not None
    assert old is not None
    assert manifest.term > old.term
    assert scene.newest() == manifest


def test_snapshot_of_all_slots_and_parts_of_its_epoch_are_one_snapshot(scene: Scene) -> None:
    scene.write(LOW)
    compact_log(str(scene.root), "job", retention_ms=FOR_EVER_MS)
    whole = scene.newest()
    assert whole is not None
    assert scene.write(HIGH) == whole
    listed = {file.name for file in whole.files}
    assert listed <= {path.name for path in scene.folder_of(4).iterdir()}


def test_unused_parts_of_snapshot_are_removed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one finishes the same snapshot while parts are cut."""
    scene.write(SlotSet.parse("0-9000"))
    names: list[str] = []
    finish = snapshots._finish

    def late(log: Any, current: Any, folder: str, manifest: Epoch, written: Any) -> Epoch | None:
        names.extend(file.name for file in written)
        log.filesystem.create(f"{folder}/manifest.json", manifest.to_bytes())
        return finish(log, current, folder, manifest, written)

    monkeypatch.setattr(snapshots, "_finish", late)
    assert scene.write(HIGH) is not None
    assert len(names) == 1
    assert not (scene.folder_of(4) / names[0]).exists()


def test_parts_without_snapshot_are_collected_with_older_files(scene: Scene) -> None:
    scene.write(LOW)
    for _ in range(2):
        scene.publish()
        scene.write(ALL)
        sweep(scene.log, scene.current, 0, retention_ms=FOR_EVER_MS)
    assert sorted(path.name for path in scene.folder_of(4).parent.iterdir()) == ["5", "6"]


def test_part_of_epoch_that_was_collected_is_refused(scene: Scene, tmp_path: Path) -> None:
    applier = Applier(ChangeLog(scene.root), "job", tmp_path / "slow", lambda event: None, slots=LOW)
    applier.step()
    scene.publish()
    scene.write(ALL)
    sweep(scene.log, scene.current, FOR_EVER_MS, retention_ms=0)
    assert applier.store is not None
    with applier.store.snapshot(1) as shown, pytest.raises(LogCorruptError, match="no longer in the log"):
        snapshots.write(scene.log, scene.current, shown)
    applier.close()


class Died(Exception):
    """The writer died here."""


@pytest.mark.parametrize("operation", range(12))
def test_dying_writer_leaves_log_as_it_was(scene: Scene, operation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the operations of a writer that has to cut, join and sweep."""
    scene.write(SlotSet.parse("0-9000"))
    before = scene.of_log()
    with monkeypatch.context() as patches:
        left = dying_after(operation, type(scene.log.filesystem), patches)
        try:
            scene.write(HIGH)
            sweep(scene.log, scene.current, FOR_EVER_MS, retention_ms=0)
        except Died:
            assert left() < 0
    assert scene.of_log() == before
    scene.publish()
    before = scene.of_log()
    scene.write(LOW)
    assert scene.write(HIGH) is not None
    sweep(scene.log, scene.current, FOR_EVER_MS, retention_ms=0)
    assert scene.of_log() == before


def dying_after(operations: int, filesystem: type, patches: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have whoever changes a filesystem die behind so many operations; return what tells how many are left."""
    left = operations

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died
            return change(*arguments, **options)

        return wrapped

    for name in ("create", "open_new", "replace", "make_folder", "remove"):
        patches.setattr(filesystem, name, counted(getattr(filesystem, name)))
    return lambda: left
