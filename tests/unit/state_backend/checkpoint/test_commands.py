"""`sparkis inspect` and `sparkis get`: what they print of golden checkpoints, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import checkpoints
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


def test_inspect_shows_each_query_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flow = tmp_path / "storage/_checkpoints/cat/db/words/words"
    for number in (0, 1):
        unpack(NEWEST, "hdfs-aggregation", flow / str(number))
    other = unpack(NEWEST, "hdfs-window", tmp_path / "other")
    code, output, _ = run(capsys, "inspect", tmp_path)
    pages = [run(capsys, "inspect", each)[1] for each in (other, flow / "1")]
    assert (code, output) == (0, "\n".join(pages))
    code, output, _ = run(capsys, "inspect", tmp_path, "--json", "--no-counts")
    assert [each["location"] for each in json.loads(output)] == [str(other), str(flow / "1")]


def test_inspect_shows_the_error_of_a_query_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_inspect_shows_the_names_of_types_that_spark_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("job", "key", "expected"),
    [
        (
            "hdfs-aggregation",
            "bee",
            {"aggregation": {"_0": 11, "_1": 1.25, "_2": 48, "_3": 11, "max": "bee"}},
        ),
        ("hdfs-window", "2024-03-01T10:40:00Z:left", {"aggregation": {"count": 8, "sum": 51}}),
        ("hdfs-whole-stream", "all", {"aggregation": {"count": 60, "max": "dog"}}),
    ],
)
def test_get_prints_the_value_of_a_key(
    job: str, key: str, expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = run(capsys, "get", unpack(NEWEST, job, tmp_path), key)
    assert code == 0
    assert json.loads(output) == expected


def test_struct_in_key_is_json_as_attachment_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-types", tmp_path)
    key = 'false:11:2024-01-12:11.00:11000000000000.125:ant:{"w":"ant","p":[1.25,null,1.5]}'
    code, output, errors = run(capsys, "get", folder, key)
    assert (code, errors) == (0, "")
    assert json.loads(output)["aggregation"]["min"] is False


def test_get_finds_keys_that_are_not_utf8_by_their_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-not-utf8", tmp_path)
    key = b'\xe90:{"city":"\xe90","parts":["\xe90"]}'.decode(errors="surrogateescape")  # as Python reads arguments
    code, output, errors = run(capsys, "get", folder, key)
    assert (code, errors) == (0, "")
    found = json.loads(output)["aggregation"]
    assert (found["max"], found["_1"], found["count"]) == ("\ufffd0", {"city": "\ufffd0", "parts": ["\ufffd0"]}, 8)
    [operator] = facts(capsys, folder)["operators"]
    assert sum(each["rows"] for each in operator["states"][0]["partitions"]) == 8


def test_inspect_and_get_show_aggregation_of_real_time_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "real-time-aggregation", tmp_path)
    found = facts(capsys, folder)
    assert found["operators"][0]["name"] == "StatefulStreamlineAggregate"
    assert found["settings"]["aggregation.stateFormatVersion"] == "2"
    value = json.loads(run(capsys, "get", folder, "bee")[1])["aggregation"]
    other = json.loads(run(capsys, "get", unpack(NEWEST, "hdfs-aggregation", tmp_path / "other"), "bee")[1])
    assert value == other["aggregation"]


def test_get_prints_maps_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "transform-snapshots", tmp_path)
    found = json.loads(run(capsys, "get", folder, "bee")[1])
    assert found["bySide"] == {"left": {"total": -1.0}, "right": {"total": 1.0}}
    assert found["recent"][-1] == {"number": -3, "side": "left"}
    assert json.loads(run(capsys, "get", folder, "bee", "--state", "last")[1]) == {"last": found["last"]}


def test_get_reads_an_earlier_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-whole-stream", tmp_path)
    assert json.loads(run(capsys, "get", folder, "all", "--batch", 1)[1])["aggregation"]["count"] == 24


def test_get_refuses_a_text_that_two_keys_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = np.zeros(2, checkpoints.RECORD)
    records["key_bytes"], records["value_bytes"] = checkpoints.KEY_BYTES, checkpoints.VALUE_BYTES
    records["key_word"], records["key_text"], records["key_nulls"][1] = 16 << 32 | 4, b"null", 1
    monkeypatch.setattr(checkpoints, "_records", lambda numbers, batch: records.tobytes())
    written = checkpoints.WrittenCheckpoint(tmp_path, partitions=1)
    written.write_snapshot(0, 2)
    written.plan(0)
    written.commit(0)
    code, output, errors = run(capsys, "get", tmp_path, "null")
    assert (code, output) == (1, "")
    assert f"""of {tmp_path} has 2 keys that are written 'null': {{"sensor":"null"}}, {{"sensor":null}}; """ in errors


def test_inspect_and_get_name_missing_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-whole-stream", tmp_path / "checkpoint")
    for arguments, message in (
        (
            ("get", folder, "none"),
            "no state has the key 'none' after batch 4; keys have the form all (state aggregation)",
        ),
        (("get", folder, "all", "--state", "x"), "has no state 'x'; its states: aggregation"),
        (("get", folder, "all", "--batch", 9), "offsets/9 is gone"),
        (("inspect", tmp_path / "checkpoint" / "offsets"), "nor the root of a change log with a job, and no query's"),
        (("inspect", tmp_path / "checkpoint" / "offsets"), "`_checkpoints` of its storage): it has 0, 1, 2, 3, 4"),
        (("inspect", tmp_path / "none"), "it is empty, or does not exist"),
        (("inspect", "nfs://x/y"), "nfs: is not supported"),
    ):
        code, output, errors = run(capsys, *arguments)
        assert (code, output) == (1, "")
        assert message in errors
