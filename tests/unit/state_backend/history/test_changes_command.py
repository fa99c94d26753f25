"""`sparkis changes` on the terminal, as JSON, from a moment on, and while the job goes on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from spark_hooks.cli import main
from state_backend.codec import keep_by_order, packed_list, packed_map, packed_sorted
from state_backend.history.changes_command import changes
from state_backend.log.change_log import ChangeLog
from state_backend.log.feed_mark import NO_ENTRY
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

START_MS = 1_700_000_000_000
STATES = [
    StateDescriptor("temp", key="k", value="v"),
    StateDescriptor("map", key="k", value=("a", "b")),
    StateDescriptor("list", key="k", value="v", kind="list"),
    StateDescriptor("set", key="k", member="m"),
    StateDescriptor("top", key="k", member="m", score="s"),
    StateDescriptor("sum", key="k", value="v", reduce="sum", columns={"v": "bigint"}),
    StateDescriptor("last", key="k", value=("a", "b"), last_by="t"),
]


def lines_of(log: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["changes", "job", "--log", str(log), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with LogWriter(tmp_path, "job", STATES) as writer:
        for number, value in enumerate((b"1", b"\xff", None)):
            op = Op.DELETE if value is None else Op.PUT
            writer.publish([Change("temp", op, b"job:temp:a", None, value)], clock_ms=START_MS + number * 1000)
        writer.publish([Change("set", Op.PUT, b"job:set:a", b"m", b"")], replaces=["set"], clock_ms=START_MS + 3000)
    return tmp_path


def test_changes_are_shown_in_their_order(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(log, capsys) == [
        "2023-11-14T22:13:20.000Z  epoch 0         put     job:temp:a  value=1",
        '2023-11-14T22:13:21.000Z  epoch 1         put     job:temp:a  value="\\xff"',
        "2023-11-14T22:13:22.000Z  epoch 2         delete  job:temp:a",
        "2023-11-14T22:13:23.000Z  epoch 3         replace set",
        "2023-11-14T22:13:23.000Z  epoch 3         put     job:set:a  field=m",
    ]


def test_changes_are_shown_from_moment_on_and_of_one_state(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_epoch = lines_of(log, capsys, "--from", "1", "--state", "temp", "--json")
    assert lines_of(log, capsys, "--from", "2023-11-14T22:13:21Z", "--state", "temp", "--json") == from_epoch
    assert [json.loads(line) for line in from_epoch] == [
        {
            "id": f"{START_MS + 1000}-1",
            "op": "put",
            "epoch": "1",
            "state": "temp",
            "key": "job:temp:a",
            "value_hex": "ff",
        },
        {"id": f"{START_MS + 2000}-1", "op": "delete", "epoch": "2", "state": "temp", "key": "job:temp:a"},
    ]


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (Change("temp", Op.PUT, b"k", None, b"1", 99), {"op": "put", "value": "1", "expires": "99"}),
        (Change("map", Op.PUT, b"k", None, packed_map.pack([(b"a", b"1")])), {"op": "put", ".a": "1"}),
        (Change("map", Op.PUT, b"k", b"a", b"1"), {"op": "put", "field": "a", "value": "1"}),
        (Change("map", Op.DELETE, b"k", b"a"), {"op": "delete", "field": "a"}),
        (Change("map", Op.CLEAR, b"k"), {"op": "clear"}),
        (Change("list", Op.APPEND, b"k", None, b"1"), {"op": "append", "value": "1"}),
        (
            Change("list", Op.PUT, b"k", None, packed_list.pack([b"1", b"\xe4"])),
            {"op": "put", "value_hex": '["31", "e4"]'},
        ),
        (Change("set", Op.PUT, b"k", None, packed_list.pack([b"m", b"a"])), {"op": "put", "value": '["a", "m"]'}),
        (
            Change("top", Op.PUT, b"k", None, packed_sorted.pack_members([(b"m", 2.0), (b"a", 1.5)])),
            {"op": "put", "value": '[["a", 1.5], ["m", 2]]'},
        ),
        (Change("top", Op.PUT, b"k", b"m", b"1.5"), {"op": "put", "field": "m", "value": "1.5"}),
        (Change("sum", Op.FOLD, b"k", None, b"7"), {"op": "fold", "operator": "sum", "operand": "7"}),
        (
            Change("last", Op.FOLD, b"k", None, keep_by_order.pack(b"\x01", packed_map.pack([(b"a", b"1")]))),
            {"op": "fold", "operator": "last_by", ".a": "1"},
        ),
    ],
)
def test_fields_of_entry_follow_kind_of_change(
    tmp_path: Path, change: Change, fields: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with LogWriter(tmp_path, "job", STATES) as writer:
        writer.publish([change], clock_ms=START_MS)
    (line,) = lines_of(tmp_path, capsys, "--json")
    head = {"id": f"{START_MS}-1", "epoch": "0", "state": change.state, "key": "k"}
    assert json.loads(line) == head | fields


def test_follower_gets_later_epochs_once_and_reset_with_new_checkpoint(log: Path) -> None:
    following = changes(ChangeLog(log).job("job"), NO_ENTRY, "temp", follows=True)
    assert [entry.fields[1] for entry in islice(following, 3)] == [b"put", b"put", b"delete"]
    with LogWriter(log, "job", STATES) as writer:
        writer.publish([Change("temp", Op.PUT, b"job:temp:b", None, b"2")])
    assert next(following).fields[7] == b"job:temp:b"
    with LogWriter(log, "job", STATES, "another", takeover=True) as writer:
        writer.publish([Change("temp", Op.PUT, b"job:temp:c", None, b"3")])
    assert next(following).fields == [b"op", b"reset", b"epoch", b"0", b"reason", b"start"]
    assert next(following).fields[7] == b"job:temp:c"


def test_missing_epochs_and_states_are_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["changes", "other", "--log", str(log)]) == 1
    assert "has no job 'other'" in capsys.readouterr().err
    assert main(["changes", "job", "--log", str(log), "--state", "none"]) == 1
    assert "has no state 'none'; states: temp, " in capsys.readouterr().err
    assert main(["changes", "job", "--log", str(log), "--from", "99"]) == 1
    assert "epoch 99 is not committed" in capsys.readouterr().err
