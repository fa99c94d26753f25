"""A log has one writer at a time, and its chain of epochs is whole, whatever happens to the writer."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from state_backend.log import log_writer
from state_backend.log.change_log import ChangeLog, JobLog, check_writable
from state_backend.log.epochs import Epoch, EpochContent, EpochRef, to_stream
from state_backend.log.filesystems import Filesystem, LocalFilesystem
from state_backend.log.filesystems.arrow import ArrowFilesystem
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import Reduce, StateDescriptor
from state_backend.model.errors import (
    DescriptorError,
    EpochHoleError,
    FencedWriterError,
    LogCorruptError,
    LogUnavailableError,
    RewoundCheckpointError,
)
from state_backend.model.records import Change, Op, changes_in, runs_of
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import slot_of
from tests.builders import current_of, put_value
from tests.unit.state_backend.dying import Died, Dying
from tests.unit.state_backend.log.moves_like_hdfs import like_hdfs

TEMP = StateDescriptor("temp", key="k", value="v")
CITY = StateDescriptor("city", key="k", field="f", value="v")


put = partial(put_value, "temp")


def writer_of(root: Path | Filesystem, states: tuple[StateDescriptor, ...] = (TEMP,), **more: Any) -> LogWriter:
    """Return a writer whose heartbeats are the test's, so that no thread takes part in simulated deaths."""
    options = {"sends_heartbeats": False, "takeover": True} | more
    return LogWriter(root, "job", states, options.pop("query_id", "q1"), **options)


def chain(root: Path | Filesystem) -> list[Epoch]:
    """Return the epochs as a reader walks them."""
    log, current = current_of(root)
    last = log.newest(current)
    if last is None:
        return []
    epochs = [log.epoch(current, number) for number in range(log.numbers(current.generation)[0], last.epoch + 1)]
    whole = [epoch for epoch in epochs if epoch is not None]
    assert len(whole) == len(epochs)
    assert [epoch.previous for epoch in whole] == [None, *(epoch.ref for epoch in whole[:-1])]
    return whole


def contents(root: Path | Filesystem) -> list[list[Change]]:
    log, current = current_of(root)
    return [[c for run in log.runs(current.generation, epoch) for c in changes_in(run)] for epoch in chain(root)]


def epoch_file(root: Path, number: int, generation: str = "q1.1") -> Path:
    return root / "job" / generation / "epochs" / f"{number}.json"


# Writing and reading ------------------------------------------------------------------------------------------------


def test_epochs_are_read_back_as_they_were_published(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    assert [writer.publish([put(b"a")]), writer.publish([]), writer.publish([put(b"b"), put(b"b", b"2")])] == [0, 1, 2]
    assert contents(tmp_path) == [[put(b"a")], [], [put(b"b"), put(b"b", b"2")]]
    assert [epoch.rows for epoch in chain(tmp_path)] == [1, 0, 2]


def test_log_on_hdfs_is_read_as_it_was_written(tmp_path: Path) -> None:
    filesystem = ArrowFilesystem(like_hdfs(), str(tmp_path), "hdfs://like")
    writer = writer_of(filesystem)
    writer.publish([put(b"a")])
    writer.publish([put(b"b", b"x" * 200_000)])
    assert contents(filesystem) == [[put(b"a")], [put(b"b", b"x" * 200_000)]]
    assert ChangeLog(filesystem).jobs() == ["job"]


def test_small_epoch_is_one_file_and_large_one_has_change_file(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.publish([put(b"a")])
    writer.publish([put(b"%d" % number, b"x" * 1000) for number in range(1000)])
    small, large = chain(tmp_path)
    assert (len(small.files), len(small.inline)) == (0, 1)
    assert (len(large.files), len(large.inline)) == (1, 0)
    (file,) = large.files
    assert (file.rows, sum(rows for _, _, rows in file.runs)) == (1000, 1000)
    stored = tmp_path / "job" / "q1.1" / "changes" / file.name
    assert stored.stat().st_size == file.size
    assert len(contents(tmp_path)[1]) == 1000


def test_change_file_is_named_after_its_epoch(tmp_path: Path) -> None:
    file, _ = writer_of(tmp_path).change_files(7).write(runs_of([put(b"a", b"x" * 100_000)], ["temp"]))
    assert file is not None
    assert file.name.startswith("7-")


@pytest.mark.parametrize(
    ("state", "lowest"),
    [
        (TEMP, 1),
        (StateDescriptor("temp", key="k", value="v", reduce=Reduce.LAST, order_by="t"), 1),
        (StateDescriptor("temp", key="k", value="v", reduce=Reduce.MAX, columns={"v": "bigint"}), 2),
        (StateDescriptor("temp", key="k", member="m"), 3),
        (StateDescriptor("temp", key="k", value="v", last_by="t"), 4),
    ],
)
def test_epoch_has_lowest_sufficient_format(tmp_path: Path, state: StateDescriptor, lowest: int) -> None:
    writer_of(tmp_path, (state,)).publish([])
    assert [epoch.format for epoch in chain(tmp_path)] == [lowest]


def test_each_epoch_has_bytes_of_all_changes_so_far(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.publish([put(b"a")])
    writer.publish([put(b"a", b"x" * 100_000)])
    first, second = chain(tmp_path)
    assert first.log_bytes == first.change_bytes > 0
    assert second.log_bytes == first.change_bytes + second.change_bytes


def test_clock_of_job_never_goes_back(tmp_path: Path) -> None:
    far_ms = 1 << 50
    writer = writer_of(tmp_path)
    writer.publish([], clock_ms=far_ms)
    assert writer.clock_ms() == far_ms
    writer.publish([], clock_ms=1)
    assert [epoch.clock_ms for epoch in chain(tmp_path)] == [far_ms, far_ms]


def test_task_without_rows_writes_nothing(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    empty = next(runs_of([put(b"a")], ["temp"])).slice(0, 0)
    assert writer.change_files(0).write([]) == (None, None)
    assert writer.change_files(0).write([empty]) == (None, None)
    assert list((tmp_path / "job" / "q1.1" / "changes").iterdir()) == []


def test_keys_and_values_of_any_size_go_through(tmp_path: Path) -> None:
    given = [put(b""), put(b"k" * 65536), put(b"\xff\xfe\x00"), put(b"big", b"\x01" * (20 << 20))]
    writer_of(tmp_path).publish(given)
    (found,) = contents(tmp_path)
    assert sorted(found) == sorted(given)


def epoch_of_runs(root: Path, files: Sequence[Sequence[str]], inline: Sequence[Sequence[str]]) -> tuple[JobLog, Epoch]:
    """Commit an epoch of files and inline streams, each a list of runs, each a text of keys of one letter."""
    writer = writer_of(root)

    def runs(texts: Sequence[str]) -> list[pa.RecordBatch]:
        return [run for keys in texts for run in runs_of([put(key.encode()) for key in keys], ["temp"])]

    written = [writer.change_files(0).write_file(runs(texts)) for texts in files]
    writer.commit(0, EpochContent(files=written, inline=[to_stream(runs(texts)) for texts in inline]), clock_ms=1)
    (epoch,) = chain(root)
    return writer.log, epoch


def found_of(key: str, log: JobLog, epoch: Epoch, done: int = 0) -> list[int]:
    """Return the numbers of the runs that have rows of a key's slot, read as after the first `done` runs."""
    slot = slot_of(key.encode())
    found = list(log.runs_of_slots(log.changes_folder("q1.1"), epoch, SlotSet.of([(slot, slot)]), done))
    assert {change.key for _, run in found for change in changes_in(run)} <= {key.encode()}
    return [number for number, _ in found]


def test_runs_are_numbered_through_files_and_inline_streams(tmp_path: Path) -> None:
    log, epoch = epoch_of_runs(tmp_path, [["a", "b"], ["c"], ["ac", "a"]], [["b", "abc"], ["c"], ["a"]])
    for key, numbers in (("a", [1, 4, 5, 7, 9]), ("b", [2, 6, 7]), ("c", [3, 4, 7, 8])):
        for done in range(10):
            assert found_of(key, log, epoch, done) == [number for number in numbers if number > done]


def test_run_around_slot_without_rows_of_it_is_left_out(tmp_path: Path) -> None:
    log, epoch = epoch_of_runs(tmp_path, [["ab", "c"]], [["ab"]])
    ((first, last, _), _) = epoch.files[0].runs
    assert first < slot_of(b"c") < last
    assert found_of("c", log, epoch) == [2]


def test_file_is_opened_only_for_unfinished_slots(tmp_path: Path) -> None:
    log, epoch = epoch_of_runs(tmp_path, [["b", "a"], ["b"], ["a"]], [])
    for file in epoch.files[:2]:
        (tmp_path / log.changes_folder("q1.1") / file.name).unlink()
    assert found_of("a", log, epoch, done=2) == [4]
    with pytest.raises(LogCorruptError, match=f"{epoch.files[0].name}.*missing"):
        found_of("a", log, epoch, done=1)


def test_file_with_other_runs_than_its_epoch_lists_is_named(tmp_path: Path) -> None:
    log, epoch = epoch_of_runs(tmp_path, [["a", "b"]], [])
    (file,) = epoch.files
    damaged = replace(epoch, files=(replace(file, runs=file.runs[:1]),))
    with pytest.raises(LogCorruptError, match=f"{file.name} has 2 runs, and epoch 0 lists 1 of it; restore the log"):
        found_of("a", log, damaged)


def test_changes_of_many_tasks_are_folded_into_change_file(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    streams = [to_stream(list(runs_of([put(b"%d" % n, b"x" * 4000)], ["temp"]))) for n in range(400)]
    writer.commit(0, EpochContent(inline=streams, rows=400), clock_ms=1)
    (epoch,) = chain(tmp_path)
    assert (len(epoch.files), len(epoch.inline)) == (1, 0)
    assert sorted(contents(tmp_path)[0]) == sorted(put(b"%d" % n, b"x" * 4000) for n in range(400))


def test_many_tiny_tasks_lose_nothing_when_they_are_folded(tmp_path: Path) -> None:
    """Each stream is mostly its own overhead: together too much for the epoch, and yet no change file's worth."""
    writer = writer_of(tmp_path)
    stream = to_stream(list(runs_of([put(b"0")], ["temp"])))
    count = log_writer.EPOCH_INLINE_BYTES_MAX // len(stream) + 1
    streams = [to_stream(list(runs_of([put(b"%d" % n)], ["temp"]))) for n in range(count)]
    writer.commit(0, EpochContent(inline=streams, rows=count), clock_ms=1)
    assert sorted(contents(tmp_path)[0]) == sorted(put(b"%d" % n) for n in range(count))


def test_tasks_of_different_states_are_folded_into_one_file(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, (TEMP, CITY))
    city = Change("city", Op.PUT, b"c", b"f", b"y" * 600_000)
    streams = [
        to_stream(list(runs_of([put(b"t", b"x" * 600_000)], ["temp"]))),
        to_stream(list(runs_of([city], ["city"]))),
    ]
    writer.commit(0, EpochContent(inline=streams, rows=2), clock_ms=1)
    assert contents(tmp_path) == [[put(b"t", b"x" * 600_000), city]]


def test_change_of_undeclared_state_is_refused_by_name(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    with pytest.raises(DescriptorError, match="'nope'"):
        writer.publish([Change("nope", Op.PUT, b"k", None, b"v")])
    with pytest.raises(DescriptorError, match="'nope'"):
        writer.publish([], replaces=["nope"])
    assert chain(tmp_path) == []


def test_read_only_log_can_be_read(tmp_path: Path) -> None:
    class ReadOnlyFilesystem(LocalFilesystem):
        def create(self, path: str, content: bytes) -> bool:
            raise AssertionError("a reader writes")

        def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
            raise AssertionError("a reader writes")

        def make_folder(self, path: str) -> None:
            raise AssertionError("a reader writes")

    writer_of(tmp_path).publish([put(b"a")])
    assert contents(ReadOnlyFilesystem(tmp_path)) == [[put(b"a")]]


def test_unusable_root_is_clear_error_before_any_work(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_bytes(b"")
    with pytest.raises(LogUnavailableError, match=str(root)):
        writer_of(root)
    with pytest.raises(LogUnavailableError, match=str(root)):
        check_writable(root)


def test_empty_root_has_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert ChangeLog(tmp_path).jobs() == []
    assert ChangeLog(tmp_path / "nothing").jobs() == []
    assert ChangeLog(tmp_path).job("job").current() is None


# Writers ------------------------------------------------------------------------------------------------------------


def test_each_writer_takes_next_term_and_continues_with_chain(tmp_path: Path) -> None:
    for number in range(3):
        writer = writer_of(tmp_path)
        assert writer.publish([put(b"%d" % number)]) == number
    assert [epoch.ref for epoch in chain(tmp_path)] == [EpochRef(0, 1), EpochRef(1, 2), EpochRef(2, 3)]


def test_new_query_id_is_new_generation_with_chain_of_its_own(tmp_path: Path) -> None:
    writer_of(tmp_path).publish([put(b"a")])
    writer = writer_of(tmp_path, query_id="q2")
    assert writer.last is None
    writer.publish([put(b"b")])
    assert contents(tmp_path) == [[put(b"b")]]
    assert writer.current.term == 2


def test_writer_without_query_id_continues_generation(tmp_path: Path) -> None:
    LogWriter(tmp_path, "job", [TEMP]).publish([put(b"a")])
    assert LogWriter(tmp_path, "job", [TEMP]).publish([put(b"b")]) == 1


def test_older_of_two_writers_is_fenced(tmp_path: Path) -> None:
    older = writer_of(tmp_path)
    older.publish([put(b"a")])
    newer = writer_of(tmp_path)
    with pytest.raises(FencedWriterError, match="query q1, term 2"):
        older.publish([put(b"lost")])
    newer.publish([put(b"b")])
    with pytest.raises(FencedWriterError):
        older.publish([put(b"lost")])
    assert contents(tmp_path) == [[put(b"a")], [put(b"b")]]


def test_writer_of_another_query_fences_as_well(tmp_path: Path) -> None:
    older = writer_of(tmp_path)
    writer_of(tmp_path, query_id="q2")
    with pytest.raises(FencedWriterError, match="query q2"):
        older.publish([put(b"lost")])


def test_one_of_two_racing_writers_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = writer_of(tmp_path)
    newer = writer_of(tmp_path)
    with monkeypatch.context() as patched:
        looks = iter((lambda: None, older.check_in_charge))  # the first was just before the newer one came
        patched.setattr(older, "check_in_charge", lambda: next(looks)())
        with pytest.raises(FencedWriterError):
            older.publish([put(b"a", b"older")])
    with pytest.raises(LogUnavailableError, match="start the query again"):
        newer.publish([put(b"a", b"newer")])
    assert contents(tmp_path) == [[put(b"a", b"older")]]
    assert writer_of(tmp_path).publish([put(b"b")]) == 1


def test_heartbeat_changes_and_ends(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    log = ChangeLog(tmp_path).job("job")
    assert log.heartbeat() == {}
    writer.send_heartbeat()
    first = log.heartbeat()
    writer.send_heartbeat()
    assert (first["is_running"], log.heartbeat()["count"] - first["count"]) == (True, 1)
    writer.close()
    assert log.heartbeat()["is_running"] is False
    (tmp_path / "job" / "heartbeats" / "1.json").write_bytes(b'{"half')
    assert log.heartbeat() == {}


def test_early_heartbeat_is_not_written(tmp_path: Path) -> None:
    class Costly(LocalFilesystem):
        heartbeat_interval_s = 3600.0

    writer = writer_of(Costly(tmp_path))
    assert [writer.send_heartbeat(), writer.send_heartbeat()] == [True, True]
    assert writer.log.heartbeat()["count"] == 1
    writer.close()
    assert (writer.log.heartbeat()["count"], writer.log.heartbeat()["is_running"]) == (2, False)


def test_job_with_epochs_of_its_query_continues_independent_of_other_jobs(tmp_path: Path) -> None:
    first = writer_of(tmp_path)
    first.publish([])
    LogWriter(tmp_path, "other", [TEMP], "q1", siblings=[first.current.writer]).publish([])
    assert writer_of(tmp_path).publish([]) == 1


# Replays, rewinds, holes --------------------------------------------------------------------------------------------


def test_replay_of_last_epoch_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer_of(tmp_path).publish([put(b"a"), put(b"b")])
    again = writer_of(tmp_path)
    assert again.publish([put(b"b"), put(b"a")], epoch=0, clock_ms=99) == 0
    assert again.commit(0, EpochContent(rows=2, digest=again.last.digest if again.last else -1), clock_ms=1) is False
    assert len(chain(tmp_path)) == 1
    assert caplog.records == []
    assert again.publish([put(b"c")], epoch=1) == 1


def test_commit_without_rows_is_same_epoch_as_no_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer_of(tmp_path).commit(0, clock_ms=1)
    assert writer_of(tmp_path).publish([], epoch=0) == 0
    assert caplog.records == []


def test_late_log_is_warned_of_by_each_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = writer_of(tmp_path)
    writer.publish([], epoch=5)
    assert len(caplog.records) == 1
    writer.publish([])
    assert [record.getMessage().count("begins at epoch 5 of its query") for record in caplog.records] == [1]
    writer_of(tmp_path)
    assert [record.getMessage().count("begins at epoch 5 of its query") for record in caplog.records] == [1, 1]


def test_different_replay_is_warned_of_and_first_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer_of(tmp_path).publish([put(b"a")])
    with caplog.at_level(logging.WARNING):
        writer_of(tmp_path).publish([put(b"a", b"other")], epoch=0)
    assert "not deterministic" in caplog.text
    assert contents(tmp_path) == [[put(b"a")]]


def test_rewound_checkpoint_is_refused_with_remedy(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    for _ in range(3):
        writer.publish([])
    with pytest.raises(RewoundCheckpointError, match=r"ends at epoch 2: .*on_rewind='truncate'"):
        writer.publish([], epoch=1)
    assert writer.publish([]) == 3


def test_requested_rewind_ends_chain_before_it(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, on_rewind="truncate")
    for number in range(5):
        writer.publish([put(b"%d" % number)])
    writer.publish([put(b"again")], epoch=2)
    assert contents(tmp_path) == [[put(b"0")], [put(b"1")], [put(b"again")]]
    assert chain(tmp_path)[2].term == 2
    assert writer_of(tmp_path).publish([put(b"on")]) == 3


def test_rewind_to_before_first_epoch_leaves_empty_chain(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, on_rewind="truncate")
    writer.publish([put(b"a")], epoch=5)
    writer.publish([put(b"b")], epoch=3)
    assert contents(tmp_path) == [[put(b"b")]]


def test_late_log_with_whole_state_is_complete_and_may_begin_anew(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, on_rewind="truncate")
    writer.publish([put(b"a")], epoch=5, replaces=["temp"])
    writer.publish([put(b"b")])
    assert [epoch.origin for epoch in chain(tmp_path)] == [0, 0]
    writer.publish([put(b"c")], epoch=5, replaces=["temp"])
    assert contents(tmp_path) == [[put(b"c")]]


def test_description_names_source_of_states(tmp_path: Path) -> None:
    source = {"states": {"temp": {"operator": "dedupe"}}}
    writer_of(tmp_path, source=source)
    described = ChangeLog(tmp_path).job("job").description("q1.1")
    assert (described.source, described.version) == (source, 1)


def test_crash_in_rewind_leaves_old_or_new_chain(tmp_path: Path) -> None:
    whole = [[put(b"%d" % number, b"x" * 100_000)] for number in range(6)]
    for allowed in range(100):
        root = tmp_path / str(allowed)
        writer = writer_of(root)
        for changes in whole:
            writer.publish(changes)
        dying = Dying(root)
        late = writer_of(dying, on_rewind="truncate")
        dying.left = allowed
        try:
            late.publish([put(b"two")], epoch=2)
            break
        except Died:
            pass
        assert contents(root) in (whole, whole[:2])
        again = writer_of(root, on_rewind="truncate")
        assert again.publish([put(b"two")], epoch=2) == 2
        assert contents(root) == [*whole[:2], [put(b"two")]]
    assert 5 < allowed < 100


def test_rewind_begins_another_generation_and_its_tasks_write_there(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, on_rewind="truncate")
    for number in range(4):
        writer.publish([put(b"%d" % number, b"x" * 100_000)])
    before = writer.folder
    writer.start(2)
    assert writer.folder != before
    file, _ = writer.change_files(2).write(runs_of([put(b"two", b"y" * 100_000)], ["temp"]))
    assert file is not None
    assert writer.commit(2, EpochContent(files=[file], rows=1), clock_ms=1)
    assert [changes[0].key for changes in contents(tmp_path)] == [b"0", b"1", b"two"]
    assert len(ChangeLog(tmp_path).job("job").numbers("q1.1")) == 4


def test_epoch_without_its_change_file_is_not_committed(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    file, _ = writer.change_files(0).write(runs_of([put(b"a", b"x" * 100_000)], ["temp"]))
    assert file is not None
    stored = tmp_path / "job" / "q1.1" / "changes" / file.name
    content = stored.read_bytes()
    for damage, reason in ((content[:-1], "bytes"), (None, "is missing")):
        stored.write_bytes(damage) if damage else stored.unlink()
        with pytest.raises(LogUnavailableError, match=f"{file.name}.*{reason}.*start the query again"):
            writer.commit(0, EpochContent(files=[file], rows=1), clock_ms=1)
    assert chain(tmp_path) == []


def test_returning_query_continues_from_copy_of_its_state(tmp_path: Path) -> None:
    for number in range(3):
        writer_of(tmp_path).publish([put(b"%d" % number, b"x" * 100_000)])
    writer_of(tmp_path, query_id="q2").publish([put(b"other")])
    assert contents(tmp_path) == [[put(b"other")]]
    back = writer_of(tmp_path)
    assert (back.generation, back.publish([put(b"3")])) == ("q1.5", 3)
    assert [changes[0].key for changes in contents(tmp_path)] == [b"0", b"1", b"2", b"3"]


def test_writer_that_starts_empty_begins_generation(tmp_path: Path) -> None:
    writer_of(tmp_path).publish([put(b"a")])
    assert writer_of(tmp_path, starts_empty=True).publish([put(b"b")]) == 0
    assert contents(tmp_path) == [[put(b"b")]]
    assert writer_of(tmp_path).publish([put(b"c")]) == 1


def test_hole_is_not_committed(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.publish([])
    with pytest.raises(EpochHoleError, match="epoch 2 does not follow 0"):
        writer.publish([], epoch=2)


def test_hole_in_files_is_named(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    for _ in range(5):
        writer.publish([])
    epoch_file(tmp_path, 2).unlink()
    log = ChangeLog(tmp_path).job("job")
    with pytest.raises(EpochHoleError, match=r"\[2\]"):
        log.newest(writer.current)
    with pytest.raises(EpochHoleError, match=r"\[2\]"):
        writer_of(tmp_path)


def test_epochs_collected_during_listing_are_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing may show a file that was removed before another one that it does not show any more."""
    writer = writer_of(tmp_path)
    for _ in range(5):
        writer.publish([])
    names = LocalFilesystem.names
    swept: list[int] = []

    def names_while_they_go(self: LocalFilesystem, path: str) -> list[str]:
        there = names(self, path)
        if path.endswith("epochs") and len(swept) < 2:
            first = len(swept) * 2
            swept.append(first)
            self.create(f"job/q1.1/floor/{first + 2}", b"")
            for number in (first, first + 1):
                epoch_file(tmp_path, number).unlink()
            there.remove(f"{first + 1}.json")
        return there

    monkeypatch.setattr(LocalFilesystem, "names", names_while_they_go)
    newest = ChangeLog(tmp_path).job("job").newest(writer.current)
    assert newest is not None
    assert newest.epoch == 4


def test_first_epoch_of_log_may_be_any(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    assert writer.publish([put(b"a")], epoch=41) == 41
    assert writer.publish([]) == 42
    assert len(chain(tmp_path)) == 2


# States -------------------------------------------------------------------------------------------------------------


def test_same_states_again_keep_description(tmp_path: Path) -> None:
    writer_of(tmp_path).publish([])
    writer_of(tmp_path).publish([])
    assert ChangeLog(tmp_path).job("job").description("q1.1").version == 1


def test_state_may_be_added(tmp_path: Path) -> None:
    writer_of(tmp_path).publish([])
    writer_of(tmp_path, (TEMP, CITY)).publish([])
    description = ChangeLog(tmp_path).job("job").description("q1.1")
    assert (description.version, [state.name for state in description.states]) == (2, ["temp", "city"])
    assert [epoch.description for epoch in chain(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "changed", [StateDescriptor("temp", "k", "v", field="f"), StateDescriptor("temp", "other", "v")]
)
def test_state_may_not_change_its_kind_or_its_keys(tmp_path: Path, changed: StateDescriptor) -> None:
    writer_of(tmp_path).publish([])
    with pytest.raises(DescriptorError, match="'temp'"):
        writer_of(tmp_path, (changed,))
    writer_of(tmp_path, query_id="q2", states=(changed,)).publish([])


def test_dropped_state_is_emptied_by_next_epoch_and_stays_known(tmp_path: Path) -> None:
    writer_of(tmp_path, (TEMP, CITY)).publish([put(b"a")])
    writer = writer_of(tmp_path, (CITY,))
    writer.publish([])
    writer.publish([])
    assert [epoch.replaces for epoch in chain(tmp_path)] == [(), ("temp",), ()]
    description = ChangeLog(tmp_path).job("job").description("q1.1")
    assert [state.name for state in description.all_states] == ["city", "temp"]
    with pytest.raises(DescriptorError, match="'temp'"):
        writer_of(tmp_path, (CITY, StateDescriptor("temp", "k", "v", field="f")))


def test_dropped_state_is_emptied_after_early_crash(tmp_path: Path) -> None:
    writer_of(tmp_path, (TEMP, CITY)).publish([])
    writer_of(tmp_path, (CITY,))
    writer_of(tmp_path, (CITY,)).publish([])
    assert chain(tmp_path)[1].replaces == ("temp",)


# Damage -------------------------------------------------------------------------------------------------------------


def large_epoch(root: Path) -> tuple[JobLog, Epoch, Path]:
    writer = writer_of(root)
    writer.publish([put(b"%d" % number, b"x" * 1000) for number in range(1000)])
    (epoch,) = chain(root)
    return writer.log, epoch, root / "job" / "q1.1" / "changes" / epoch.files[0].name


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_truncated_change_file_is_named(tmp_path: Path, kept: int) -> None:
    log, epoch, file = large_epoch(tmp_path)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(LogCorruptError, match=f"{file.name}.*bytes instead of"):
        list(log.runs("q1.1", epoch))


def test_missing_or_changed_change_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    log, epoch, file = large_epoch(tmp_path)
    *content, last = file.read_bytes()
    file.write_bytes(bytes([*content, last ^ 1]))
    with pytest.raises(LogCorruptError, match=f"{file.name}.*checksum"):
        next(log.runs("q1.1", epoch))
    file.unlink()
    with pytest.raises(LogCorruptError, match=f"{file.name}.*missing"):
        next(log.runs("q1.1", epoch))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"generation": "q1"}', "null"])
def test_damaged_term_or_claim_is_named(tmp_path: Path, content: str) -> None:
    writer = writer_of(tmp_path)
    writer.publish([])
    (tmp_path / "job" / "terms" / "1.json").write_text(content)
    with pytest.raises(LogCorruptError, match=r"job/terms/1\.json"):
        ChangeLog(tmp_path).job("job").current()
    (tmp_path / "job" / "terms" / "1.claim").write_text(content)
    with pytest.raises(LogCorruptError, match=r"job/terms/1\.claim"):
        writer.publish([])


def test_generation_without_term_is_named(tmp_path: Path) -> None:
    writer_of(tmp_path).publish([])
    with pytest.raises(LogCorruptError, match=r"no term .* begins generation q1\.7"):
        ChangeLog(tmp_path).job("job").description("q1.7")


def test_unlisted_change_file_is_invisible_to_readers(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    file, _ = writer.change_files(0).write(runs_of([put(b"lost", b"x" * 100_000)], ["temp"]))
    assert file is not None
    writer.publish([put(b"a")])
    assert contents(tmp_path) == [[put(b"a")]]


def test_failed_task_leaves_no_change_file(tmp_path: Path) -> None:
    def runs() -> Any:
        yield from runs_of([put(b"a", b"x" * 100_000)], ["temp"])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer_of(tmp_path).change_files(0).write(runs())
    assert list((tmp_path / "job" / "q1.1" / "changes").iterdir()) == []


def test_new_jobs_begin_in_root_and_in_empty_folders(tmp_path: Path) -> None:
    class Guarded(LocalFilesystem):
        def names(self, path: str) -> list[str]:
            if path == "lost+found":
                raise LogUnavailableError("Permission denied")
            return super().names(path)

    writer_of(tmp_path)
    for folder in ("empty", "begins/terms", "of-others/offsets", "lost+found", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
    log = ChangeLog(Guarded(tmp_path))
    found = log.folders_of_new_jobs(["job"])
    assert sorted(found) == [str(tmp_path), *(str(tmp_path / name) for name in ("begins/terms", "empty"))]
    elsewhere = ArrowFilesystem(like_hdfs(), str(tmp_path), "hdfs://like")
    assert ChangeLog(elsewhere).folders_of_new_jobs([]) == []


def test_files_are_readable_arrow_and_json(tmp_path: Path) -> None:
    _, epoch, file = large_epoch(tmp_path)
    assert pa.ipc.open_file(str(file)).read_all().num_rows == 1000
    assert json.loads(epoch_file(tmp_path, 0).read_text())["rows"] == epoch.rows == 1000
