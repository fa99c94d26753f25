"""An applier brings its store to the newest whole epoch, and keeps the one it has where it cannot."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend import VERSION
from state_backend.apply import applier as applier_module
from state_backend.apply import store_copies
from state_backend.apply.applier import Applier, follow_until_end
from state_backend.apply.compact import compact_log
from state_backend.apply.heartbeats import HeartbeatWatch
from state_backend.apply.store_log import StoreLog
from state_backend.codec import packed_map
from state_backend.lmdb.store import FORMAT, LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch, EpochContent, EpochRef
from state_backend.log.fencing import HEARTBEATS_MISSED_MAX
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.builders import put_value

TEMP = StateDescriptor("temp", key="k", value="v")
MODE = StateDescriptor("mode", key="k", value="v")
NOW_MS = 1_700_000_000_000


put = partial(put_value, "temp")


class Followed:
    """A log, its applier, and all that the applier reported."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.store = folder / "store"
        self.events: list[dict[str, Any]] = []
        self.applier = self.start()

    def start(self, **more: Any) -> Applier:
        log = ChangeLog(self.log)
        self.applier = Applier(log, "job", self.store, self.events.append, clock=lambda: NOW_MS, **more)
        return self.applier

    def restart(self, **more: Any) -> None:
        """End the applier and start another one on the same folder."""
        self.applier.close()
        self.events.clear()
        self.start(**more)

    def writer(self, *states: StateDescriptor, query_id: str = "q1", **more: Any) -> LogWriter:
        return LogWriter(self.log, "job", states or (TEMP,), query_id, **{"sends_heartbeats": False} | more)

    def step(self) -> dict[str, Any]:
        """Step once; return what is known after it, as a reader of all events knows it."""
        self.applier.step()
        return self.known

    @property
    def known(self) -> dict[str, Any]:
        return {name: value for event in self.events for name, value in event.items()}

    def values(self) -> dict[bytes, bytes | None]:
        """Return what readers of the announced store see."""
        path = self.known["path"]
        mine = self.applier.store  # LMDB forbids to open one folder twice in a process
        is_mine = mine is not None and str(mine.path) == path
        store = mine if mine is not None and is_mine else LmdbStore(path, "", is_reader=True)
        try:
            with store.snapshot(NOW_MS) as snapshot:
                return {key: snapshot.value(key) for key in snapshot.scan(0, 1 << 20)[1]}
        finally:
            if not is_mine:
                store.close()

    def epoch_file(self, number: int, generation: str = "q1.1") -> Path:
        return self.log / "job" / generation / "epochs" / f"{number}.json"

    def change_file(self, number: int, generation: str = "q1.1") -> Path:
        (file,) = Epoch.from_bytes(self.epoch_file(number, generation).read_bytes(), "").files
        return self.log / "job" / generation / "changes" / file.name

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.store / "job").iterdir() if path.is_dir())


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path)
    yield followed
    followed.applier.close()


def publish_large(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> LogWriter:
    """Have 5,000 keys applied. Their deletion leaves more free pages than the applier keeps; return the writer."""
    monkeypatch.setattr(store_copies, "COMPACT_ABOVE_BYTES", 1 << 20)
    followed.restart()
    writer = followed.writer()
    writer.publish([put(b"%d" % number, b"x" * 1000) for number in range(5000)])
    followed.step()
    return writer


# Following ----------------------------------------------------------------------------------------------------------


def test_nothing_is_reported_without_log(followed: Followed) -> None:
    followed.step()
    assert followed.events == []


def test_epochs_are_applied_and_reported_as_they_come(followed: Followed) -> None:
    writer = followed.writer()
    followed.step()
    for number in range(3):
        writer.publish([put(b"k", b"%d" % number)], clock_ms=number + 1)
        reported = followed.step()
        assert (reported["applied"], reported["committed"], reported["committed_clock_ms"]) == (
            number,
            number,
            number + 1,
        )
        assert followed.values() == {b"k": b"%d" % number}
    assert [event["event"] for event in followed.events] == ["open"] + ["status"] * 4


def test_many_epochs_are_applied_in_one_step(followed: Followed) -> None:
    writer = followed.writer()
    for number in range(20):
        writer.publish([put(b"%d" % number)])
    assert followed.step()["applied"] == 19
    assert len(followed.values()) == 20


def test_every_event_has_all_its_names_and_is_plain_json(followed: Followed) -> None:
    followed.writer().publish([put(b"k")])
    followed.epoch_file(0).write_text("damaged")
    followed.step()
    followed.epoch_file(0).unlink()
    followed.writer().publish([put(b"k")])
    followed.step()
    reported = [event for event in followed.events if event["event"] == "status"]
    seen = {
        "term",
        "applied",
        "is_incomplete",
        "digest",
        "skipped_rows",
        "held_back_epoch",
        "held_back_since_ms",
        "slots",
        "loading",
        "slots_lines",
    }
    names = {"event", "version", "committed", "committed_clock_ms", "changes", "is_stale", "error", "is_full"} | seen
    names |= {"applied_epochs", "apply_ns", "state_bytes", "folders", "source_lag", "record_delays"}
    assert [set(event) for event in reported] == [names, names]
    assert all(seen <= set(event) for event in followed.events)
    assert json.loads(json.dumps(followed.events)) == followed.events


def test_unchanged_facts_are_not_reported_again(followed: Followed) -> None:
    followed.writer().publish([put(b"k")])
    followed.step()
    count = len(followed.events)
    for _ in range(5):
        followed.step()
    assert len(followed.events) == count


def test_restarted_applier_continues_after_epoch_of_store(followed: Followed) -> None:
    writer = followed.writer()
    writer.publish([put(b"a")])
    followed.step()
    followed.restart()
    writer.publish([put(b"b")])
    assert followed.step()["applied"] == 1
    assert followed.values() == {b"a": b"v", b"b": b"v"}
    assert followed.folders() == ["q1.1.0"]


def test_existing_store_is_shown_before_log_is_followed(followed: Followed) -> None:
    writer = followed.writer()
    writer.publish([put(b"a")])
    followed.step()
    followed.restart()
    writer.publish([put(b"b", b"x" * 100_000)])
    followed.change_file(1).unlink()
    known = followed.step()
    assert known["event"] == "status"
    assert "is missing" in known["error"]
    assert (known["applied"], known["committed"]) == (0, 1)
    assert followed.values() == {b"a": b"v"}


def test_new_writer_between_two_epochs_does_not_make_store_begin_anew(followed: Followed) -> None:
    followed.writer().publish([put(b"a")])
    followed.step()
    followed.writer().publish([put(b"b")])
    followed.writer().publish([put(b"c")])
    assert followed.step()["applied"] == 2
    assert followed.folders() == ["q1.1.0"]


def test_new_writer_during_apply_stops_nothing(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch of a newer writer may be read a moment after the older writer's term."""
    first = followed.writer()
    first.publish([put(b"a")])
    log = followed.applier._log
    current = log.current()
    followed.writer().publish([put(b"b")])
    answers = [current, current]
    really = log.current
    monkeypatch.setattr(log, "current", lambda: answers.pop() if answers else really())
    assert followed.step()["applied"] == 1
    assert followed.folders() == ["q1.1.0"]


def test_log_begun_after_its_query_is_incomplete(followed: Followed) -> None:
    followed.writer().publish([put(b"k")], epoch=7)
    known = followed.step()
    assert (known["applied"], known["is_incomplete"]) == (7, True)


def test_log_followed_before_its_late_first_epoch_is_incomplete(followed: Followed) -> None:
    """A server runs, the query starts with an old checkpoint and a new log: nobody may take its nils for answers."""
    writer = followed.writer()
    assert followed.step()["is_incomplete"] is False
    writer.publish([put(b"k")], epoch=7)
    assert (followed.step()["applied"], followed.known["is_incomplete"]) == (7, True)
    followed.restart()
    assert followed.step()["is_incomplete"] is True
    writer.publish([put(b"all")], replaces=["temp"])
    assert followed.step()["is_incomplete"] is False, "an epoch that brings everything ends it"


def test_later_states_are_reported(followed: Followed) -> None:
    followed.writer().publish([put(b"a")])
    followed.step()
    followed.writer(TEMP, MODE).publish([put_value("mode", b"b")])
    assert [state["name"] for state in followed.step()["states"]] == ["temp", "mode"]
    assert followed.values() == {b"a": b"v", b"b": b"v"}


def test_dropped_states_keys_go_and_another_state_may_make_them(followed: Followed) -> None:
    followed.writer(TEMP).publish([put(b"a"), put(b"b")])
    followed.step()
    renamed = StateDescriptor("renamed", key_format="job:temp:<k>", value="v")
    writer = followed.writer(renamed)
    writer.publish([put_value("renamed", b"a", b"new")])
    assert [state["name"] for state in followed.step()["states"]] == ["renamed"]
    assert followed.values() == {b"a": b"new"}
    shutil.rmtree(followed.store)
    followed.restart()
    followed.step()
    assert (followed.known["error"], followed.values()) == ("", {b"a": b"new"})


# A log that is another one ------------------------------------------------------------------------------------------


def test_new_generation_replaces_old_one_once_its_first_epoch_is_there(followed: Followed) -> None:
    followed.writer().publish([put(b"old")])
    followed.step()
    writer = followed.writer(query_id="q2")
    followed.step()
    assert (followed.known["generation"], followed.known["applied"]) == ("q1.1", 0)
    assert "q1.1.0" in followed.folders()
    writer.publish([put(b"new")])
    followed.step()
    assert (followed.known["generation"], followed.known["applied"]) == ("q2.2", 0)
    assert followed.values() == {b"new": b"v"}
    assert followed.folders() == ["q2.2.0"]


def test_rewound_log_is_built_anew_while_old_store_stays(followed: Followed) -> None:
    writer = followed.writer(on_rewind="truncate")
    for number in range(4):
        writer.publish([put(b"%d" % number)])
    followed.step()
    old = followed.known["path"]
    writer.publish([put(b"again", b"x" * 100_000)], epoch=2)
    file = followed.change_file(2, "q1.2")
    aside = file.rename(file.with_name("aside"))
    followed.step()
    assert "is missing" in followed.known["error"]
    assert (followed.known["path"], followed.known["applied"]) == (old, 3)
    assert set(followed.values()) == {b"0", b"1", b"2", b"3"}
    aside.rename(file)
    assert followed.step()["applied"] == 2
    assert followed.known["path"] != old
    assert set(followed.values()) == {b"0", b"1", b"again"}
    assert not Path(old).exists()


@pytest.mark.parametrize("new_epochs", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("is_running", [True, False])
def test_log_begun_anew_is_followed_from_start(followed: Followed, new_epochs: int, is_running: bool) -> None:
    writer = followed.writer()
    for number in range(3):
        writer.publish([put(b"old%d" % number)], clock_ms=1000 + number)
    followed.step()
    shutil.rmtree(followed.log)
    followed.step()
    assert len(followed.values()) == 3
    if not is_running:
        followed.restart()
    writer = followed.writer()
    for number in range(new_epochs):
        writer.publish([put(b"new%d" % number)], clock_ms=2000 + number)
    followed.step()
    if new_epochs:
        assert set(followed.values()) == {b"new%d" % number for number in range(new_epochs)}
        assert followed.known["applied"] == new_epochs - 1
    else:
        assert followed.known["applied"] == 2


def other_log(followed: Followed) -> Path:
    """Return another log whose writer, term and clock are those of the log that is followed."""
    other = followed.log.with_name("other")
    with LogWriter(other, "job", (TEMP,), "q1", sends_heartbeats=False) as writer:
        writer.publish([put(b"foreign")], clock_ms=1000)
        writer.publish([put(b"foreign too")], clock_ms=1001)
    return other


@pytest.mark.parametrize("is_running", [True, False])
def test_log_begun_anew_with_equal_terms_is_followed_from_start(followed: Followed, is_running: bool) -> None:
    followed.writer().publish([put(b"old")], clock_ms=1000)
    followed.step()
    shutil.rmtree(followed.log)
    shutil.copytree(other_log(followed), followed.log)
    if is_running:
        followed.writer(takeover=True).publish([put(b"new")], clock_ms=1002)
    else:
        followed.restart()
    followed.step()
    expected = {b"foreign", b"foreign too", *([b"new"] if is_running else [])}
    assert set(followed.values()) == expected


def test_store_is_refused_by_another_log_and_served_by_its_own(followed: Followed) -> None:
    followed.writer().publish([put(b"own")], clock_ms=1000)
    followed.step()
    own, followed.log = followed.log, other_log(followed)
    followed.restart()
    known = followed.step()
    assert "path" not in known
    assert f"was filled from the log {own} (identity " in known["error"]
    assert f"and is given for the log {followed.log} (" in known["error"]
    followed.log = own
    followed.restart()
    followed.step()
    assert set(followed.values()) == {b"own"}


def test_store_of_older_version_takes_identity_of_its_log(followed: Followed) -> None:
    followed.writer().publish([put(b"a")], clock_ms=1000)
    followed.step()
    kept = followed.store / "job" / "q1.1.0" / "log.json"
    kept.unlink()
    followed.restart()
    followed.step()
    assert followed.folders() == ["q1.1.0"]
    assert StoreLog.of_store(kept.parent) == StoreLog.of_log(ChangeLog(followed.log).filesystem)


def test_moved_log_keeps_its_stores(followed: Followed) -> None:
    followed.writer().publish([put(b"a")], clock_ms=1000)
    followed.step()
    followed.log = followed.log.rename(followed.log.with_name("moved"))
    followed.restart()
    followed.step()
    assert (followed.folders(), set(followed.values())) == (["q1.1.0"], {b"a"})
    kept = StoreLog.of_store(followed.store / "job" / "q1.1.0")
    assert kept is not None
    assert kept.root == str(followed.log)


def test_broken_chain_is_error_without_rebuild(followed: Followed) -> None:
    writer = followed.writer()
    for number in range(3):
        writer.publish([put(b"%d" % number)])
    foreign = Epoch(1, 5, EpochRef(0, 5), 1)
    followed.epoch_file(1).write_bytes(foreign.to_bytes())
    known = followed.step()
    assert "epoch 1 follows" in known["error"]
    followed.step()
    assert followed.folders() == ["q1.1.0"]


@pytest.mark.parametrize(
    "lose",
    [
        shutil.rmtree,
        lambda store: (store / "job" / "q1.1.0" / "boot").write_text(f"{FORMAT} {VERSION} another boot"),
        lambda store: (store / "job" / "q1.1.0" / "data.mdb").write_bytes(b"garbage" * 10_000),
    ],
    ids=["removed", "from before the last boot", "no store any more"],
)
def test_lost_store_is_built_from_log(followed: Followed, lose: Callable[[Path], object]) -> None:
    followed.writer().publish([put(b"a")])
    followed.step()
    followed.applier.close()
    (former := followed.store / "job" / "q1.1.0" / "former").touch()
    lose(followed.store)
    followed.restart()
    assert followed.step()["applied"] == 0
    assert followed.values() == {b"a": b"v"}
    assert not former.exists()


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damaged_change_file_stops_before_its_epoch_until_it_is_restored(followed: Followed, damage: str) -> None:
    writer = followed.writer()
    writer.publish([put(b"a")])
    followed.step()
    writer.publish([put(b"b", b"x" * 100_000)])
    writer.publish([put(b"c")])
    file = followed.change_file(1)
    content = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "changed":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    known = followed.step()
    assert file.name in known["error"]
    assert (known["applied"], known["committed"]) == (0, 2)
    assert followed.values() == {b"a": b"v"}
    file.write_bytes(content)
    known = followed.step()
    assert (known["applied"], known["error"]) == (2, "")
    assert set(followed.values()) == {b"a", b"b", b"c"}


def test_damaged_epoch_file_stops_applier_until_restored(followed: Followed) -> None:
    writer = followed.writer()
    writer.publish([put(b"a")])
    followed.step()
    writer.publish([put(b"b")])
    content = followed.epoch_file(1).read_bytes()
    followed.epoch_file(1).write_bytes(content[:50])
    assert "1.json" in followed.step()["error"]
    assert followed.values() == {b"a": b"v"}
    followed.epoch_file(1).write_bytes(content)
    assert followed.step()["error"] == ""
    assert set(followed.values()) == {b"a", b"b"}


@pytest.mark.parametrize("missing", [[1], [1, 2]])
def test_missing_epochs_are_error(followed: Followed, missing: list[int]) -> None:
    writer = followed.writer()
    for number in range(4):
        writer.publish([put(b"%d" % number)])
        if number == 0:
            followed.step()
            followed.restart()
    for number in missing:
        followed.epoch_file(number).rename(followed.log / f"{number}.aside")
    assert str(missing) in followed.step()["error"]
    assert followed.values() == {b"0": b"v"}
    for number in missing:
        (followed.log / f"{number}.aside").rename(followed.epoch_file(number))
    assert followed.step()["applied"] == 3


def test_log_without_its_beginning_is_error(followed: Followed) -> None:
    writer = followed.writer()
    for _ in range(3):
        writer.publish([])
    followed.epoch_file(0).unlink()
    assert "has no snapshot of that" in followed.step()["error"]


def test_unreachable_log_leaves_store_readable(followed: Followed) -> None:
    followed.writer().publish([put(b"a")])
    followed.step()
    aside = followed.log.rename(followed.log.with_name("aside"))
    followed.log.write_bytes(b"not a folder")
    followed.step()
    assert followed.values() == {b"a": b"v"}
    followed.log.unlink()
    aside.rename(followed.log)
    assert followed.step()["error"] == ""


def test_damaged_term_is_error_until_restored(followed: Followed) -> None:
    followed.writer().publish([put(b"a")])
    followed.step()
    followed.writer().publish([put(b"b")])
    path = followed.log / "job" / "terms" / "2.json"
    content = path.read_bytes()
    path.write_bytes(b"{}")
    assert "terms/2.json" in followed.step()["error"]
    assert followed.values() == {b"a": b"v"}
    path.write_bytes(content)
    assert followed.step()["error"] == ""
    assert followed.values() == {b"a": b"v", b"b": b"v"}


def test_error_of_first_step_ends_when_its_cause_ends(followed: Followed) -> None:
    folder = followed.log / "job" / "terms"
    folder.mkdir(parents=True)
    (folder / "1.json").write_bytes(b"{")
    assert "terms/1.json" in followed.step()["error"]
    (folder / "1.json").unlink()
    assert followed.step()["error"] == ""


def test_key_of_two_states_stops_applier_before_epoch(followed: Followed) -> None:
    writer = followed.writer(TEMP, MODE)
    writer.publish([put(b"a")])
    followed.step()
    writer.publish([put(b"b"), put_value("mode", b"a")])
    known = followed.step()
    assert "'temp' and 'mode' both made the key b'a'" in known["error"]
    assert known["applied"] == 0
    followed.applier.close()
    followed.restart()
    assert followed.step()["applied"] == 0
    assert followed.values() == {b"a": b"v"}


def test_full_store_stops_at_whole_epoch_and_continues_with_more_room(followed: Followed) -> None:
    followed.restart(map_bytes_max=1 << 20)
    writer = followed.writer()
    writer.publish([put(b"a")])
    followed.step()
    writer.publish([put(b"%d" % number, b"x" * 1000) for number in range(2000)])
    for _ in range(3):
        known = followed.step()
        assert "free space" in known["error"]
        assert known["is_full"] is True
        assert (known["applied"], known["committed"]) == (0, 1)
    followed.restart(map_bytes_max=1 << 26)
    known = followed.step()
    assert (known["applied"], known["error"], known["is_full"]) == (1, "", False)
    assert len(followed.values()) == 2001


# Expiry, free pages, staleness ---------------------------------------------------------------------------------------


def test_expired_keys_go_in_bounded_batches(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "EXPIRED_KEYS_MAX", 10)
    writer = followed.writer()
    writer.publish([put(b"%d" % number, b"v", NOW_MS - 1) for number in range(25)] + [put(b"stays")], clock_ms=1)
    assert followed.applier.step() is True
    store = followed.applier.store
    assert store is not None
    assert store.applied.key_count == 16
    assert followed.values() == {b"stays": b"v"}
    assert [followed.applier.step(), followed.applier.step()] == [True, False]
    assert (store.applied.key_count, store.applied.expired_keys) == (1, 25)
    assert store.begin().stat(store.tables.keys)["entries"] == 26  # an epoch may still change them
    writer.publish([], clock_ms=NOW_MS)
    assert [followed.applier.step() for _ in range(3)] == [True, True, False]
    assert store.begin().stat(store.tables.keys)["entries"] == 1


def test_excess_free_pages_are_given_back(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = publish_large(followed, monkeypatch)
    assert followed.folders() == ["q1.1.0"]
    writer.publish([Change("temp", Op.DELETE, b"%d" % number) for number in range(4990)])
    followed.step()
    assert followed.folders() == ["q1.1.1"]
    assert (followed.known["path"], followed.known["applied"]) == (str(followed.store / "job" / "q1.1.1"), 1)
    assert len(followed.values()) == 10
    assert (followed.store / "job" / "q1.1.1" / "data.mdb").stat().st_size < 1 << 20
    writer.publish([put(b"more")])
    assert followed.step()["applied"] == 2
    assert len(followed.values()) == 11
    followed.restart()
    assert followed.step()["applied"] == 2
    assert followed.folders() == ["q1.1.1"]


def test_idle_job_keeps_few_free_pages_and_no_epochs(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_copies, "COMPACT_IDLE_ABOVE_BYTES", 1 << 16)
    writer = followed.writer()
    writer.publish([put(b"%d" % number, b"x" * 1000) for number in range(2000)])
    followed.step()
    writer.publish([Change("temp", Op.DELETE, b"%d" % number) for number in range(600)])
    followed.step()
    followed.step()
    assert followed.folders() == ["q1.1.0"]
    assert followed.applier._changed
    followed.applier._idle_from_s = 0.0  # time has passed
    followed.step()
    assert followed.folders() == ["q1.1.1"]
    assert not followed.applier._changed
    store = followed.applier.store
    assert store is not None and store.used_bytes()[1] < 1 << 16
    assert len(followed.values()) == 1400
    followed.step()
    assert (followed.folders(), followed.applier.store) == (["q1.1.1"], store)


def test_active_job_does_not_rest(followed: Followed) -> None:
    writer = followed.writer()
    for number in range(3):
        writer.publish([put(b"k", b"%d" % number)])
        followed.applier._busy_at_s = -math.inf  # time has passed
        followed.step()
        assert not followed.applier.rest(60.0)
    followed.step()
    followed.applier._busy_at_s = -math.inf
    assert followed.applier.rest(60.0)


def test_source_lag_survives_restart_and_snapshot(followed: Followed, tmp_path: Path) -> None:
    writer = followed.writer()
    writer.commit(0, clock_ms=1, offsets=('{"orders":{"0":10}}',))
    writer.send_heartbeat(sources={"at_ms": 7, "newest": {"0": {"orders": {"0": 12}}}})
    expected = {"records": 2, "at_ms": 7, "partitions": {"orders/0": 2}}
    assert followed.step()["source_lag"] == expected
    followed.restart()
    assert followed.step()["source_lag"] == expected
    followed.applier.close()
    compact_log(str(followed.log), "job", retention_ms=0)
    followed.epoch_file(0).unlink()
    shutil.rmtree(followed.store)
    followed.restart()
    assert followed.step()["source_lag"] == expected


def test_records_of_epochs_applied_again_count_once(followed: Followed) -> None:
    def commit(number: int, records: int) -> int:
        """Commit an epoch; return how many records were counted."""
        writer.commit(number, EpochContent(record_ages={4: records}), clock_ms=writer.clock_ms())
        return sum(followed.step()["record_delays"]["counts"])

    writer = followed.writer()
    writer.commit(0, EpochContent(record_ages={4: 7}), clock_ms=1)
    assert followed.step()["record_delays"] is None, "the epoch is older than the process"
    assert commit(1, 20) == 20
    writer.commit(2, clock_ms=writer.clock_ms())
    assert followed.step()["record_delays"]["counts"] == followed.known["record_delays"]["counts"]
    assert commit(3, 300) == 320
    followed.applier.delete_all_stores()
    followed.step()
    assert followed.known["applied"] == 3 and commit(4, 4000) == 4320, "a rebuilt store has the epochs again"
    writer.commit(5, EpochContent(record_ages={4: 7}), clock_ms=writer.clock_ms())
    followed.restart()
    assert followed.step()["record_delays"] is None and commit(6, 1) == 1


def test_store_is_not_copied_often_while_epochs_come(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_copies, "COMPACT_ABOVE_BYTES", 1 << 20)
    followed.restart()
    writer = followed.writer()

    def fill_and_empty() -> None:
        writer.publish([put(b"%d" % number, b"x" * 1000) for number in range(5000)])
        followed.step()
        writer.publish([Change("temp", Op.DELETE, b"%d" % number) for number in range(4990)])
        followed.step()

    fill_and_empty()
    assert followed.folders() == ["q1.1.1"]
    fill_and_empty()
    assert followed.folders() == ["q1.1.1"]
    followed.applier._copies._pause_ends_s = 0.0  # time has passed
    followed.step()
    assert followed.folders() == ["q1.1.2"]
    fill_and_empty()
    assert followed.folders() == ["q1.1.2"]
    followed.applier._idle_from_s = 0.0  # so has it since the last epoch
    followed.step()
    assert followed.folders() == ["q1.1.3"]


def test_uncopyable_store_is_kept_with_logged_reason(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = publish_large(followed, monkeypatch)
    store = followed.applier.store
    assert store is not None
    (store.path.parent / "copy").write_text("")  # in the way
    writer.publish([Change("temp", Op.DELETE, b"%d" % number) for number in range(4990)])
    followed.step()
    assert followed.folders() == ["q1.1.0"] and len(followed.values()) == 10
    (record,) = [record for record in caplog.records if "cannot be copied" in record.getMessage()]
    assert "MB of free pages" in record.getMessage() and "File exists" in record.getMessage()


def test_complete_mode_keeps_only_keys_of_last_epoch(followed: Followed) -> None:
    writer = followed.writer(TEMP, MODE)
    writer.publish([put(b"a"), put(b"b"), put_value("mode", b"other")], replaces=["temp"])
    writer.publish([put(b"b"), put(b"c")], replaces=["temp"])
    followed.step()
    assert set(followed.values()) == {b"b", b"c", b"other"}
    writer.publish([], replaces=["temp"])
    followed.step()
    assert set(followed.values()) == {b"other"}


def test_complete_mode_removes_unnamed_fields(followed: Followed) -> None:
    city = StateDescriptor("city", key="k", field="f", value="v")
    writer = followed.writer(city)
    for names in ((b"a", b"b"), (b"b", b"c"), tuple(b"%d" % n for n in range(packed_map.FIELDS_MAX + 5)), (b"7",)):
        writer.publish([Change("city", Op.PUT, b"k", name, b"v") for name in names], replaces=["city"])
        followed.step()
        store = followed.applier.store
        assert store is not None
        with store.snapshot(NOW_MS) as snapshot:
            assert dict(snapshot.map_pairs(b"k")) == dict.fromkeys(names, b"v")


def test_writer_is_alive_while_its_counter_moves() -> None:
    now_s = 100.0
    pulse = HeartbeatWatch(lambda: now_s)
    sign = {"writer": "w", "count": 5, "is_running": True}
    assert pulse.is_stale({})
    assert pulse.is_stale(sign)  # it may be as old as the log
    assert not pulse.is_stale(sign | {"count": 6})
    now_s += HEARTBEATS_MISSED_MAX
    assert not pulse.is_stale(sign | {"count": 6})
    now_s += 0.1
    assert pulse.is_stale(sign | {"count": 6})
    assert not pulse.is_stale(sign | {"count": 7})
    assert pulse.is_stale(sign | {"count": 8, "is_running": False})
    assert not pulse.is_stale({"writer": "next", "count": 1, "is_running": True})
    assert pulse.is_stale({})


def test_staleness_is_reported_when_it_changes(followed: Followed) -> None:
    writer = followed.writer()
    writer.publish([put(b"a")])
    reported = []
    for _ in range(3):
        writer.send_heartbeat()
        reported.append(followed.step()["is_stale"])
    writer.close()
    reported.append(followed.step()["is_stale"])
    assert reported == [True, False, False, True]


def test_applier_ends_with_its_input_after_step_in_hand(followed: Followed) -> None:
    followed.writer().publish([put(b"a")])
    reading, writing = os.pipe()
    os.write(writing, b"look\n")
    os.close(writing)
    follow_until_end(followed.applier, reading, 60.0)
    os.close(reading)
    assert followed.known["applied"] == 0


def test_step_records_events_of_epoch_that_was_committed_after_they_were_requested(followed: Followed) -> None:
    writer = followed.writer()
    writer.publish([put(b"a")])
    followed.step()
    reading, writing = os.pipe()
    os.write(writing, b"events on\n")
    os.close(writing)
    writer.publish([put(b"b")])
    follow_until_end(followed.applier, reading, 60.0)  # its first step is before it reads the input
    os.close(reading)
    assert followed.known["applied"] == 1
    assert followed.applier.store is not None
    with followed.applier.store.snapshot(NOW_MS) as snapshot:
        stored = snapshot.stored_event_batches()
        assert stored is not None
        batch = snapshot.events(stored.first)
        assert batch is not None and batch.epoch == 1
