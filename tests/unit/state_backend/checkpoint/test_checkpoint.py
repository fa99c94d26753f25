"""A checkpoint as a whole: missing, unknown and damaged parts are errors that name them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.compression import LZ4_HEADER
from state_backend.model.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    PurgedVersionError,
    UnsupportedStateError,
)
from tests.golden_checkpoints import NEWEST, plain, unpack

JOB = "hdfs-aggregation"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpack(NEWEST, JOB, tmp_path / "checkpoint")


def read_all(folder: Path) -> int:
    """Return the number of rows of the whole state and of the changes of the last batch."""
    checkpoint = Checkpoint.at(str(folder))
    batch = checkpoint.newest_batch()
    assert batch is not None
    batch_stores = checkpoint.batch_stores(batch)
    batch_stores.check()
    return sum(
        rows.num_rows
        for store in batch_stores.stores
        for read in (store.whole, store.changes)
        for _, rows in read(store.partitions, batch)
    )


def test_folder_that_is_no_checkpoint_is_error(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="not the checkpoint of a query: it is empty, or does not exist"):
            Checkpoint.at(str(missing))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not the checkpoint of a query: it has no file `metadata`"):
        Checkpoint.at(str(tmp_path))
    (tmp_path / "metadata").write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"metadata cannot be read: .*\. If the query runs on"):
        Checkpoint.at(str(tmp_path))


def test_query_without_committed_batch_has_no_newest_one(folder: Path) -> None:
    shutil.rmtree(folder / "commits")
    assert Checkpoint.at(str(folder)).newest_batch() is None


def test_batches_watermark_and_settings_are_those_that_spark_wrote(folder: Path) -> None:
    checkpoint = Checkpoint.at(str(folder))
    assert checkpoint.batches() == [0, 1, 2, 3, 4]
    assert checkpoint.offsets(4).settings["spark.sql.shuffle.partitions"] == "2"
    assert checkpoint.offsets(4).timestamp_ms > 1_700_000_000_000
    assert checkpoint.commit(4).ids == {}


def test_missing_delta_is_error_of_purged_version(folder: Path) -> None:
    (folder / "state/0/1/3.delta").unlink()
    with pytest.raises(PurgedVersionError, match=r"state/0/1/3\.delta is gone"):
        read_all(folder)


def test_missing_commit_is_error_of_purged_version(folder: Path) -> None:
    with pytest.raises(PurgedVersionError, match="offsets/9 is gone"):
        Checkpoint.at(str(folder)).batch_stores(9)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("offsets/4", "HDFSBackedStateStoreProvider", "CassandraStateStoreProvider", "CassandraStateStoreProvider"),
        ("offsets/4", "org.apache.spark.sql.execution", "com.databricks.sql", "com.databricks.sql.streaming.state"),
        ("offsets/4", '"unsaferow"', '"avro"', "encoded as avro"),
        ("offsets/4", "v1\n", "v7\n", "version v7"),
        ("commits/4", "v1\n", "v3\n", "version v3"),
        ("state/0/_metadata/metadata", "v1\n", "v9\n", "version v9"),
        ("state/0/_metadata/metadata", "stateStoreSave", "quantumSave", "quantumSave"),
        ("state/0/0/_metadata/schema", '"long"', '"void8"', "void8"),
    ],
)
def test_unsupported_part_is_refused_by_name(folder: Path, file: str, old: str, new: str, message: str) -> None:
    content = (folder / file).read_bytes()
    assert old.encode() in content, content
    replaced = content.replace(old.encode(), new.encode())
    if file.endswith("schema"):  # the length of the text, which is shorter than 64 KiB
        replaced = content.replace(b'"long"', b'"lonk"')
        message = "lonk"
    (folder / file).write_bytes(replaced)
    with pytest.raises(UnsupportedStateError, match=message):
        read_all(folder)


@pytest.mark.parametrize("file", ["metadata", "offsets/4", "commits/4", "state/0/_metadata/metadata"])
def test_damaged_metadata_is_error(folder: Path, file: str) -> None:
    for content in (b"", b"\xff\xfe", b"v1\n[]", b"v1\n{", b"v1\n" + b"[" * 100_000, b"[1]"):
        (folder / file).write_bytes(content)
        if (file, content) == ("commits/4", b"v1\n"):
            continue
        with pytest.raises(CheckpointFormatError, match=rf"{file} cannot be read"):
            read_all(folder)


# By job: how often something cannot be read. Where there are snapshots of RocksDB, each read starts a process.
FLIPS = dict.fromkeys(("hdfs-aggregation", "hdfs-types", "hdfs-zstd", "hdfs-snappy", "rocksdb-join"), 150)
FLIPS |= dict.fromkeys(("format2-aggregation", "hdfs-checksums", "rocksdb-checksums"), 100)
FLIPS |= dict.fromkeys(("transform", "transform-checksums", "join4"), 8)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("job", FLIPS)
def test_damaged_files_are_error_or_other_rows(job: str, times: int, tmp_path: Path) -> None:
    folder = unpack(NEWEST, job, tmp_path / "checkpoint")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chance = random.Random(f"{job}{times}")
    for _ in range(times * FLIPS[job]):
        path = chance.choice(files)
        content = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        saved = path.read_bytes()
        path.write_bytes(content)
        try:
            read_all(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
            assert "checksum" in str(error) or "CRC" in str(error) or "new checkpoint" not in str(error)
        path.write_bytes(saved)
    assert read_all(folder) > 0


@pytest.mark.parametrize(
    ("file", "kept", "is_damaged"),
    [
        ("state/0/1/5.delta", slice(None), True),
        ("state/0/1/5.delta", slice(-1), False),
        ("state/0/1/5.delta", slice(0), False),
        ("state/0/0/_metadata/schema", slice(-1), False),
        ("offsets/4", slice(-100), False),
    ],
    ids=["flipped", "shorter", "empty", "schema", "offsets"],
)
def test_only_wrong_checksum_advises_new_checkpoint(folder: Path, file: str, kept: slice, is_damaged: bool) -> None:
    content = bytearray((folder / file).read_bytes())
    if is_damaged:
        content[LZ4_HEADER.size + 3] ^= 1  # in the data of the first block
    (folder / file).write_bytes(content[kept])
    with pytest.raises(CheckpointFormatError) as raised:
        read_all(folder)
    assert isinstance(raised.value, CheckpointDamagedError) == is_damaged
    assert ("start the query on a new checkpoint" in str(raised.value)) == is_damaged
    assert ("If the query runs on with it, the file is whole" in str(raised.value)) != is_damaged


def test_moved_checkpoint_is_read(tmp_path: Path) -> None:
    first = unpack(NEWEST, "join3", tmp_path / "checkpoint")
    moved = tmp_path / "a folder with a space"
    first.rename(moved)
    assert read_all(moved) > 0


def test_changes_are_found_by_snapshots_with_ids(tmp_path: Path) -> None:
    folder = unpack(NEWEST, "rocksdb-no-changelog", tmp_path)
    checkpoint = Checkpoint.at(str(folder))
    expected = [changes(checkpoint, batch) for batch in range(5)]
    for path in [*folder.rglob("*.zip")]:
        path.rename(path.with_name(f"{path.stem}_id-{path.parent.name}{path.stem}.zip"))
    for batch in range(5):
        ids = [[f"id-{partition}{batch + 1}"] for partition in (0, 1)]
        (folder / f"commits/{batch}").write_text("v2\n" + json.dumps({"stateUniqueIds": {"0": ids}}))
    assert [changes(checkpoint, batch) for batch in range(5)] == expected
    (folder / "commits/4").write_text("v2\n" + json.dumps({"stateUniqueIds": {"0": [["x"]]}}))
    with pytest.raises(CheckpointFormatError, match="commits/4 cannot be read: it has no id for partition 1"):
        changes(checkpoint, 4)


def changes(checkpoint: Checkpoint, batch: int) -> list[object]:
    [store] = checkpoint.batch_stores(batch).stores
    return [row for _, rows in store.changes([1], batch) for row in zip(*map(plain, rows.columns), strict=True)]
