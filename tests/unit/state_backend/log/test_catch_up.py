"""The state of a query with a new checkpoint becomes visible when the query has caught up, and not earlier."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.log.catch_up import CatchUp, check_timeout
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.log.promotion import promote
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError

STATE = StateDescriptor("s", key="k", value="v")
OLD, PAST = '{"t":{"0":5}}', '{"t":{"0":6}}'
OLD_CLOCK_MS = 1_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log in which a query has read up to the offsets OLD."""
    with LogWriter(tmp_path / "log", "job", [STATE], "old") as writer:
        writer.commit(0, clock_ms=1)
        writer.commit(1, clock_ms=OLD_CLOCK_MS, offsets=(OLD,))
    return tmp_path / "log"


@pytest.fixture
def writer(root: Path, caplog: pytest.LogCaptureFixture) -> Iterator[LogWriter]:
    """The writer of the query's new checkpoint."""
    caplog.set_level(logging.INFO)
    with LogWriter(root, "job", [STATE], "new", takeover=True, holds_back=True) as writer:
        yield writer


class Query:
    """A query whose input and clock the test decides."""

    def __init__(self, writer: LogWriter, timeout_s: float | None = None) -> None:
        assert writer.held_back is not None
        self.clock_ms = self._since_ms = writer.held_back.since_ms
        self.idle_after: int | None = None  # the epoch after which no input was found
        self.catch_up = CatchUp(writer, timeout_s, lambda epoch: epoch == self.idle_after, lambda: self.clock_ms)

    def wait_until_ms(self, elapsed_ms: int) -> None:
        """Set the clock to a time after the generation's beginning."""
        self.clock_ms = self._since_ms + elapsed_ms


def visible_generation(root: Path) -> str:
    """Return the query whose state readers see."""
    visible = ChangeLog(root).job("job").visible()
    assert visible is not None
    return visible.generation.partition(".")[0]


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged after the warning at the start."""
    records = (record for record in caplog.records if record.levelno == logging.INFO)
    return [record.getMessage() for record in records if record.name == "sparkis.sink"]


def test_query_whose_sources_have_passed_old_offsets_has_caught_up(
    root: Path, writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(writer)
    writer.publish([])
    for behind in (['{"t":{"0":4}}'], [], [OLD, OLD]):
        query.catch_up.on_commit(behind)
        assert (visible_generation(root), query.catch_up.is_done) == ("old", False)
    query.catch_up.on_commit([OLD])
    assert (visible_generation(root), query.catch_up.is_done) == ("new", True)
    query.catch_up.on_commit([PAST])
    assert announced(caplog) == [
        "job job: the new state is visible from now on: its sources have passed the offsets of the old state"
    ]


def test_query_without_input_has_caught_up(root: Path, writer: LogWriter, caplog: pytest.LogCaptureFixture) -> None:
    query = Query(writer)
    writer.publish([])
    writer.publish([])
    query.idle_after = 0  # before the last epoch
    query.catch_up.check()
    assert visible_generation(root) == "old"
    query.idle_after = 1
    query.catch_up.check(is_behind=True)
    assert (visible_generation(root), query.catch_up.is_done) == ("old", False)
    query.catch_up.check()
    assert (visible_generation(root), query.catch_up.is_done) == ("new", True)
    assert announced(caplog) == ["job job: the new state is visible from now on: no input is waiting"]
    stored = json.loads((root / writer.log.promotion_path(writer.generation)).read_bytes())
    assert stored["reason"] == "no input is waiting"


def test_query_that_does_not_catch_up_in_time_is_shown(
    root: Path, writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(writer, 2.5)
    writer.publish([])
    query.wait_until_ms(2_499)
    query.catch_up.check()
    assert visible_generation(root) == "old"
    query.wait_until_ms(2_500)
    query.catch_up.check(is_behind=True)
    assert (visible_generation(root), query.catch_up.is_done) == ("new", True)
    assert announced(caplog) == ["job job: the new state is visible from now on: 2.5 s have passed"]


def test_query_without_timeout_is_held_back_until_it_has_caught_up(root: Path, writer: LogWriter) -> None:
    query = Query(writer, None)
    writer.publish([])
    query.wait_until_ms(10**12)
    query.catch_up.check()
    assert visible_generation(root) == "old"


def test_query_without_epoch_has_nothing_to_show(root: Path, writer: LogWriter) -> None:
    query = Query(writer, 0)
    query.wait_until_ms(10**12)
    query.catch_up.check()
    assert (visible_generation(root), query.catch_up.is_done) == ("old", False)


def test_promoted_query_is_done(root: Path, writer: LogWriter, caplog: pytest.LogCaptureFixture) -> None:
    query = Query(writer)
    writer.publish([])
    promote(root, "job")
    query.idle_after = 0
    query.catch_up.check()
    query.catch_up.check()
    assert query.catch_up.is_done
    assert announced(caplog) == ["job job: readers see the new state now: `sparkis promote` made it visible"]


def test_state_promoted_by_hand_is_not_announced_again(
    root: Path, writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(writer)
    writer.publish([])
    promote(root, "job")
    query.catch_up.on_commit([PAST])
    assert query.catch_up.is_done
    assert announced(caplog) == []


def test_query_that_continues_with_its_checkpoint_is_not_held_back(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LogWriter(root, "job", [STATE], "old", holds_back=True) as writer:
        catch_up = CatchUp(writer, 0, lambda _: True)
        catch_up.check()
        catch_up.on_commit([PAST])
        assert catch_up.is_done
    assert caplog.messages == []


@pytest.mark.parametrize(("timeout_s", "limit"), [(None, ""), (600.0, ", at most 600 s"), (0.5, ", at most 0.5 s")])
def test_held_back_generation_is_logged_with_command_to_show_it(
    root: Path, writer: LogWriter, timeout_s: float | None, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    Query(writer, timeout_s)
    (warning,) = caplog.messages
    assert warning == (
        "job job: query new started with a new checkpoint; readers keep the state of epoch 1, of "
        f"1970-01-01T00:00:01.000Z, until the query has caught up{limit}. To make the new state visible now: "
        f"sparkis promote --log {root} job"
    )


@pytest.mark.parametrize("timeout_s", [-1, -0.1, "5", "soon", [5]])
def test_timeout_that_is_no_number_of_seconds_is_refused(timeout_s: object) -> None:
    with pytest.raises(DescriptorError, match=rf"^catch_up_timeout= is a .*, not {re.escape(repr(timeout_s))}$"):
        check_timeout(timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [None, 0, 0.5, 600])
def test_number_of_seconds_or_none_is_timeout(timeout_s: float | None) -> None:
    check_timeout(timeout_s)
