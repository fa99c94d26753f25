"""Logs as released versions wrote them are read and continued; those of newer versions are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.golden_release import MANY, STATES
from state_backend.apply.compact import compact_log
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.errors import NewerFormatError
from tests.builders import write_log
from tests.golden_releases import RELEASES, extracted, raise_format

FORMATS = {f"format{number}": number for number in (1, 2, 3, 4)}


@pytest.fixture(params=RELEASES)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return extracted(request.param, tmp_path) / "log"


@pytest.mark.parametrize(("job", "number"), FORMATS.items())
def test_golden_job_has_its_format(log: Path, job: str, number: int) -> None:
    [newest] = (log / job).glob("*/epochs/2.json")
    assert json.loads(newest.read_text())["format"] == number


def check(log: Path) -> None:
    with read_snapshot(log, "format1") as one:
        assert (one.value(b"format1:value:0"), one.value(b"format1:value:1")) == (b"0", None)
        assert one.value(b"format1:value:%d" % (MANY - 1)) == b"%d" % (MANY - 1)
        assert dict(one.map_pairs(b"format1:fields:a")) == {b"x": b"1", b"y": b"2"}
        assert list(one.list_elements(b"format1:list:a", 0, 3)) == [b"2", b"3", b"4"]
    with read_snapshot(log, "format2") as two:
        assert two.value(b"format2:sum:a") == b"11"
    with read_snapshot(log, "format3") as three:
        assert list(three.members(b"format3:set:a")) == [b"y"]
        assert three.scores(b"format3:sorted:a", [b"x", b"y"]) == [1.5, -2.0]
    with read_snapshot(log, "format4") as four:
        assert four.value(b"format4:last:a") == b"last"


def test_golden_log_is_read_from_its_snapshots_and_epochs(log: Path) -> None:
    for job in STATES:
        assert [each.epoch for each in ChangeLog(log).job(job).snapshots(ChangeLog(log).job(job).visible())] == [1]
    check(log)


def test_golden_log_is_continued_and_compacted(log: Path) -> None:
    for job, states in STATES.items():
        write_log(log, job, [state.for_job(job) for state in states], [], query_id=f"query-{job}")
        compact_log(str(log), job, retention_ms=0)
    check(log)


def test_log_of_newer_version_is_refused_with_that_version(log: Path) -> None:
    """Files with a checksum have a right one: a newer version wrote them."""
    job = log / "format1"
    for path in ("query-format1.1/epochs/2.json", "query-format1.1/snapshots/1/manifest.json"):
        with raise_format(job / path) as expected, pytest.raises(NewerFormatError, match=expected):
            read_snapshot(log, "format1")
    with raise_format(job / "terms/1.json") as expected, pytest.raises(NewerFormatError, match=expected):
        read_snapshot(log, "format1")
    for path in ("terms/1.json", "terms/1.claim", "query-format1.1/epochs/2.json"):
        with raise_format(job / path) as expected, pytest.raises(NewerFormatError, match=expected):
            LogWriter(log, "format1", [state.for_job("format1") for state in STATES["format1"]], "query-format1")
    check(log)
