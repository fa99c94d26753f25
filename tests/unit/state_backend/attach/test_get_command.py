"""The output and the errors of `sparkis get`, for golden checkpoints."""

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
    code = main(["get", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def values(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return the values that `sparkis get` prints, by the names of their states."""
    code, output, errors = run(capsys, *arguments)
    assert (code, errors) == (0, "")
    found: dict[str, Any] = json.loads(output)
    return found


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
def test_get_prints_value_of_key(
    job: str, key: str, expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert values(capsys, unpack(NEWEST, job, tmp_path), key) == expected


def test_struct_in_key_is_json_as_attachment_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-types", tmp_path)
    key = 'false:11:2024-01-12:11.00:11000000000000.125:ant:{"w":"ant","p":[1.25,null,1.5]}'
    assert values(capsys, folder, key)["aggregation"]["min"] is False


def test_get_finds_keys_that_are_not_utf8_by_their_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-not-utf8", tmp_path)
    key = b'\xe90:{"city":"\xe90","parts":["\xe90"]}'.decode(errors="surrogateescape")  # as Python reads arguments
    found = values(capsys, folder, key)["aggregation"]
    assert (found["max"], found["_1"], found["count"]) == ("\ufffd0", {"city": "\ufffd0", "parts": ["\ufffd0"]}, 8)


def test_get_prints_maps_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "transform-snapshots", tmp_path)
    found = values(capsys, folder, "bee")
    assert found["bySide"] == {"left": {"total": -1.0}, "right": {"total": 1.0}}
    assert found["recent"][-1] == {"number": -3, "side": "left"}
    assert values(capsys, folder, "bee", "--state", "last") == {"last": found["last"]}


def test_get_reads_earlier_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-whole-stream", tmp_path)
    assert values(capsys, folder, "all", "--batch", 1)["aggregation"]["count"] == 24


def test_get_refuses_text_that_two_keys_have(
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
    code, output, errors = run(capsys, tmp_path, "null")
    assert (code, output) == (1, "")
    assert f"""of {tmp_path} has 2 keys that are written 'null': {{"sensor":"null"}}, {{"sensor":null}}; """ in errors


def test_get_reads_aggregation_of_real_time_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, unpack(NEWEST, "real-time-aggregation", tmp_path / "real-time"), "bee")
    assert found == values(capsys, unpack(NEWEST, "hdfs-aggregation", tmp_path / "other"), "bee")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("none",),
            "no state has the key 'none' after batch 4; keys have the form all (state aggregation)",
        ),
        (("all", "--state", "x"), "has no state 'x'; its states: aggregation"),
        (("all", "--batch", 9), "offsets/9 is gone"),
    ],
)
def test_get_names_missing_key_state_and_batch(
    arguments: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = run(capsys, unpack(NEWEST, "hdfs-whole-stream", tmp_path), *arguments)
    assert (code, output) == (1, "")
    assert message in errors
