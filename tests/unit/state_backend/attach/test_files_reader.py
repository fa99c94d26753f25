"""Checkpoints of several versions of Spark, followed commit by commit: each epoch has the rows of its batch."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from state_backend.attach import partition_share
from state_backend.attach.states import AttachedState
from tests import golden_checkpoints as golden
from tests.unit.state_backend.attach.following import (
    WAIT_S,
    GrowingCheckpoint,
    coalesced,
    epochs,
    following,
    in_spark,
    values_in_log,
    without_json,
)

# Keys with a null in a column that is no text, and with nested columns.
WITHOUT_TEXT_KEYS = ("hdfs-types", "rocksdb-types", "hdfs-not-utf8")
# Of older versions only some jobs: `tests/unit/state_backend/checkpoint` reads all. Slow are those that it reads in
# `make test`, too: how they are followed does not depend on the version.
JOBS_OF_EACH_VERSION = ("hdfs-aggregation", "rocksdb-join", "format2-aggregation", "transform")
VERSIONS_READ_HERE_ONLY = ("4.0.5", "4.1.4", "4.2.1")
# The texts of `scripts/golden_checkpoints.py`, and the last one, which is a surrogate: Java replaces it as a whole.
NOT_UTF8 = ("E9", "FF41", "C3", "F09F98", "EDA080", "C080", "E282AC", "E28241")
SURROGATE = b"\xed\xa0\x804"
COUNTS = Counter(
    bytes.fromhex(NOT_UTF8[at]) + b"%d" % at for turn in range(60) for at in [(turn * 37 % 23 - 5) % len(NOT_UTF8)]
)
JOBS = [
    pytest.param(
        *each,
        id="-".join(each),
        marks=[] if each[0] in (*VERSIONS_READ_HERE_ONLY, golden.NEWEST) else [pytest.mark.slow],
    )
    for each in golden.jobs()
    if each[1] not in WITHOUT_TEXT_KEYS and (each[0] == golden.NEWEST or each[1] in JOBS_OF_EACH_VERSION)
]


@pytest.mark.parametrize(("version", "job"), JOBS)
def test_log_has_state_of_batch_after_each_commit(version: str, job: str, tmp_path: Path):
    growing = GrowingCheckpoint(version, job, tmp_path)
    log = tmp_path / "log"
    growing.commit(growing.batches[0])
    with following(growing.path, log, coalesced(growing.path)) as attachment:
        for batch in growing.batches:
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            expected = in_spark(growing.path, batch)
            assert without_json(values_in_log(log), expected) == expected, batch
    assert epochs(log) == growing.batches


def test_texts_that_are_not_utf8_are_their_bytes_and_replaced_in_json_values(tmp_path: Path):
    growing, log = GrowingCheckpoint(golden.NEWEST, "hdfs-not-utf8", tmp_path), tmp_path / "log"
    growing.commit(4)
    columns = {"joined": "concat_ws('/', text, max)", "upper": "upper(text)"}
    states = [
        AttachedState("all"),
        AttachedState("made", key=("text", "place"), columns=columns, value=("max", "joined", "upper")),
        AttachedState("json", key=("text", "place"), value=("max", "_3"), kind="value"),
    ]
    with following(growing.path, log, states) as attachment:
        assert attachment.wait(4, WAIT_S)
    found = values_in_log(log)
    contents = [bytes.fromhex(each) + b"%d" % at for at, each in enumerate(NOT_UTF8)]
    assert len(found) == 3 * len(contents)
    for content in contents:
        key = b'%b:{"city":"%b","parts":["%b"]}' % (content, content, content)
        readable = content.decode(errors="replace") if content != SURROGATE else "\ufffd4"
        value = found[b"j:all:" + key]
        assert (value[b"max"], value[b"count"]) == (content, b"%d" % COUNTS[content])
        assert json.loads(value[b"_1"]) == {"city": readable, "parts": [readable]}
        assert json.loads(value[b"_3"]) == {readable: readable}
        made = {b"max": content, b"joined": content + b"/" + content, b"upper": readable.upper().encode()}
        assert found[b"j:made:" + key] == made
        assert json.loads(found[b"j:json:" + key]) == {"max": readable, "_3": {readable: readable}}


def test_deduplication_of_spark_before_3_3_1_has_its_keys(tmp_path: Path):
    """Its schema names all columns of the query as the value; its values are empty."""
    folder = golden.unpack_case("dedupe-from-3.3", tmp_path / "checkpoint")
    keys = {b"j:seen:%d" % number: b"1" for number in range(8)}
    with following(folder, tmp_path / "log") as attachment:
        assert attachment.wait(1, WAIT_S)
    assert values_in_log(tmp_path / "log") == keys
    (folder / "state/0/_metadata/metadata").unlink()  # Spark before 4.0 writes none
    with following(folder, tmp_path / "other") as attachment:
        assert attachment.wait(1, WAIT_S)
    assert values_in_log(tmp_path / "other") == keys


def test_change_log_that_earlier_run_has_left_is_not_read(tmp_path: Path):
    growing = GrowingCheckpoint(golden.NEWEST, "rocksdb-switched", tmp_path)
    for partition in growing.path.glob("state/0/[0-9]"):
        # Versions 3 and 4 have zips: the query had stopped writing change logs.
        for version in (3, 4):
            shutil.copy(partition / "2.changelog", partition / f"{version}.changelog")
    log = tmp_path / "log"
    growing.commit(0)
    with following(growing.path, log, coalesced(growing.path)) as attachment:
        for batch in growing.batches:
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            assert values_in_log(log) == in_spark(growing.path, batch), batch
    assert epochs(log) == growing.batches


@pytest.mark.parametrize(
    "parallel_after_s", [partition_share.PARALLEL_AFTER_S, 0.0], ids=["one process", "several processes"]
)
def test_stores_of_states_that_are_not_attached_are_not_read(
    parallel_after_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partition_share, "PARALLEL_AFTER_S", parallel_after_s)
    monkeypatch.setattr(partition_share.os, "cpu_count", lambda: 2)
    growing = GrowingCheckpoint(golden.NEWEST, "hdfs-join", tmp_path)
    left = [
        {key: value for key, value in in_spark(tmp_path / "whole", batch).items() if key.startswith(b"j:left:")}
        for batch in growing.batches
    ]
    for delta in growing.path.glob("state/0/*/right-*/*.delta"):
        delta.unlink()
    log = tmp_path / "log"
    growing.commit(0)
    with following(growing.path, log, [AttachedState(variable="left")]) as attachment:
        for batch, expected in zip(growing.batches, left, strict=True):
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            assert without_json(values_in_log(log), expected) == expected, batch
