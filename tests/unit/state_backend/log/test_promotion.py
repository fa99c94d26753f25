"""Readers keep the old state while a new generation is held back, until the file of its promotion exists."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.applier import Applier
from state_backend.apply.replay import read_snapshot
from state_backend.log import promotion
from state_backend.log.change_log import ChangeLog, JobLog
from state_backend.log.garbage_collector import sweep
from state_backend.log.log_writer import LogWriter
from state_backend.log.promotion import promote
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogError
from tests.builders import put_value

STATE = StateDescriptor("s", key="k", value="v")
FAR_MS = 1 << 50


put = partial(put_value, "s", b"job:s:a")


class Reader:
    """An applier, and what its readers know."""

    def __init__(self, log: Path, folder: Path) -> None:
        self.known: dict[str, Any] = {}
        self._applier = Applier(ChangeLog(log), "job", folder, self.known.update)

    def look(self) -> tuple[str, int, int | None]:
        """Return the query that is shown, its epoch, and the epoch that is held back."""
        self._applier.step()
        return self.known["generation"].partition(".")[0], self.known["applied"], self.known["held_back_epoch"]

    def close(self) -> None:
        self._applier.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log with two epochs of the query `old`."""
    with LogWriter(tmp_path / "log", "job", [STATE], "old", sends_heartbeats=False) as writer:
        writer.publish([put(b"1")])
        writer.publish([put(b"2")])
    return tmp_path / "log"


def begin(root: Path, query_id: str = "new", *, holds_back: bool = True) -> LogWriter:
    return LogWriter(root, "job", [STATE], query_id, takeover=True, holds_back=holds_back, sends_heartbeats=False)


def job(root: Path) -> JobLog:
    return ChangeLog(root).job("job")


def value(root: Path) -> bytes | None:
    with read_snapshot(root, "job") as snapshot:
        return snapshot.value(b"job:s:a")


def test_readers_see_new_generation_once_promoted(root: Path, tmp_path: Path) -> None:
    there = Reader(root, tmp_path / "there")
    assert there.look() == ("old", 1, None)
    writer = begin(root)
    assert writer.held_back is not None
    assert (writer.held_back.visible.epoch, writer.held_back.since_ms > 0) == (1, True)
    writer.publish([put(b"half")])
    comes = Reader(root, tmp_path / "comes")
    for reader in (there, comes):
        assert reader.look() == ("old", 1, 0)
        assert reader.known["held_back_since_ms"] == writer.held_back.since_ms
        assert reader.known["is_stale"] is True
    assert value(root) == b"2"
    writer.publish([put(b"whole")])
    assert there.look() == ("old", 1, 1)
    assert writer.promote("it is whole")
    assert writer.held_back is None
    for reader in (there, comes, Reader(root, tmp_path / "late")):
        assert reader.look() == ("new", 1, None)
        assert reader.known["held_back_since_ms"] is None
        reader.close()
    assert value(root) == b"whole"


def test_generation_with_nothing_before_it_is_not_held_back(tmp_path: Path) -> None:
    with begin(tmp_path / "log") as writer:
        assert writer.held_back is None
    with begin(tmp_path / "log", "another") as writer:  # before that one there was no epoch
        assert writer.held_back is None
        writer.publish([put(b"1")])
        assert value(tmp_path / "log") == b"1"
    with begin(tmp_path / "log", "third", holds_back=False) as writer:
        assert writer.held_back is None


def test_held_back_generation_stays_so_after_restart_of_its_writer(root: Path) -> None:
    with begin(root) as writer:
        writer.publish([put(b"half")])
        since_ms = writer.held_back.since_ms if writer.held_back else 0
    for holds_back in (True, False):
        with begin(root, holds_back=holds_back) as writer:
            assert writer.held_back is not None
            assert writer.held_back.since_ms == since_ms
            writer.publish([put(b"more")])
    assert value(root) == b"2"
    writer.promote("it is whole")
    with begin(root) as writer:
        assert writer.held_back is None
    assert value(root) == b"more"


def test_checkpoint_that_is_set_back_stays_held_back(root: Path) -> None:
    with LogWriter(root, "job", [STATE], "new", "truncate", takeover=True, holds_back=True) as writer:
        for text in (b"a", b"b", b"c"):
            writer.publish([put(text)])
        writer.publish([put(b"again")], 1)
        assert writer.held_back is not None
        assert value(root) == b"2"
        writer.promote("it is whole")
        assert value(root) == b"again"


def test_sweep_keeps_visible_generation_and_removes_earlier(root: Path) -> None:
    writer = begin(root)
    writer.publish([put(b"half")])
    current = job(root).current()
    assert current is not None
    sweep(job(root), current, FAR_MS, 0)
    assert value(root) == b"2"
    writer.promote("it is whole")
    sweep(job(root), current, FAR_MS, 0)
    assert value(root) == b"half"
    assert not list((root / "job").glob("old.*"))


def test_either_held_back_generation_may_be_shown(root: Path) -> None:
    first = begin(root, "first")
    first.publish([put(b"first")])
    second = begin(root, "second")
    second.publish([put(b"second")])
    assert value(root) == b"2"
    promotion.make_visible(job(root), first.current, "by a writer that was away")
    assert value(root) == b"first"
    second.promote("it is whole")
    assert value(root) == b"second"


def test_promote_shows_held_back_generation_or_fails_without_one(root: Path) -> None:
    with pytest.raises(LogError, match="job 'job': nothing is held back; readers see generation old"):
        promote(root, "job")
    with pytest.raises(LogError, match="has no job 'jbo'; jobs: job"):
        promote(root, "jbo")
    writer = begin(root)
    with pytest.raises(LogError, match=r"generation new.* has no epoch yet"):
        promote(root, "job")
    assert not writer.poll_promotion()
    writer.publish([put(b"half")])
    assert promote(root, "job").endswith("from now on, at epoch 0")
    assert writer.held_back is not None
    assert writer.poll_promotion()
    assert not writer.poll_promotion()
    assert value(root) == b"half"


def test_command_prints_visible_generation_or_reason(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    promotion.add_options(parser)
    options = parser.parse_args(["--log", str(root), "job"])
    assert promotion.run(options) == 1
    assert "sparkis promote: job 'job': nothing is held back" in capsys.readouterr().err
    begin(root).publish([put(b"half")])
    assert promotion.run(options) == 0
    assert capsys.readouterr().out.endswith("from now on, at epoch 0\n")
    assert value(root) == b"half"
    for missing in (["--log", str(root)], ["job"]):
        with pytest.raises(SystemExit):
            parser.parse_args(missing)


def test_generation_without_claim_began_at_unknown_time(root: Path) -> None:
    assert promotion.since_ms(job(root), "old.7") == 0
