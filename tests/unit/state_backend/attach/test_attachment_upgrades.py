"""A query that another version of Spark continues: its attachment goes on, in the same generation of its log.

Spark 3.5 writes no operators' names; a newer version writes them in its first micro-batch.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from state_backend.attach.start import attach_files
from tests import golden_checkpoints as golden
from tests.unit.state_backend.attach.following import (
    JOB,
    WAIT_S,
    GrowingCheckpoint,
    coalesced,
    described,
    epochs,
    following,
    generations,
    in_spark,
    values_in_log,
    without_json,
)

# The first batch of the newer version; see `scripts/golden_upgrades.py`.
FIRST_OF_NEW = 3
UPGRADES = [(version, job) for version, job in golden.jobs() if "-" in version]
METADATA = "state/0/_metadata"


class UpgradedCheckpoint(GrowingCheckpoint):
    """A checkpoint that grows; the operator's metadata appears when the version that writes it continues the query."""

    def __init__(self, version: str, job: str, folder: Path) -> None:
        super().__init__(version, job, folder)
        self._metadata = self._whole / METADATA if version.startswith("3.5") else None
        if self._metadata is not None:
            shutil.rmtree(self.path / METADATA)

    def commit(self, batch: int) -> None:
        """Commit a batch."""
        if batch == FIRST_OF_NEW and self._metadata is not None:
            shutil.copytree(self._metadata, self.path / METADATA)
        super().commit(batch)


@pytest.mark.parametrize("restarts", [False, True], ids=["runs", "restarts"])
@pytest.mark.parametrize(("version", "job"), UPGRADES, ids=["-".join(each) for each in UPGRADES])
def test_attachment_continues_across_upgrade(version: str, job: str, restarts: bool, tmp_path: Path):
    growing = UpgradedCheckpoint(version, job, tmp_path)
    log = tmp_path / "log"
    growing.commit(0)
    states = coalesced(growing.path)
    with ExitStack() as running:
        attachment = running.enter_context(following(growing.path, log, states))
        for batch in growing.batches:
            if restarts and batch == FIRST_OF_NEW:
                attachment.stop()
            growing.commit(batch)
            if restarts and batch == FIRST_OF_NEW:
                attachment = running.enter_context(following(growing.path, log, states))
            assert attachment.wait(batch, WAIT_S)
            expected = in_spark(growing.path, batch)
            assert without_json(values_in_log(log), expected) == expected, batch
    assert (epochs(log), generations(log)) == (growing.batches, 1)


@pytest.mark.parametrize("restarts", [False, True], ids=["runs", "restarts"])
def test_attachment_survives_operator_name_of_real_time_mode(restarts: bool, tmp_path: Path):
    growing, log = GrowingCheckpoint(golden.NEWEST, "real-time-aggregation", tmp_path), tmp_path / "log"
    metadata = growing.path / METADATA / "metadata"
    of_real_time = metadata.read_text()
    metadata.write_text(of_real_time.replace("StatefulStreamlineAggregate", "stateStoreSave"))
    growing.commit(0)
    states = coalesced(growing.path)
    with ExitStack() as running:
        attachment = running.enter_context(following(growing.path, log, states))
        assert attachment.wait(0, WAIT_S)
        if restarts:
            attachment.stop()
        metadata.write_text(of_real_time)
        if restarts:
            attachment = running.enter_context(following(growing.path, log, states))
        growing.commit(1)
        assert attachment.wait(1, WAIT_S)
    assert without_json(values_in_log(log), expected := in_spark(growing.path, 1)) == expected
    assert (epochs(log), generations(log)) == ([0, 1], 1)


def test_log_with_name_that_spark_gives_operator_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    growing, log = GrowingCheckpoint(golden.NEWEST, "hdfs-grouped", tmp_path), tmp_path / "log"
    growing.commit(0)
    with monkeypatch.context() as earlier:
        earlier.setattr("state_backend.attach.state_encoder.stable_name", lambda name: name)
        with following(growing.path, log) as attachment:
            assert attachment.wait(0, WAIT_S)
    source = described(log).source
    assert source is not None and source["states"]["groupState"]["operator"] == "applyInPandasWithState"
    growing.commit(1)
    with attach_files(str(growing.path), job=JOB, log=str(log)) as attachment:
        assert attachment.wait(1, WAIT_S)
    assert (epochs(log), generations(log)) == ([0, 1], 1)
