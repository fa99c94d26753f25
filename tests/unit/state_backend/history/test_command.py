"""`sparkis history` and `sparkis diff` on the terminal, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_hooks.cli import main
from state_backend.apply.compact import compact_log
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.builders import put_value, write_log

START_MS = 1_700_000_000_000
STATE = StateDescriptor("temp", key="k", value="v")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with LogWriter(tmp_path, "job", [STATE]) as writer:
        for number, value in enumerate((b"1", b"1", b"2", None)):
            op = Op.DELETE if value is None else Op.PUT
            writer.publish([Change("temp", op, b"job:temp:a", None, value)], clock_ms=START_MS + number * 1000)
            if number == 2:
                compact_log(str(tmp_path), "job", retention_ms=0)
    return tmp_path


def test_values_are_shown_newest_first(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "job:temp:a", "--log", str(log)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2023-11-14T22:13:23.000Z  epoch 3         (no key)",
        '2023-11-14T22:13:22.000Z  epoch 2         or before "2"',
    ]
    assert main(["history", "job:temp:a", "--log", str(log), "--json", "--count", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "epoch": 3,
        "committed_at": "2023-11-14T22:13:23.000Z",
        "kind": None,
        "value": None,
        "is_oldest": False,
    }


def test_key_of_no_job_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "other:temp:a", "--log", str(log)]) == 1
    assert "makes keys like 'other:temp:a'; jobs: job" in capsys.readouterr().err
    assert main(["history", "job:temp:b", "--log", str(log)]) == 1
    assert "job job had no key 'job:temp:b'" in capsys.readouterr().err


def test_keys_that_differ_are_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "job", "2", "3", "--log", str(log)]) == 0
    assert capsys.readouterr().out.split() == ["removed", "temp", "job:temp:a"]
    assert main(["diff", "job", "2023-11-14T22:13:23.500Z", "2", "--log", str(log), "--json", "--state", "temp"]) == 0
    assert json.loads(capsys.readouterr().out) == {"change": "added", "state": "temp", "key": "job:temp:a"}
    assert main(["diff", "job", "0", "3", "--log", str(log)]) == 1
    assert "epoch 0 cannot be read any more" in capsys.readouterr().err
    assert main(["diff", "job", "2", "3", "--log", str(log), "--state", "none"]) == 1
    assert "has no state 'none'; states: temp" in capsys.readouterr().err


def test_key_of_bytes_differs_from_text_of_equal_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (b"job:temp:k\xff", b"job:temp:k\\xff")
    write_log(tmp_path, "job", [STATE], [], [put_value("temp", key, b"1") for key in keys])
    assert main(["diff", "job", "0", "1", "--log", str(tmp_path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(each["key"], each.get("key_hex")) for each in found} == {(None, keys[0].hex()), (keys[1].decode(), None)}
    assert main(["diff", "job", "0", "1", "--log", str(tmp_path)]) == 0
    shown = {line.split()[2] for line in capsys.readouterr().out.splitlines()}
    assert shown == {'"job:temp:k\\xff"', "job:temp:k\\xff"}


def test_value_of_bytes_is_shown_in_hex_and_never_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = StateDescriptor("fields", key="k", field="f", value="v")
    scores = StateDescriptor("scores", key="k", member="m", score="s")
    values = (b"caf\xc3\xa9", b"\xe9", b"\xc3\xa9")
    with LogWriter(tmp_path, "job", [STATE, fields, scores]) as writer:
        for value in values:
            writer.publish(
                [
                    Change("temp", Op.PUT, b"job:temp:a", None, value),
                    Change("fields", Op.PUT, b"job:fields:a", b"f", value),
                    Change("scores", Op.PUT, b"job:scores:a", value, b"inf"),
                    Change("scores", Op.PUT, b"job:scores:a", b"b", b"7"),
                ]
            )

    def history_of(key: str) -> list[tuple[object, object]]:
        assert main(["history", key, "--log", str(tmp_path), "--json"]) == 0
        lines = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
        return [(each["value"], each.get("value_hex")) for each in lines]

    assert history_of("job:temp:a") == [("é", None), (None, "e9"), ("café", None)]
    assert history_of("job:fields:a")[1] == (None, {"66": "e9"})
    assert history_of("job:scores:a")[1:] == [
        (None, [["62", 7], ["636166c3a9", "inf"], ["e9", "inf"]]),
        ([["b", 7], ["café", "inf"]], None),
    ]
    assert main(["history", "job:temp:a", "--log", str(tmp_path)]) == 0
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()] == [
        '"\\u00e9"',
        'hex "e9"',
        '"caf\\u00e9"',
    ]
