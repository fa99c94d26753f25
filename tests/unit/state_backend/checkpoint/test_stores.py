"""The stores of an operator: which files have the changes of a batch."""

from __future__ import annotations

import os
from pathlib import Path

from state_backend.checkpoint.checkpoint import Checkpoint
from tests.golden_checkpoints import NEWEST, unpack

BATCH, ZIP = 1, "2.zip"


def has_change_log(folder: Path) -> bool:
    [store] = Checkpoint.at(str(folder)).batch_stores(BATCH).stores
    return store.has_change_log(BATCH)


def test_zip_from_before_commit_is_ignored_if_another_partition_has_none(tmp_path: Path) -> None:
    folder = unpack(NEWEST, "rocksdb-snapshots", tmp_path)
    zips = [folder / "state/0" / partition / ZIP for partition in "01"]
    commit = folder / f"commits/{BATCH}"
    os.utime(commit, (1000, 1000))
    assert has_change_log(folder)
    # Maintenance has uploaded the snapshot of one partition while the batch waited for others.
    os.utime(zips[0], (999, 999))
    zips[1].unlink()
    assert has_change_log(folder)


def test_zips_of_all_partitions_from_before_commit_count_more_than_change_logs(tmp_path: Path) -> None:
    folder = unpack(NEWEST, "rocksdb-snapshots", tmp_path)
    os.utime(folder / f"commits/{BATCH}", (1000, 1000))
    for partition in "01":
        os.utime(folder / "state/0" / partition / ZIP, (999, 999))
    assert not has_change_log(folder)
