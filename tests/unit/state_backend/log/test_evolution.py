"""Changes of a job's states while its checkpoint stays: the allowed ones, and the refused ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError
from state_backend.model.records import Change, Op

VALUE: dict[str, Any] = {"key": "k", "value": "v"}
FIELDS: dict[str, Any] = {"key": "k", "field": "f", "value": "v"}
MEMBERS: dict[str, Any] = {"key": "k", "member": "m"}


def begin(root: Path, *states: StateDescriptor, **more: Any) -> LogWriter:
    return LogWriter(root, "job", states, "q", **{"sends_heartbeats": False} | more)


def state(name: str = "s", **arguments: Any) -> StateDescriptor:
    return StateDescriptor(name, **(VALUE | arguments))


RANKED: dict[str, Any] = MEMBERS | {"value": ()}
BY_TIME: dict[str, Any] = {"last_by": "t"}


def late(root: Path) -> tuple[str, ...]:
    return ChangeLog(root).job("job").description("q.1").incomplete


@pytest.mark.parametrize(
    ("before", "now", "complaint"),
    [
        (VALUE, FIELDS, "its kind was 'value' in this log and is now 'map'"),
        (VALUE, VALUE | {"kind": "list"}, "its kind was 'value' in this log and is now 'list'"),
        (VALUE, VALUE | {"value": ["v", "w"]}, "its kind was 'value' in this log and is now 'map'"),
        (VALUE, VALUE | {"key": "j"}, "its key was 'job:s:<k>' in this log and is now 'job:s:<j>'"),
        (VALUE, VALUE | {"key": ["k", "j"]}, "its key was 'job:s:<k>' in this log and is now 'job:s:<k>:<j>'"),
        (VALUE, {"key_format": "x/<k>", "value": "v"}, "its key was 'job:s:<k>' in this log and is now 'x/<k>'"),
        (FIELDS, FIELDS | {"field": "g"}, "its field was 'f' in this log and is now 'g'"),
        (FIELDS, VALUE | {"value": ["v", "w"]}, "its field was 'f' in this log and is now nothing"),
        (MEMBERS, MEMBERS | {"score": "n"}, "its kind was 'set' in this log and is now 'sorted-set'"),
        (FIELDS, MEMBERS, "its kind was 'map' in this log and is now 'set'"),
        (MEMBERS, MEMBERS | {"member": "n"}, "its member was 'm' in this log and is now 'n'"),
        (
            MEMBERS | {"columns": {"m": "date"}},
            MEMBERS | {"columns": {"m": "timestamp"}},
            "the type of its column 'm' was date in this log and is now timestamp",
        ),
        (VALUE, VALUE | {"last_by": "t"}, "its order was nothing in this log and is now last_by='t'"),
        (VALUE | {"last_by": "t"}, VALUE | {"max_by": "t"}, "its order was last_by='t' in this log and is now max_by="),
        (
            VALUE | {"last_by": "t", "columns": {"t": "int"}},
            VALUE | {"last_by": "t", "columns": {"t": "string"}},
            "its order was last_by='t int' in this log and is now last_by='t string'",
        ),
        (VALUE, VALUE | {"time_format": "HH"}, "its time_format was nothing in this log and is now 'HH'"),
        (VALUE, VALUE | {"reduce": "max"}, "its reduction was nothing in this log and is now reduce='max'"),
        (
            VALUE | {"columns": {"k": "date"}},
            VALUE | {"columns": {"k": "timestamp"}},
            "the type of its column 'k' was date in this log and is now timestamp, with other keys",
        ),
        (
            VALUE | {"columns": {"k": "int"}},
            VALUE | {"columns": {"k": "double"}},
            "the type of its column 'k' was int in this log and is now double, with other keys",
        ),
        (
            FIELDS | {"columns": {"f": "float"}},
            FIELDS | {"columns": {"f": "double"}},
            "the type of its column 'f' was float in this log and is now double",
        ),
    ],
)
def test_change_that_would_leave_wrong_keys_is_refused_with_remedy(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], complaint: str
) -> None:
    types = {"columns": {"v": "bigint"}}
    older = begin(tmp_path, StateDescriptor("s", **types | before))
    older.publish([])
    with pytest.raises(DescriptorError) as refused:
        begin(tmp_path, StateDescriptor("s", **types | now))
    assert complaint in str(refused.value)
    assert "give the state another name" in str(refused.value)
    assert "start the query with a new checkpoint" in str(refused.value)
    older.publish([])  # what is refused takes nothing over


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [
        ({"ttl": 5}, {"ttl": 60}, None),
        ({}, {"ttl": 60}, None),
        ({}, {"order_by": "t"}, None),
        ({}, {"duplicates": "any"}, None),
        ({}, {"deletion": "gone"}, None),
        ({"columns": {"k": "int"}}, {"columns": {"k": "string"}}, None),
        ({"kind": "list", "length_max": 5}, {"kind": "list", "length_max": 9}, None),
        ({}, {"columns": {"v": "double"}}, None),
        ({"columns": {"v": "int"}}, {}, None),
        (BY_TIME | {"columns": {"t": "int"}}, BY_TIME | {"columns": {"t": "bigint"}}, None),
        (BY_TIME | {"columns": {"t": "bigint"}}, BY_TIME | {"columns": {"t": "tinyint"}}, None),
        ({"columns": {"v": "int"}}, {"columns": {"v": "double"}}, "the column 'v' was int and is now double"),
        ({}, {"encoding": "json"}, "its encoding was text and is now json, for each value from its next change on"),
        (
            {},
            {"where": "v > 5"},
            "where= was None and is now 'v > 5'; keys that only the earlier condition selected stay",
        ),
        ({}, {"value": "w"}, "its value was 'v' and is now 'w'; a key has the new value from its next change on"),
        ({"value": ["v", "w"]}, {"value": ["v", "w", "x"]}, "its value was 'v', 'w' and is now 'v', 'w', 'x'"),
        ({"value": ["v", "w", "x"]}, {"value": ["v", "w"]}, "its value was 'v', 'w', 'x' and is now 'v', 'w'"),
        (
            RANKED | {"score": "n"},
            RANKED | {"score": "o"},
            "its score was 'n' and is now 'o'; a member has the new score",
        ),
    ],
)
def test_harmless_change_continues_and_unchanged_keys_are_logged(
    tmp_path: Path,
    before: dict[str, Any],
    now: dict[str, Any],
    note: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin(tmp_path, state(**before)).publish([Change("s", Op.DELETE, b"job:s:a", None, None)])
    with caplog.at_level(logging.WARNING):
        begin(tmp_path, state(**now)).publish([])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (note is not None)
    assert note is None or note in said[0]
    assert late(tmp_path) == ()


def test_added_state_has_only_later_changes_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, state()).publish([])
    begin(tmp_path, state(), state("t", value="w")).publish([])
    assert late(tmp_path) == ("t",)
    assert "the state 't' begins in the middle of the query" in caplog.text
    caplog.clear()
    begin(tmp_path, state(), state("t", value="w")).publish([])
    assert (late(tmp_path), caplog.text) == (("t",), "")
    begin(tmp_path, state(), state("t", value="w", ttl=5)).publish([])
    assert late(tmp_path) == ("t",)


def test_complete_mode_keeps_nothing_of_earlier_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hours = StateDescriptor("hours", **FIELDS, columns={"k": "date", "f": "int"})
    days = StateDescriptor("hours", **FIELDS | {"field": "g"}, columns={"k": "timestamp", "f": "int"}, where="g > 1")
    begin(tmp_path, state(), hours, rewrites_states=True).publish([], replaces=["s", "hours"])
    begin(tmp_path, state("t"), days, rewrites_states=True).publish([], replaces=["t", "hours"])
    assert late(tmp_path) == ()
    assert caplog.messages == ["job job: the state 's' is left out, and its keys are removed"]
    with pytest.raises(DescriptorError, match="its kind was 'map' in this log and is now 'value'"):
        begin(tmp_path, state("t"), state("hours"), rewrites_states=True)


def test_incomplete_state_is_complete_once_written_whole(tmp_path: Path) -> None:
    begin(tmp_path, state()).publish([])
    begin(tmp_path, state(), state("t", value="w")).publish([])
    assert late(tmp_path) == ("t",)
    begin(tmp_path, state(), state("t", value="w"), rewrites_states=True).publish([], replaces=["s", "t"])
    assert late(tmp_path) == ()


def test_added_internal_state_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, state()).publish([])
    begin(tmp_path, state(), state("_progress", value="w")).publish([])
    assert (late(tmp_path), caplog.text) == ((), "")


def test_states_of_query_that_has_no_epoch_yet_may_be_added(tmp_path: Path) -> None:
    begin(tmp_path, state())
    begin(tmp_path, state(), state("t", value="w")).publish([])
    assert late(tmp_path) == ()


def test_returning_state_equals_added_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, state(), state("t", value="w")).publish([Change("t", Op.PUT, b"job:t:a", None, b"1")])
    begin(tmp_path, state()).publish([])
    assert "the state 't' is left out, and its keys are removed" in caplog.text
    begin(tmp_path, state(), state("t", value="w")).publish([])
    assert late(tmp_path) == ("t",)
    with read_snapshot(tmp_path, "job") as snapshot:
        assert snapshot.applied.key_count == 0
    with pytest.raises(DescriptorError, match=r"its key was 'job:t:<k>' in this log and is now 'job:t:<j>'"):
        begin(tmp_path, state(), state("t", key="j"))


def test_renamed_state_is_refused(tmp_path: Path) -> None:
    begin(tmp_path, state(), state("t", value="w")).publish([])
    with pytest.raises(DescriptorError, match=r"the state 't' is now called 'u'.*Keep the name 't'"):
        begin(tmp_path, state(), state("u", value="w"))
    begin(tmp_path, state()).publish([])
    begin(tmp_path, state(), state("u", value="w")).publish([])
    assert late(tmp_path) == ("u",)


def test_one_state_in_place_of_another_is_not_rename(tmp_path: Path) -> None:
    begin(tmp_path, state()).publish([])
    begin(tmp_path, state("t", value="w")).publish([])
    assert late(tmp_path) == ("t",)


def test_renamed_query_is_refused_with_command_to_run(tmp_path: Path) -> None:
    begin(tmp_path, state()).publish([])
    with pytest.raises(DescriptorError, match=f"sparkis rename --log {tmp_path} job other"):
        LogWriter(tmp_path, "other", [state()], "q")
    assert ChangeLog(tmp_path).jobs() == ["job"]
    LogWriter(tmp_path, "other", [state()], "q2").publish([])
    begin(tmp_path, state()).publish([])


def test_renamed_query_is_found_behind_damaged_job(tmp_path: Path) -> None:
    LogWriter(tmp_path, "damaged", [state()], "q2").publish([])
    (tmp_path / "damaged" / "terms" / "1.json").write_text("[]")
    begin(tmp_path, state()).publish([])
    with pytest.raises(DescriptorError, match=f"sparkis rename --log {tmp_path} job other"):
        LogWriter(tmp_path, "other", [state()], "q")


def test_query_that_has_no_epoch_yet_may_have_another_name(tmp_path: Path) -> None:
    begin(tmp_path, state())
    LogWriter(tmp_path, "other", [state()], "q").publish([])


def test_one_query_may_publish_several_jobs(tmp_path: Path) -> None:
    one = begin(tmp_path, state())
    one.publish([])
    other = LogWriter(tmp_path, "other", [state()], "q", siblings=[one.current.writer])
    other.publish([])
    assert ChangeLog(tmp_path).jobs() == ["job", "other"]
    one.publish([])


def test_damage_of_another_job_is_not_reported(tmp_path: Path) -> None:
    begin(tmp_path, state()).publish([])
    (tmp_path / "job" / "terms" / "1.json").write_text("[]")
    LogWriter(tmp_path, "other", [state()], "q2").publish([])
    assert ChangeLog(tmp_path).jobs() == ["job", "other"]
