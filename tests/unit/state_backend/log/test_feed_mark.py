"""The ids of the change feed grow over clocks, restarts, rewinds, generations and dropped jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from state_backend.apply.rename import rename
from state_backend.log.change_log import ChangeLog
from state_backend.log.drop import drop
from state_backend.log.epochs import Epoch, EpochContent, to_stream
from state_backend.log.feed_mark import NO_ENTRY, FeedId, FeedMark
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor, check_states
from state_backend.model.errors import DescriptorError
from state_backend.model.records import Change, Op, runs_of

STATE = StateDescriptor("v", key="k", value="v")
CLOCK_MS = 1_700_000_000_000


def writer_of(root: Path, query: str = "first", job: str = "job") -> LogWriter:
    """Open a writer of the job that rewinds and takes over if it has to."""
    return LogWriter(root, job, [STATE], query, "truncate", sends_heartbeats=False, takeover=True)


def put(writer: LogWriter, *keys: str, epoch: int | None = None, clock_ms: int = CLOCK_MS) -> FeedMark:
    """Publish an epoch that puts some keys of the state; return its place in the feed."""
    changes = [Change("v", Op.PUT, f"{writer.job}:v:{key}".encode(), value=b"1") for key in keys]
    writer.publish(changes, epoch, clock_ms=clock_ms)
    assert writer.last is not None and writer.last.feed is not None
    return writer.last.feed


def test_each_epoch_has_later_millisecond_although_clock_stands_still_or_goes_back(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        assert put(writer, "a", "b") == FeedMark(CLOCK_MS, NO_ENTRY, 2, 2)
        assert put(writer, "a", clock_ms=5) == FeedMark(CLOCK_MS + 1, FeedId(CLOCK_MS, 2), 1, 3)
        assert put(writer) == FeedMark(CLOCK_MS + 2, FeedId(CLOCK_MS + 1, 1), 0, 3)
        assert put(writer, "a", clock_ms=CLOCK_MS + 50).after == FeedId(CLOCK_MS + 1, 1), "an empty epoch has no entry"


def test_mark_round_trips_and_older_epoch_has_none() -> None:
    mark = FeedMark(CLOCK_MS, FeedId(5, 6), 7, 8, "rewind")
    epoch = Epoch(1, 1, None, CLOCK_MS, feed=mark)
    assert Epoch.from_bytes(epoch.to_bytes(), "") == epoch
    older = Epoch(1, 1, None, CLOCK_MS)
    assert "feed" not in older.to_bytes().decode() and Epoch.from_bytes(older.to_bytes(), "") == older


def test_restart_of_same_query_continues_without_reset(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        put(writer, "a")
    with writer_of(tmp_path) as writer:
        assert put(writer, "a") == FeedMark(CLOCK_MS + 1, FeedId(CLOCK_MS, 1), 1, 2)


def test_rewind_keeps_marks_of_copied_epochs_and_resets_after_all_entries(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        marks = [put(writer, *keys) for keys in ("a", "ab", "abc")]
        assert put(writer, "x", epoch=1) == FeedMark(CLOCK_MS + 3, marks[2].end, 2, 3, "rewind")
        copied = writer.log.epoch(writer.current, 0)
        assert copied is not None and copied.feed == marks[0]
        assert put(writer, "x").reset is None


def test_entries_of_replaced_and_removed_generation_are_before_those_of_next(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        put(writer, "a")
        last = put(writer, "a")
    with writer_of(tmp_path, "second"):
        pass  # it ends before its first epoch
    with writer_of(tmp_path, "third") as writer:
        assert put(writer, "a") == FeedMark(CLOCK_MS + 2, last.end, 2, 2, "start")
    with writer_of(tmp_path, "third") as writer:
        assert put(writer, "a").reset is None


def test_dropped_job_begins_again_with_later_ids_and_reset(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        last = put(writer, "a")
    drop(tmp_path, "job", is_forced=True)
    with writer_of(tmp_path, "second") as writer:
        assert put(writer, "a", clock_ms=1) == FeedMark(CLOCK_MS + 1, last.end, 2, 2, "start")


def test_renamed_job_has_feed_of_its_own_that_begins_with_its_state(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        put(writer, "a", "b")
    rename(tmp_path, "job", "other")
    log = ChangeLog(tmp_path).job("other")
    current = log.current()
    assert current is not None
    first = log.first(current)
    assert first is not None and first.feed == FeedMark(CLOCK_MS, NO_ENTRY, 3, 3)


def test_changes_of_own_states_and_removed_states_count_as_feed_lists_them(tmp_path: Path) -> None:
    progress = StateDescriptor("_progress", key_format="job:_progress", field="f", value="v")
    change = Change("_progress", Op.PUT, b"job:_progress", b"f", b"1")
    with LogWriter(tmp_path, "job", [STATE, progress], sends_heartbeats=False) as writer:
        mine = to_stream(list(runs_of([Change("v", Op.PUT, b"job:v:a", value=b"1")], ["v"])))
        own = to_stream(list(runs_of([change], ["_progress"])))
        writer.commit(0, EpochContent(inline=[mine, own], rows=1, replaces=("v", "_progress")), clock_ms=CLOCK_MS)
        assert writer.last is not None and writer.last.feed == FeedMark(CLOCK_MS, NO_ENTRY, 2, 2)


def test_damaged_generation_can_be_replaced_and_later_ids_are_clocks(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        put(writer, "a")
        path = tmp_path / "job" / writer.generation / "epochs" / "0.json"
    path.write_text("{}")
    with writer_of(tmp_path, "second") as writer:
        assert put(writer, "a", clock_ms=1).feed_ms > CLOCK_MS


def test_older_terms_have_no_entry_before_them(tmp_path: Path) -> None:
    with writer_of(tmp_path) as writer:
        put(writer, "a")
    assert "feed_after" not in json.loads((tmp_path / "job" / "terms" / "1.json").read_text())


@pytest.mark.parametrize(
    "state",
    [
        StateDescriptor("_changes", key="k", value="v"),
        StateDescriptor("v", key_format="job:_changes", field="k", value="v"),
        StateDescriptor("v", key_format="job:_changes:<k>", value="v"),
    ],
)
def test_states_with_keys_of_feed_are_refused(state: StateDescriptor) -> None:
    with pytest.raises(DescriptorError, match="change feed"):
        check_states("job", [state])
    check_states("other", [StateDescriptor("v", key_format="job:_changes:<k>", value="v")])
