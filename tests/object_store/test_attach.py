"""A checkpoint in a bucket, followed through commits, lost answers, purges and set-backs; and what that costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from compat.object_store.faulty_proxy import FaultyProxy
from compat.waiting import eventually
from state_backend.attach import attachment
from state_backend.attach.attachment import CHECKS_PER_LISTING_REMOTE
from state_backend.checkpoint.discovery import FoundQuery, has_commit, queries_below
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.log.filesystems import Filesystem, open_filesystem
from tests.golden_checkpoints import NEWEST, unpack
from tests.object_store.logs import methods
from tests.unit.state_backend.attach.following import (
    WAIT_S,
    coalesced,
    epochs,
    following,
    generations,
    in_spark,
    values_in_log,
)

PARTITIONS = 2


class Bucket:
    """A golden checkpoint that a query writes into a bucket: its state files are there before their commits."""

    def __init__(self, job: str, local: Path, folder: str) -> None:
        self.local = unpack(NEWEST, job, local / "checkpoint")
        self.address = f"{folder}/checkpoint"
        self._filesystem: Filesystem = open_filesystem(self.address)
        for path in self.local.rglob("*"):
            name = str(path.relative_to(self.local))
            if path.is_file() and not name.startswith("commits/"):
                self.put(name)

    def put(self, name: str) -> None:
        self._filesystem.replace(name, (self.local / name).read_bytes())

    def copy_to(self, address: str) -> None:
        """Write the whole checkpoint to another address, with all commits."""
        filesystem = open_filesystem(address)
        for path in self.local.rglob("*"):
            if path.is_file():
                filesystem.replace(str(path.relative_to(self.local)), path.read_bytes())

    def commit(self, batch: int) -> None:
        self.put(f"commits/{batch}")

    def purge(self, *batches: int) -> None:
        """Remove batches, as Spark does with old ones."""
        for batch in batches:
            self._filesystem.remove_files([f"commits/{batch}", f"offsets/{batch}"])

    def plan_later(self, batch: int) -> None:
        """Plan a batch again, as after the query was set back."""
        path = self.local / f"offsets/{batch}"
        version, header, *sources = path.read_text().split("\n")
        planned = json.loads(header)
        planned["batchTimestampMs"] += 1000
        path.write_text("\n".join([version, json.dumps(planned), *sources]))
        self.put(f"offsets/{batch}")


@pytest.fixture
def make(own_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Bucket]:
    monkeypatch.setattr(attachment, "POLL_INTERVAL_REMOTE_S", 0.05)
    return lambda job: Bucket(job, tmp_path, own_folder)


@pytest.mark.parametrize("job", ["hdfs-window", "rocksdb-snapshots", "format2-join", "transform"])
def test_checkpoint_in_bucket_is_followed(make: Callable[[str], Bucket], job: str, tmp_path: Path) -> None:
    bucket, log = make(job), tmp_path / "log"
    bucket.commit(0)
    with following(bucket.address, log, coalesced(bucket.local)) as attached:
        for batch in range(5):
            bucket.commit(batch)
            assert attached.wait(batch, WAIT_S)
    assert epochs(log) == [0, 1, 2, 3, 4]
    expected = in_spark(bucket.local, 4)
    assert values_in_log(log).keys() == expected.keys()


@pytest.mark.s3
def test_flows_below_storage_in_bucket_are_found_by_request_for_each_folder(
    make: Callable[[str], Bucket], proxy: FaultyProxy, tmp_path: Path
) -> None:
    bucket, log = make("hdfs-window"), tmp_path / "log"
    storage = bucket.address.removesuffix("/checkpoint")
    flow = f"{storage}/_checkpoints/alerts/north"
    for number in ("0", "1"):
        bucket.copy_to(f"{flow}/{number}")
    folder = CheckpointFiles.at(storage)
    methods(proxy)
    query, other = queries_below(folder)
    # The storage, its folder of checkpoints, the sink, the flow, its two numbers, and the newer one's commits; and the
    # checkpoint that has no commit.
    assert methods(proxy) == {"LIST": 8}
    assert query == FoundQuery("_checkpoints/alerts/north", "_checkpoints/alerts/north/1")
    assert (other.path, has_commit(folder, query), has_commit(folder, other)) == ("checkpoint", True, False)
    with following(folder.name(query.checkpoint), log) as attached:
        assert attached.wait(4, WAIT_S)


def test_lost_replies_are_requested_again(
    make: Callable[[str], Bucket], proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_TIMEOUT_S", 0.2)
    bucket, log = make("hdfs-window"), tmp_path / "log"
    bucket.commit(0)
    with following(bucket.address, log) as attached:
        assert attached.wait(0, WAIT_S)
        for batch, kind in enumerate(("cut", "503", "500"), 1):
            proxy.fail(kind, "GET", ".delta", times=30)
            bucket.commit(batch)
            eventually(lambda: attached.failure, lambda failure: failure is not None)
            assert max(epochs(log)) == batch - 1
            proxy.heal()
            assert attached.wait(batch, WAIT_S)
    assert (epochs(log), generations(log)) == ([0, 1, 2, 3], 1)
    assert values_in_log(log) == in_spark(bucket.local, 3)


def test_purged_batches_and_set_back_are_read_whole(make: Callable[[str], Bucket], tmp_path: Path) -> None:
    bucket, log = make("hdfs-window"), tmp_path / "log"
    bucket.commit(0)
    with following(bucket.address, log) as attached:
        assert attached.wait(0, WAIT_S)
    for batch in (1, 2, 3):
        bucket.commit(batch)
    bucket.purge(0, 1)
    with following(bucket.address, log) as attached:
        assert attached.wait(3, WAIT_S)
        assert (epochs(log), generations(log)) == ([3], 2)
        bucket.purge(3)
        bucket.plan_later(3)
        bucket.commit(3)
        eventually(lambda: (epochs(log), generations(log)), lambda found: found == ([3], 3))
    assert values_in_log(log) == in_spark(bucket.local, 3)


@pytest.mark.s3
def test_batch_is_few_requests_and_pause_one(make: Callable[[str], Bucket], proxy: FaultyProxy, tmp_path: Path) -> None:
    bucket, log = make("hdfs-window"), tmp_path / "log"
    bucket.commit(0)
    with following(bucket.address, log) as attached:
        for batch in range(4):
            bucket.commit(batch)
            assert attached.wait(batch, WAIT_S)
            cost = methods(proxy)
        # The last batch. A file for each partition, and about ten more. Looks at all commits may come in between: one
        # for a number of checks, and the first of these may have been before.
        assert cost["LIST"] <= 5 + cost["HEAD"] // CHECKS_PER_LISTING_REMOTE + 1
        assert cost["GET"] <= PARTITIONS + 13
        idle: Counter[str] = Counter()
        eventually(lambda: idle.update(methods(proxy)), lambda _: idle["HEAD"] >= 3 * CHECKS_PER_LISTING_REMOTE)
        looks = idle["HEAD"] // CHECKS_PER_LISTING_REMOTE + 1
        assert idle["LIST"] <= looks
        assert idle["GET"] <= 2 * looks
        assert idle.keys() <= {"HEAD", "GET", "LIST"}
