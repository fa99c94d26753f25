"""The output and the errors of `sparkis inspect`, for golden checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_hooks.cli import main
from tests.golden_checkpoints import NEWEST, unpack


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(each) for each in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def facts(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, output, errors = run(capsys, "inspect", *arguments, "--json")
    assert (code, errors) == (0, "")
    found: dict[str, Any] = json.loads(output)
    return found


def test_inspect_shows_batches_operators_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-window", tmp_path)
    code, output, _ = run(capsys, "inspect", folder, "--partitions")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == str(folder)
    assert lines[3] == "watermark  2024-03-01T10:30:29.000Z"
    assert lines[4] == 'source     0 up to {"logOffset":4}'
    assert "batches 0 to 4 are kept" in lines[2]
    assert "aggregation  4 " in output and "JOB:aggregation:<window>:<side>" in output
    assert "  key    window struct<start:timestamp,end:timestamp>, side string" in lines
    assert "  value  count bigint, sum bigint" in lines
    assert "  PARTITION  ROWS  BYTES" in lines
    assert "join.stateFormatVersion" not in output


def test_inspect_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, unpack(NEWEST, "transform-snapshots", tmp_path))
    assert found["batch"] == 4
    assert found["sources"] == {"0": {"logOffset": 4}}
    [operator] = found["operators"]
    states = {state["name"]: state for state in operator["states"]}
    assert {name: state["type"] for name, state in states.items()} == {
        "bySide": "hash",
        "last": "hash",
        "recent": "list",
    }
    assert states["bySide"]["served_as"] == "JOB:bySide:<word>"
    assert [each["partition"] for each in states["last"]["partitions"]] == [0, 1]
    assert sum(each["rows"] for each in states["last"]["partitions"]) == 7


def test_inspect_shows_each_query_below_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flow = tmp_path / "storage/_checkpoints/cat/db/words/words"
    for number in (0, 1):
        unpack(NEWEST, "hdfs-aggregation", flow / str(number))
    other = unpack(NEWEST, "hdfs-window", tmp_path / "other")
    code, output, _ = run(capsys, "inspect", tmp_path)
    pages = [run(capsys, "inspect", each)[1] for each in (other, flow / "1")]
    assert (code, output) == (0, "\n".join(pages))
    code, output, _ = run(capsys, "inspect", tmp_path, "--json", "--no-counts")
    assert [each["location"] for each in json.loads(output)] == [str(other), str(flow / "1")]


def test_inspect_shows_error_of_query_below_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = unpack(NEWEST, "hdfs-aggregation", tmp_path / "a")
    whole = unpack(NEWEST, "hdfs-window", tmp_path / "b")
    (broken / "metadata").unlink()
    code, output, errors = run(capsys, "inspect", tmp_path)
    assert (code, errors) == (0, "")
    assert output.startswith(
        f"{broken}\nerror      {broken} is not the checkpoint of a query: it has no file `metadata`"
    )
    assert f"\n\n{whole}\nquery      " in output
    (whole / "metadata").unlink()
    code, output, _ = run(capsys, "inspect", tmp_path, "--json")
    assert code == 1
    assert [list(each) for each in json.loads(output)] == [["location", "error"]] * 2


def test_inspect_shows_names_of_types_that_spark_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [operator] = facts(capsys, unpack(NEWEST, "hdfs-types", tmp_path), "--no-counts")["operators"]
    types = {each["type"] for each in operator["states"][0]["value"]}
    assert types >= {"timestamp", "timestamp_ntz", "interval year to month", "map<string,array<struct<n:bigint>>>"}


def test_inspect_reads_no_state_without_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-aggregation", tmp_path)
    for delta in folder.rglob("*.delta"):
        delta.unlink()
    assert facts(capsys, folder, "--no-counts")["provider"] == "HDFSBackedStateStoreProvider"
    code, _, errors = run(capsys, "inspect", folder)
    assert code == 1
    assert "1.delta is gone: Spark has removed it" in errors


def test_inspect_counts_rows_whose_keys_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [operator] = facts(capsys, unpack(NEWEST, "hdfs-not-utf8", tmp_path))["operators"]
    assert sum(each["rows"] for each in operator["states"][0]["partitions"]) == 8


def test_inspect_shows_aggregation_of_real_time_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, unpack(NEWEST, "real-time-aggregation", tmp_path))
    assert found["operators"][0]["name"] == "StatefulStreamlineAggregate"
    assert found["settings"]["aggregation.stateFormatVersion"] == "2"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("checkpoint/offsets", "nor the root of a change log with a job, and no query's"),
        ("checkpoint/offsets", "`_checkpoints` of its storage): it has 0, 1, 2, 3, 4"),
        ("none", "it is empty, or does not exist"),
        ("nfs://x/y", "nfs: is not supported"),
    ],
)
def test_inspect_names_location_without_checkpoint(
    location: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(NEWEST, "hdfs-whole-stream", tmp_path / "checkpoint")
    code, output, errors = run(capsys, "inspect", location if "://" in location else tmp_path / location)
    assert (code, output) == (1, "")
    assert message in errors
