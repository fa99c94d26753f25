"""An applier that owns some slots: it reads what it needs, says what it owns, and gains and loses slots as it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply import applier as applier_module
from state_backend.apply import file_split
from state_backend.apply import slot_backfill as loading_module
from state_backend.apply.applier import Applier, follow_until_end
from state_backend.apply.compact import compact_log
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogCorruptError
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import Job, Keyspace
from tests.builders import put_value

STATE = StateDescriptor("v", key="k", value="v").for_job("job")
LOW, HIGH = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")
KEYS = [b"key:%d" % number for number in range(400)]


put = partial(put_value, "v")


class Scene:
    """A log, and an applier of some slots of it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.folder = folder / "store"
        self.events: list[dict[str, Any]] = []
        self.writer = LogWriter(self.log, "job", [STATE], "q")
        self.applier = self.start(LOW)

    def start(self, slots: SlotSet) -> Applier:
        self.applier = Applier(ChangeLog(self.log), "job", self.folder, self.events.append, slots=slots)
        return self.applier

    def publish(self, value: bytes, keys: list[bytes] = KEYS) -> int:
        return self.writer.publish([put(key, value) for key in keys])

    def settle(self) -> None:
        while self.applier.step():
            pass

    @property
    def reported(self) -> dict[str, Any]:
        return next(event for event in reversed(self.events) if event["event"] == "status")

    @property
    def store(self) -> LmdbStore:
        assert self.applier.store is not None
        return self.applier.store

    def values(self) -> dict[bytes, bytes | None]:
        with self.store.snapshot(1) as snapshot:
            return {key: snapshot.value(key) for key in snapshot.scan(0, 1 << 20)[1]}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.applier.close()


def of(slots: SlotSet, value: bytes) -> dict[bytes, bytes]:
    return {key: value for key in KEYS if slot_of(key) in slots}


# Some slots ---------------------------------------------------------------------------------------------------------


def test_only_its_slots_are_applied_counted_and_shown(scene: Scene) -> None:
    scene.publish(b"1")
    scene.publish(b"2")
    scene.settle()
    assert scene.values() == of(LOW, b"2")
    assert scene.store.applied.key_count == len(of(LOW, b"2"))
    assert (scene.reported["slots"], scene.reported["loading"], scene.reported["applied"]) == ("0-8191", "", 1)
    with scene.store.snapshot(1) as snapshot:
        found = [next(filter(None, snapshot.random_keys())) for _ in range(50)]
    assert all(slot_of(key) in LOW for key in found)


def test_no_slot_at_all_still_follows_epochs(scene: Scene) -> None:
    scene.applier.close()
    scene.start(NONE)
    scene.publish(b"1")
    scene.settle()
    assert (scene.reported["slots"], scene.reported["applied"], scene.values()) == ("", 0, {})
    with scene.store.snapshot(1) as snapshot:
        assert list(snapshot.random_keys()) == []


def test_files_without_its_slots_are_not_opened(scene: Scene) -> None:
    number = scene.publish(b"x" * 1000, list(of(HIGH, b"")))
    (file,) = Epoch.from_bytes((scene.log / "job/q.1/epochs" / f"{number}.json").read_bytes(), "").files
    (scene.log / "job/q.1/changes" / file.name).unlink()
    scene.settle()
    assert (scene.reported["applied"], scene.reported["error"]) == (0, "")
    scene.applier.set_desired_slots(ALL)
    scene.settle()
    assert "is missing" in scene.reported["error"]
    assert (scene.reported["slots"], scene.reported["loading"]) == ("0-8191", "8192-16383")


def test_snapshot_parts_without_its_slots_are_not_opened(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_split, "STATE_FILE_BYTES_MAX", 1_000)
    monkeypatch.setattr("state_backend.model.records.RUN_ROWS_MAX", 20)
    scene.publish(b"1")
    compact_log(str(scene.log), "job", retention_ms=0)
    scene.writer.publish([])
    folder = scene.log / "job/q.1/snapshots/0"
    parts = Epoch.from_bytes((folder / "manifest.json").read_bytes(), "").files
    gone = [part for part in parts if part.runs[0][0] > 8191]
    assert 0 < len(gone) < len(parts)
    for part in gone:
        (folder / part.name).rename(scene.log / part.name)
    scene.settle()
    assert (scene.reported["error"], scene.values()) == ("", of(LOW, b"1"))
    (scene.log / "job/q.1/epochs/0.json").unlink()  # else what is missing is read from there
    scene.applier.set_desired_slots(SlotSet.parse("9000-9999"))
    scene.settle()
    assert "is missing" in scene.reported["error"]
    for part in gone:
        (scene.log / part.name).rename(folder / part.name)
    scene.settle()
    assert (scene.reported["error"], scene.values()) == ("", of(SlotSet.parse("9000-9999"), b"1"))


def test_file_whose_runs_are_not_those_listed_is_error(scene: Scene) -> None:
    number = scene.publish(b"x" * 1000)
    path = scene.log / "job/q.1/epochs" / f"{number}.json"
    epoch = Epoch.from_bytes(path.read_bytes(), "")
    (file,) = epoch.files
    more = Epoch(**(vars(epoch) | {"files": (type(file)(**(vars(file) | {"runs": file.runs * 2})),)}))
    log = ChangeLog(scene.log).job("job")
    with pytest.raises(LogCorruptError, match="has 1 runs, and epoch 0 lists 2"):
        list(log.runs("q.1", more, LOW))


def test_store_of_all_slots_keeps_no_account_of_slots(scene: Scene) -> None:
    scene.applier.close()
    scene.start(ALL)
    scene.publish(b"1")
    scene.settle()
    with scene.store.begin() as txn:
        assert b"slots" not in txn.get(b"applied", db=scene.store.tables.meta)
        assert not [name for name, _ in txn.cursor(db=scene.store.tables.meta) if name.startswith(b"slot")]
    assert (scene.reported["slots"], scene.reported["loading"]) == ("0-16383", "")


# Gaining and losing --------------------------------------------------------------------------------------------------


def test_gained_range_is_owned_once_caught_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "LOADING_STEP_S", 0)
    for number in range(5):
        scene.publish(b"%d" % number)
    scene.settle()
    scene.applier.set_desired_slots(ALL)
    seen = []
    for number in range(5, 20):
        scene.publish(b"%d" % number, KEYS if number < 8 else [])
        scene.applier.step()
        seen.append((scene.reported["applied"], scene.reported["slots"]))
        owned = SlotSet.parse(scene.reported["slots"])
        assert scene.values() == of(owned, b"%d" % min(number, 7))
    assert [applied for applied, _ in seen] == list(range(5, 20))
    assert seen[0][1] == seen[5][1] == "0-8191"
    scene.settle()
    assert (scene.reported["slots"], scene.reported["loading"]) == ("0-16383", "")
    assert scene.values() == of(ALL, b"7")
    assert scene.store.applied.key_count == len(KEYS)


def test_lost_range_is_not_owned_at_once_even_when_log_is_unreachable(scene: Scene) -> None:
    scene.publish(b"1")
    scene.settle()
    scene.log.rename(scene.log.with_name("away"))
    scene.applier.set_desired_slots(SlotSet.parse("0-99"))
    scene.applier.step()
    assert (scene.reported["slots"], scene.reported["applied"]) == ("0-99", 0)
    assert scene.reported["error"]
    assert scene.values() == of(SlotSet.parse("0-99"), b"1")


def test_lost_range_is_reported_before_log_is_followed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.publish(b"1")
    scene.settle()
    reported: list[str] = []
    monkeypatch.setattr(Applier, "_apply_epochs", lambda self: reported.append(scene.reported["slots"]))
    scene.applier.set_desired_slots(SlotSet.parse("5"))
    scene.applier.step()
    assert reported == ["5"]


def test_lost_range_is_removed_in_batches_or_regained(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "REMOVED_KEYS_MAX", 10)
    scene.publish(b"1")
    scene.settle()
    before = entries(scene.store)
    scene.applier.set_desired_slots(NONE)
    assert scene.applier.step() is True
    assert entries(scene.store) == before - 10
    scene.publish(b"2")
    scene.applier.set_desired_slots(LOW)
    scene.applier.step()
    owned = SlotSet.parse(scene.reported["slots"])  # those that are removed by then
    assert len(owned) < 1_000
    assert scene.values() == of(owned, b"2")
    scene.settle()
    assert (scene.reported["slots"], scene.values()) == ("0-8191", of(LOW, b"2"))
    assert entries(scene.store) == before


def entries(store: LmdbStore) -> int:
    with store.begin() as txn:
        return int(txn.stat(store.tables.keys)["entries"])


def test_loading_range_begins_anew_when_its_epochs_are_collected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(applier_module, "LOADING_STEP_S", 0)
    for number in range(20):
        scene.publish(b"%d" % number, KEYS[: 20 * number])
    scene.settle()
    scene.applier.set_desired_slots(ALL)
    for _ in range(5):
        scene.applier.step()
    held = scene.store.slot_ownership.loading
    assert held is not None
    assert 0 < held.epoch < 10
    compact_log(str(scene.log), "job", retention_ms=0)
    scene.publish(b"last")
    scene.settle()
    assert "loading restarts" in caplog.text
    assert (scene.reported["slots"], scene.reported["error"]) == ("0-16383", "")
    assert scene.values() == of(ALL, b"last")


def test_large_epochs_and_snapshots_are_loaded_run_by_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backend.model.records.RUN_ROWS_MAX", 50)
    monkeypatch.setattr(loading_module, "RUN_ROWS_MAX", 50)
    monkeypatch.setattr(applier_module, "LOADING_STEP_S", 0)
    scene.publish(b"1")
    compact_log(str(scene.log), "job", retention_ms=1 << 50)
    scene.publish(b"2")
    scene.settle()
    scene.applier.set_desired_slots(ALL)
    seen = set()
    while scene.applier.step():
        if (held := scene.store.slot_ownership.loading) is not None:
            seen.add((held.snapshot, held.epoch, held.runs > 0))
    assert seen >= {(0, -1, True), (-1, 0, False), (-1, 0, True)}
    assert scene.values() == of(ALL, b"2")


def test_cached_replies_are_dropped_when_slots_were_away(scene: Scene) -> None:
    """A key may have changed while nobody here looked."""
    scene.publish(b"1")
    scene.settle()
    changed: list[Any] = []
    view = Keyspace({"job": Job("job", "q", [STATE], scene.store)}, version=1).view(1, changed.append)
    for wanted in (NONE, LOW):
        view.snapshot_of("job")
        changed.clear()
        scene.applier.set_desired_slots(wanted)
        scene.settle()
        view.renew(1)
        view.snapshot_of("job")
        assert changed == [None]
    scene.publish(b"2", KEYS[:3])
    scene.settle()
    view.renew(1)
    view.snapshot_of("job")
    assert changed == [
        None,
        None,
    ]  # a reader cannot tell whether it looked before or after the slots came, in one epoch
    scene.publish(b"3", KEYS[:3])
    scene.settle()
    view.renew(1)
    view.snapshot_of("job")
    assert changed[-1] == [key for key in KEYS[:3] if slot_of(key) in LOW]
    view.close()


def test_reopened_store_of_all_slots_may_give_some_up(scene: Scene) -> None:
    scene.applier.close()
    scene.start(ALL)
    scene.publish(b"1")
    scene.settle()
    scene.applier.close()
    scene.start(HIGH)
    scene.settle()
    assert (scene.reported["slots"], scene.values()) == ("8192-16383", of(HIGH, b"1"))
    assert scene.store.applied.key_count == len(of(HIGH, b"1")) == entries(scene.store)


def test_new_generation_is_built_of_slots_that_are_wanted(scene: Scene) -> None:
    scene.publish(b"1")
    scene.settle()
    other = LogWriter(scene.log, "job", [STATE], "q2", takeover=True)
    scene.applier.set_desired_slots(HIGH)
    scene.settle()
    assert (scene.reported["slots"], scene.reported["loading"]) == ("", "8192-16383")
    other.publish([put(key, b"new") for key in KEYS])
    scene.settle()
    assert (scene.reported["slots"], scene.values()) == ("8192-16383", of(HIGH, b"new"))


# Lines ---------------------------------------------------------------------------------------------------------------


def test_line_on_input_changes_slots_and_wrong_one_does_not(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.publish(b"1")
    for lines, expected in ((b"slots 5-9\nlook\n", "5-9"), (b"slots 9-5\n", "5-9"), (b"\nslots\n", "")):
        reading, writing = os.pipe()
        os.write(writing, lines)
        os.close(writing)
        follow_until_end(scene.applier, reading, 60.0)
        os.close(reading)
        scene.settle()
        assert scene.reported["slots"] == expected
    assert "9-5 is no range of slots" in caplog.text


def test_process_takes_slots_from_its_command_line_and_its_input(scene: Scene) -> None:
    scene.publish(b"1")
    scene.applier.close()
    command = [sys.executable, "-m", "state_backend.apply.applier", "--log", str(scene.log), "--job", "job"]
    process = subprocess.Popen(
        [*command, "--store", str(scene.folder), "--slots", "0-99"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    wanted = iter(["slots 100-16383", "slots 0-16383"])
    seen: list[str] = []
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "status" and not event["loading"] and event["slots"] not in seen[-1:]:
            seen.append(event["slots"])
            if (more := next(wanted, None)) is None:
                process.stdin.close()
                break
            process.stdin.write(more + "\n")
            process.stdin.flush()
    process.stdout.close()
    assert process.wait() == 0
    assert seen == ["0-99", "100-16383", "0-16383"]


def test_slots_that_are_no_slots_are_refused_on_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        applier_module.main(["--log", "l", "--job", "j", "--store", "s", "--slots", "0-99999"])
    assert "0-99999 is no range of slots" in capsys.readouterr().err


# What is told --------------------------------------------------------------------------------------------------------


def test_report_counts_requests_for_slots(scene: Scene) -> None:
    scene.publish(b"1")
    scene.settle()
    (opened,) = [event for event in scene.events if event["event"] == "open"]
    assert [(event["slots_lines"], event["slots"], event["term"]) for event in (opened, scene.reported)] == [
        (0, "0-8191", 1)
    ] * 2
    scene.applier.set_desired_slots(HIGH)
    scene.applier.set_desired_slots(LOW)
    count = len(scene.events)
    scene.settle()
    assert (scene.reported["slots_lines"], scene.reported["slots"], scene.reported["loading"]) == (2, "0-8191", "")
    # A report may come again as time passes, but none tells of the first of the two.
    assert {event["slots_lines"] for event in scene.events[count:] if "slots_lines" in event} == {2}
