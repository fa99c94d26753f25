"""Parts of a checkpoint that sparkis cannot read: inspect, get and attach name them, and show or serve the others."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from spark_hooks.cli import main
from state_backend.attach.start import attach_files, bind
from state_backend.attach.states import AttachedState
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.model.errors import DescriptorError, UnsupportedStateError
from tests.golden_checkpoints import NEWEST, unpack, unpack_case
from tests.unit.state_backend.attach.following import JOB, WAIT_S, following, values_in_log

UNKNOWN = ("stateStoreSave", "quantumSave")
AVRO = ('"unsaferow"', '"avro"')
PROVIDER = ("HDFSBackedStateStoreProvider", "CassandraStateStoreProvider")
OPERATOR = "state/0/_metadata/metadata"


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace a text in a file."""
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint with an aggregation, and an operator that is not known."""
    found = unpack(NEWEST, "hdfs-whole-stream", tmp_path / "checkpoint")
    other = unpack(NEWEST, "hdfs-dedupe-within", tmp_path / "other")
    (other / "state/0").rename(found / "state/1")
    replace_text(found / "state/1/_metadata/metadata", '"operatorId":0', '"operatorId":1')
    replace_text(found / "state/1/_metadata/metadata", "dedupeWithinWatermark", "quantumSave")
    for path in (found / "state/1").rglob("schema"):
        path.unlink()  # it may have any form
    return found


def facts(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_inspect_shows_other_operators(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, unknown = facts(capsys, folder)["operators"]
    assert (unknown["name"], unknown["states"]) == ("quantumSave", [])
    [refusal] = unknown["unread"]
    assert refusal["state"] is None and "the operator 'quantumSave' is not known to sparkis" in refusal["reason"]
    assert known["unread"] == []
    assert sum(each["rows"] for each in known["states"][0]["partitions"]) > 0
    assert main(["inspect", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "not read: operator 1 (quantumSave): " in output and "0 stateStoreSave  aggregation" in output


@pytest.mark.parametrize(("old", "new"), [AVRO, PROVIDER], ids=["avro", "provider"])
def test_inspect_shows_batches_and_operators_without_state_that_can_be_read(
    folder: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_text(folder / "offsets/4", old, new)
    found = facts(capsys, folder)
    assert found["batches"] == {"first": 0, "last": 4}
    assert found["time"] and found["settings"]
    assert [each["name"] for each in found["operators"]] == ["stateStoreSave", "quantumSave"]
    assert all(new.strip('"') in each["unread"][0]["reason"] for each in found["operators"])
    assert main(["inspect", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "batches 0 to 4 are kept" in output and "not read: operator 0 (stateStoreSave): " in output
    for arguments in (["get", str(folder), "all"], ["attach", "--list", "--checkpoint", str(folder)]):
        assert main(arguments) == 1
        assert new.strip('"') in capsys.readouterr().err


def test_state_in_avro_is_named_by_inspect_and_refused_by_attach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpack(NEWEST, "transform-avro", tmp_path / "checkpoint")
    found = facts(capsys, folder)
    assert found["batches"] == {"first": 0, "last": 4}
    [operator] = found["operators"]
    assert operator["name"] == "transformWithStateInPandasExec"
    [refusal] = operator["unread"]
    assert "the state is encoded as avro, which sparkis does not read" in refusal["reason"]
    with pytest.raises(UnsupportedStateError, match="encoded as avro"):
        attach_files(str(folder), job=JOB, log=str(tmp_path / "log"))


@pytest.mark.parametrize("case", ["aggregation-of-3.0", "join-of-3.0"])
def test_state_of_spark_3_0_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack_case(case, tmp_path / "checkpoint")
    found = facts(capsys, folder)
    assert (found["spark"], found["batches"]) == ("3.0 or earlier", {"first": 0, "last": 2})
    too_old = "Spark 3.0 or older wrote this state, without a schema. sparkis reads checkpoints of Spark 3.1 and later"
    assert too_old in found["operators"][0]["unread"][0]["reason"]
    for arguments in (["get", str(folder), "ant"], ["attach", "--list", "--checkpoint", str(folder)]):
        assert main(arguments) == 1
        assert too_old in capsys.readouterr().err
    with pytest.raises(UnsupportedStateError, match="without a schema"):
        attach_files(str(folder), job=JOB, log=str(tmp_path / "log"))


def test_checkpoint_of_spark_2_1_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack_case("aggregation-of-3.0", tmp_path / "checkpoint")
    shutil.rmtree(folder / "commits")  # Spark 2.1 has none
    path = str(folder)
    for arguments in (["inspect", path], ["get", path, "ant"], ["attach", "--list", "--checkpoint", path]):
        assert main(arguments) == 1
        assert "no folder commits: Spark 2.1 wrote it" in capsys.readouterr().err
    with pytest.raises(UnsupportedStateError, match=r"Spark 2\.1 wrote it"):
        attach_files(str(folder), job=JOB, log=str(tmp_path / "log"), timeout_s=WAIT_S)


def test_query_in_its_first_batch_is_not_taken_for_one_of_spark_2_1(tmp_path: Path) -> None:
    folder = unpack(NEWEST, "hdfs-aggregation", tmp_path)
    shutil.rmtree(folder / "commits")  # an object store has no empty folders
    assert Checkpoint.at(str(folder)).newest_batch() is None
    folder = unpack_case("aggregation-of-3.0", tmp_path / "old")
    for path in (*folder.glob("commits/*"), *folder.glob("offsets/[12]")):
        path.unlink()
    assert Checkpoint.at(str(folder)).newest_batch() is None


def test_copy_without_folders_of_spark_is_named(tmp_path: Path) -> None:
    folder = unpack("3.5.9", "hdfs-aggregation", tmp_path)
    assert Checkpoint.at(str(folder)).batch_stores(4).states
    shutil.rmtree(folder / "state/0/0/_metadata")
    [unread] = Checkpoint.at(str(folder)).batch_stores(4).unread
    assert "copied without the folders whose names begin with `_`?" in unread.reason


def test_checkpoint_of_preview_of_spark_4_0_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "transform", tmp_path)
    for path in (folder / "state/0/_metadata/v2").iterdir():
        described = re.sub(r'"stateSchemaFilePaths":\[("[^"]*")\]', r'"stateSchemaFilePath":\1', path.read_text())
        assert '"stateSchemaFilePath":"' in described
        path.write_text(described)
    [operator] = facts(capsys, folder)["operators"]
    [refusal] = operator["unread"]
    assert "stateSchemaFilePath, which only builds of Spark before the release of 4.0.0 wrote" in refusal["reason"]


def test_state_whose_rows_cannot_be_read_has_no_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-whole-stream", tmp_path)
    for delta in folder.rglob("*.delta"):
        delta.write_bytes(b"ZV" + delta.read_bytes())
    [operator] = facts(capsys, folder)["operators"]
    assert "partitions" not in operator["states"][0]
    assert operator["unread"][0]["state"] == "aggregation" and "LZF" in operator["unread"][0]["reason"]


def test_get_reads_other_states(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", str(folder), "all"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"aggregation"}
    assert main(["get", str(folder), "none"]) == 1
    assert "not read: operator 1 (quantumSave): " in capsys.readouterr().err
    assert main(["get", str(folder), "all", "--state", "seen"]) == 1
    assert "its states: aggregation; not read: operator 1 (quantumSave): " in capsys.readouterr().err


def test_attachment_serves_other_states(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "log"
    with caplog.at_level(logging.WARNING), following(folder, log) as attachment:
        assert attachment.wait(4, WAIT_S)
    assert "a state is left out, because sparkis does not read it: operator 1 (quantumSave)" in caplog.text
    assert set(values_in_log(log)) == {b"j:aggregation:all"}


def test_requested_state_that_cannot_be_read_is_refused_by_name(folder: Path) -> None:
    checkpoint = Checkpoint.at(str(folder))
    with pytest.raises(UnsupportedStateError, match=r"operator 1 \(quantumSave\)"):
        bind(checkpoint, JOB, [AttachedState("x", operator=1)])
    with pytest.raises(DescriptorError, match="no state with operator=2"):
        bind(checkpoint, JOB, [AttachedState("x", operator=2)])
    assert len(bind(checkpoint, JOB, [AttachedState("x")])) == 1


def test_attachment_without_state_that_can_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    replace_text(folder / OPERATOR, "stateStoreSave", "newSave")
    with pytest.raises(UnsupportedStateError, match=r"\(newSave\): .*; operator 1 \(quantumSave\): "):
        attach_files(str(folder), job=JOB, log=str(tmp_path / "log"))


def test_variable_of_unknown_kind_is_left_out(tmp_path: Path) -> None:
    folder = unpack(NEWEST, "transform", tmp_path)
    for path in (folder / "state/0/_metadata/v2").iterdir():
        replace_text(path, "MapState", "SetState")
    batch_stores = Checkpoint.at(str(folder)).batch_stores(4)
    assert {state.name for state in batch_stores.states} == {"last", "recent"}
    [unread] = batch_stores.unread
    assert (unread.variable, "is a SetState" in unread.reason) == ("bySide", True)


def test_operator_that_becomes_unknown_ends_its_attachment(tmp_path: Path) -> None:
    folder, log = unpack(NEWEST, "hdfs-whole-stream", tmp_path / "checkpoint"), tmp_path / "log"
    (folder / "commits/4").rename(folder / "4")
    with following(folder, log) as attachment:
        assert attachment.wait(3, WAIT_S)
        replace_text(folder / OPERATOR, *UNKNOWN)
        (folder / "4").rename(folder / "commits/4")
        with pytest.raises(UnsupportedStateError, match=r"operator 0 \(quantumSave\)"):
            attachment.wait(4, WAIT_S)
