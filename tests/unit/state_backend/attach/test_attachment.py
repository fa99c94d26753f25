"""What an attachment does where it cannot simply go on: gaps, checkpoints that were set back, other queries, kills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from compat.processes import killed_at_end
from compat.waiting import eventually
from state_backend.attach import partition_share
from state_backend.attach.key_lookup import look_up
from state_backend.attach.start import attach_files, bind
from state_backend.attach.states import AttachedState, without_window_ends
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.history.key_history import history_of
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.model.errors import CheckpointError, DescriptorError, LogError, UnsupportedStateError
from tests.golden_checkpoints import NEWEST
from tests.unit.state_backend.attach.following import (
    JOB,
    WAIT_S,
    GrowingCheckpoint,
    Shown,
    coalesced,
    described,
    epochs,
    following,
    generations,
    in_spark,
    values_in_log,
    without_json,
)

SEED = int(os.environ.get("SPARKIS_SEED") or 1)
PARTITIONS = "spark.sql.shuffle.partitions"
PROVIDER = "spark.sql.streaming.stateStore.providerClass"


def follow(growing: GrowingCheckpoint, log: Path, last: int) -> None:
    """Attach until a batch is in the log."""
    with following(growing.path, log) as attachment:
        assert attachment.wait(last, WAIT_S)


def shown_once_begun(log: Path) -> Shown:
    """Return what clients read; nothing while a generation has no epoch."""
    with suppress(LogError):
        return values_in_log(log)
    return {}


def commit(growing: GrowingCheckpoint, *batches: int) -> None:
    for batch in batches:
        growing.commit(batch)


def epoch(log: Path, number: int) -> Epoch:
    found = ChangeLog(str(log)).job(JOB)
    current = found.current()
    assert current is not None
    read = found.epoch(current, number)
    assert read is not None
    return read


def test_attachment_that_begins_late_reads_whole_state_in_one_epoch(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1, 2)
    follow(growing, log, 2)
    assert epochs(log) == [2]
    assert (epoch(log, 2).replaces, epoch(log, 2).origin) == (("aggregation",), 0)
    assert values_in_log(log) == in_spark(growing.path, 2)
    for key in values_in_log(log):
        assert [version.is_oldest for version in history_of(ChangeLog(str(log)).job(JOB), key, 10)] == [True]


def test_query_in_real_time_mode_is_attached_to_before_its_first_commit(log: Path, tmp_path: Path):
    growing = GrowingCheckpoint(NEWEST, "real-time-aggregation", tmp_path)
    settings = Checkpoint.at(str(growing.path)).offsets(0).settings
    written_later = ("offsets", "state/0/_metadata", "state/0/0/_metadata/schema")
    for each in written_later:
        (growing.path / each).rename(tmp_path / each.replace("/", "-"))
    with pytest.raises(CheckpointError, match="has no committed micro-batch after 0 s"):
        attach_files(str(growing.path), job=JOB, log=str(log), settings=settings)
    (tmp_path / "state-0-0-_metadata-schema").rename(growing.path / "state/0/0/_metadata/schema")
    with pytest.raises(CheckpointError, match="has no committed micro-batch after 0 s"):
        attach_files(str(growing.path), [AttachedState(operator=1)], job=JOB, log=str(log), settings=settings)
    with following(growing.path, log, [AttachedState(operator=0)], settings=settings) as attachment:
        assert (attachment.batch, epochs(log), attachment.states) == (-1, [], described(log).states)
        for each in written_later[:2]:
            (tmp_path / each.replace("/", "-")).rename(growing.path / each)
        commit(growing, 0)
        assert attachment.wait(0, WAIT_S)
    follow(growing, log, 0)
    assert (epochs(log), generations(log)) == ([0], 1)
    assert values_in_log(log) == in_spark(growing.path, 0)


@pytest.mark.parametrize("job", ["rocksdb-snapshots", "transform-format2", "format2-join"])
def test_large_state_is_read_by_several_processes(job: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partition_share, "PARALLEL_AFTER_S", 0.0)
    monkeypatch.setattr(partition_share.os, "cpu_count", lambda: 2)
    growing = GrowingCheckpoint(NEWEST, job, tmp_path)
    commit(growing, *growing.batches)
    with following(growing.path, log, coalesced(growing.path)) as attachment:
        assert attachment.wait(4, WAIT_S)
    assert (epochs(log), epoch(log, 4).origin, len(epoch(log, 4).inline)) == ([4], 0, 2)
    expected = in_spark(growing.path, 4)
    assert without_json(values_in_log(log), expected) == expected


def test_error_of_one_process_stops_epoch(growing: GrowingCheckpoint, log: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partition_share, "PARALLEL_AFTER_S", 0.0)
    monkeypatch.setattr(partition_share.os, "cpu_count", lambda: 2)
    commit(growing, 0, 1, 2)
    broken = growing.path / "state/0/1/2.delta"
    content = broken.read_bytes()
    broken.write_bytes(content[:-3])
    with following(growing.path, log) as attachment:
        eventually(lambda: attachment.failure, lambda failure: "1/2.delta cannot be read" in str(failure))
        assert epochs(log) == []
        broken.write_bytes(content)
        assert attachment.wait(2, WAIT_S)
    assert values_in_log(log) == in_spark(growing.path, 2)


def test_attachment_resumes_after_last_epoch_of_log(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1)
    follow(growing, log, 1)
    commit(growing, 2, 3, 4)
    follow(growing, log, 4)
    assert (epochs(log), generations(log)) == ([1, 2, 3, 4], 1)
    assert values_in_log(log) == in_spark(growing.path, 4)


def test_purged_batch_starts_new_generation_with_whole_state(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1)
    follow(growing, log, 1)
    commit(growing, 2, 3, 4)
    for batch in (0, 1, 2):
        growing.uncommit(batch)
    follow(growing, log, 4)
    assert (epochs(log), generations(log)) == ([4], 2)
    assert values_in_log(log) == in_spark(growing.path, 4)


def test_checkpoint_that_is_set_back_is_read_anew(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1, 2, 3)
    with following(growing.path, log) as attachment:
        assert attachment.wait(3, WAIT_S)
        for batch in (3, 2):
            growing.uncommit(batch)
        eventually(lambda: shown_once_begun(log), lambda found: found == in_spark(growing.path, 1))
        growing.plan_again(2)
        growing.commit(2)
        assert attachment.wait(2, WAIT_S)
        assert values_in_log(log) == in_spark(growing.path, 2)
    (growing.path / "commits/2").unlink()
    for batch in (2, 3, 4):
        growing.plan_again(batch, later_ms=2000)
    commit(growing, 2, 3, 4)  # further than the log is: only the batches' timestamps tell
    follow(growing, log, 4)
    assert epochs(log) == [4]
    assert values_in_log(log) == in_spark(growing.path, 4)


def test_another_query_at_path_replaces_state(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1)
    with following(growing.path, log, catch_up_timeout_s=0) as attachment:
        assert attachment.wait(1, WAIT_S)
        growing.rename_query("another")
        growing.commit(2)
        eventually(lambda: generations(log), lambda count: count == 2)
        assert attachment.wait(2, WAIT_S)
    assert epochs(log) in ([1, 2], [2])
    assert values_in_log(log) == in_spark(growing.path, 2)


def test_files_of_batch_without_commit_are_never_read(growing: GrowingCheckpoint, log: Path):
    deltas = sorted(growing.path.glob("state/0/*/5.delta"))
    right = {path: path.read_bytes() for path in deltas}
    commit(growing, 0, 1, 2, 3)
    with following(growing.path, log) as attachment:
        assert attachment.wait(3, WAIT_S)
        for path in deltas:  # as a batch left it that failed before its commit
            path.write_bytes((path.parent / "1.delta").read_bytes())
        assert values_in_log(log) == in_spark(growing.path, 3)
        for path, content in right.items():  # and as its second try wrote it
            path.write_bytes(content)
        growing.commit(4)
        assert attachment.wait(4, WAIT_S)
    assert values_in_log(log) == in_spark(growing.path, 4)


def test_batch_that_repartitions_state_is_read_whole(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1)
    with following(growing.path, log) as attachment:
        assert attachment.wait(1, WAIT_S)
        growing.plan_again(2, 0, **{PARTITIONS: "7"})
        growing.commit(2)
        assert attachment.wait(2, WAIT_S)
    assert (epochs(log), generations(log)) == ([1, 2], 1)
    assert epoch(log, 2).replaces == ("aggregation",)
    assert values_in_log(log) == in_spark(growing.path, 2)


def test_folders_of_other_partitions_remain_after_repartition(growing: GrowingCheckpoint, log: Path):
    shutil.copytree(growing.path / "state/0/1", growing.path / "state/0/2")
    for path in (growing.path / "state/0").glob("2/[3-9].delta"):
        path.unlink()  # Spark writes a partition that is no longer part of the state no more
    commit(growing, 0, 1)
    with following(growing.path, log) as attachment:
        assert attachment.wait(1, WAIT_S)
        commit(growing, 2, 3)
        assert attachment.wait(3, WAIT_S)
    assert (epochs(log), generations(log)) == ([1, 2, 3], 1)
    assert values_in_log(log) == in_spark(growing.path, 3)


def test_damaged_file_stops_state_until_whole(growing: GrowingCheckpoint, log: Path):
    commit(growing, 0, 1)
    broken = growing.path / "state/0/0/3.delta"
    content = broken.read_bytes()
    with following(growing.path, log) as attachment:
        assert attachment.wait(1, WAIT_S)
        broken.write_bytes(content[:-3])
        growing.commit(2)
        eventually(lambda: attachment.failure, lambda failure: "cannot be read" in str(failure))
        assert epochs(log) == [1]
        broken.write_bytes(content)
        assert attachment.wait(2, WAIT_S)
    assert values_in_log(log) == in_spark(growing.path, 2)


def test_changed_plan_is_refused_unless_it_may_replace_state(growing: GrowingCheckpoint, log: Path, tmp_path: Path):
    commit(growing, 0)
    growing.rename_query("same")
    follow(growing, log, 0)
    other = GrowingCheckpoint(NEWEST, "hdfs-whole-stream", tmp_path / "other")
    other.commit(0)
    other.rename_query("same")
    with pytest.raises(DescriptorError, match="the query's plan has changed"):
        attach_files(str(other.path), job=JOB, log=str(log))
    with following(other.path, log, on_mismatch="replace") as attachment:
        assert attachment.wait(0, WAIT_S)
    assert values_in_log(log) == in_spark(other.path, 0)


def test_unsupported_operator_is_refused_by_name(growing: GrowingCheckpoint, log: Path, tmp_path: Path):
    def refusal(kind: type[Exception], path: Path = growing.path, **options: str) -> str:
        with pytest.raises(kind) as raised:
            attach_files(str(path), **({"job": JOB, "log": str(log)} | options))
        return str(raised.value)

    assert "has no committed micro-batch" in refusal(CheckpointError)
    assert "is not the checkpoint of a query" in refusal(CheckpointError, tmp_path / "nothing")
    assert "is inside of the checkpoint" in refusal(DescriptorError, log=str(growing.path / "log"))
    growing.plan_again(0, 0, **{PROVIDER: "com.example.MyProvider"})
    growing.commit(0)
    assert "com.example.MyProvider" in refusal(UnsupportedStateError)
    growing.plan_again(0, 0)
    shutil.rmtree(growing.path / "state")
    assert "has no state that can be read" in refusal(DescriptorError)


FOLLOWER = """\
import sys, threading
from state_backend.attach.start import attach_files
attach_files(sys.argv[1], job="j", log=sys.argv[2])
print("attached", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("job", [pytest.param("transform", marks=pytest.mark.slow), "rocksdb-join"])
def test_killed_follower_leaves_each_batch_once(job: str, log: Path, tmp_path: Path):
    random = Random(SEED)
    growing = GrowingCheckpoint(NEWEST, job, tmp_path)
    growing.commit(0)
    for batch in growing.batches[1:]:
        command = [sys.executable, "-c", FOLLOWER, str(growing.path), str(log)]
        with killed_at_end(command, stdout=subprocess.PIPE) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline()
            growing.commit(batch)
            # From "not yet seen" to "in the log": a commit takes some milliseconds. A follower that begins the log may
            # begin with this batch or with the one before it.
            least = random.choice((-1, batch - 1, batch))
            eventually(lambda: epochs(log), lambda found, least=least: max(found, default=-1) >= least)
            follower.send_signal(signal.SIGKILL)
    with following(growing.path, log) as attachment:
        assert attachment.wait(growing.batches[-1], WAIT_S)
    assert epochs(log) == list(range(epochs(log)[0], growing.batches[-1] + 1))
    expected = in_spark(growing.path, growing.batches[-1])
    found = values_in_log(log)
    assert {key: len(value) for key, value in found.items()} == {key: len(value) for key, value in expected.items()}


def test_start_and_end_that_no_window_made_are_both_in_key(growing: GrowingCheckpoint, log: Path):
    schema = growing.path / "state/0/0/_metadata/schema"
    schema.write_bytes(schema.read_bytes().replace(b"spark.timeWindow", b"spark.timeWindov"))
    commit(growing, 0)
    follow(growing, log, 0)
    assert values_in_log(log) == {
        key.replace(b"10:00:00Z", b"10:00:00Z:2024-03-01T10:10:00Z"): value
        for key, value in in_spark(growing.path, 0).items()
    }
    assert look_up(Checkpoint.at(str(growing.path)), "2024-03-01T10:00:00Z:2024-03-01T10:10:00Z:left", None, 0, print)[
        1
    ]


def test_column_named_like_end_of_another_is_part_of_key():
    assert without_window_ends(["trip", "trip_end"], []) == ("trip", "trip_end")
    assert without_window_ends(["window", "window_end", "trip_end"], ["window"]) == ("window", "trip_end")


def test_readers_of_log_see_texts_in_place_of_nulls_in_keys(log: Path, tmp_path: Path):
    growing = GrowingCheckpoint(NEWEST, "hdfs-aggregation", tmp_path)
    commit(growing, *growing.batches)
    fails = [AttachedState(on_bad_key="fail")]
    with (
        pytest.raises(Exception, match="the key column 'word' is null"),
        following(growing.path, log, fails) as attachment,
    ):
        attachment.wait(timeout_s=WAIT_S)
    with following(growing.path, log, coalesced(growing.path)) as attachment:
        assert attachment.wait(timeout_s=WAIT_S)
    assert b"j:aggregation:none" in values_in_log(log)


def test_counted_null_in_key_does_not_end_attachment(log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    growing = GrowingCheckpoint(NEWEST, "hdfs-aggregation", tmp_path)
    commit(growing, *growing.batches)
    with following(growing.path, log) as attachment:
        assert attachment.wait(timeout_s=WAIT_S)
    job = ChangeLog(log).job("j")
    current = job.current()
    assert current is not None
    end = job.end(current)
    assert end is not None
    assert end.skipped_rows == 1
    (line,) = [each.message for each in caplog.records if "left out" in each.message]
    assert "'word' is null in 1 row" in line
    assert values_in_log(log)


def test_functions_without_name_stay_in_value_beside_those_with_one(growing: GrowingCheckpoint):
    commit(growing, 0)
    checkpoint = Checkpoint.at(str(growing.path))
    (all_of_them,) = bind(checkpoint, "j", [])
    (named,) = bind(checkpoint, "j", [AttachedState(columns={"n": "count(1)"})])
    assert "n" in named.descriptor.value
    assert len(named.descriptor.value) == len(all_of_them.descriptor.value)
    (computed,) = bind(checkpoint, "j", [AttachedState(columns={"n": "_0"})])
    assert computed.descriptor.value == ("n",)
