"""A flipped bit in any file of a log is an error that names the file, or changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from state_backend.apply.compact import compact_log
from state_backend.log.change_log import ChangeLog
from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.identity import identity_of
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogCorruptError
from state_backend.model.records import Change, Op

STATE = StateDescriptor("g", key="k", value="v")
# Larger files are damaged at every 64th bit only.
SMALL_BYTES = 4 << 10
# More than an epoch's file takes itself.
MANY = 4_000


class DamagedFilesystem(LocalFilesystem):
    """A folder in which one bit of one file is read wrongly."""

    def __init__(self, root: Path, path: str, bit: int) -> None:
        super().__init__(root)
        self._path, self._bit = path, bit

    def read(self, path: str) -> bytes | None:
        stored = super().read(path)
        if path != self._path or stored is None:
            return stored
        flipped = bytearray(stored)
        flipped[self._bit // 8] ^= 1 << self._bit % 8
        return bytes(flipped)

    def open_input(self, path: str) -> pa.Buffer | None:
        if path != self._path:
            return super().open_input(path)
        return pa.py_buffer(self.read(path))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with all kinds of files: a restarted query, a snapshot, a change file, a held-back generation, a drop."""
    folder = tmp_path_factory.mktemp("log")
    with LogWriter(folder, "job", [STATE], "q") as writer:
        writer.publish([Change("g", Op.PUT, b"job:g:1", value=b"1")])
        writer.publish([Change("g", Op.PUT, b"job:g:%d" % number, value=b"v" * 20) for number in range(MANY)])
    compact_log(str(folder), "job", retention_ms=3_600_000)
    with LogWriter(folder, "job", [STATE], "q") as writer:
        writer.publish([Change("g", Op.PUT, b"job:g:2", value=b"2")])
        writer.mark_final()
    with LogWriter(folder, "job", [STATE], "new", takeover=True, holds_back=True) as writer:
        writer.publish([Change("g", Op.PUT, b"job:g:3", value=b"3")])
    return folder


def facts_of_log(log: ChangeLog) -> Iterator[Any]:
    """Iterate over all that servers and writers learn from a log; LogCorruptError for a sign of damage."""
    yield log.jobs()
    yield identity_of(log.filesystem)
    job = log.job("job")
    current, visible = job.current(), job.visible()
    assert current is not None and visible is not None
    yield current, visible
    for term in range(1, 4):
        yield job.terms.read(term)
        yield job.terms.claim(term)
        heartbeat = job.terms.heartbeat(term)
        if not heartbeat:
            raise LogCorruptError("the job counts as stale, with a warning")
        yield [heartbeat.get(name) for name in ("writer", "count", "interval_s", "is_running", "is_final")]
    for generation in (visible.generation, visible.held_back or ""):
        yield job.description(generation)
    manifests = list(job.complete_snapshots(visible))
    if job.damaged_snapshots:
        raise LogCorruptError("the snapshot is not used, with a warning")
    for each in (visible, current):
        for number in job.numbers(each.generation):
            epoch = job.epoch(each, number)
            assert epoch is not None
            yield epoch
            yield list(job.runs(each.generation, epoch))
    for manifest in manifests:
        yield manifest
        folder = job.snapshot_folder(visible.generation, manifest.epoch)
        yield list(job.runs_in_folder(folder, manifest))


def is_noticed(root: Path, path: str, bit: int, expected: list[Any]) -> bool:
    """Return whether a flipped bit is an error; AssertionError if it changes an answer and is none."""
    log = ChangeLog(DamagedFilesystem(root, path, bit))
    try:
        for found, was in zip(facts_of_log(log), expected, strict=True):
            assert found == was, f"bit {bit} of {path} is silent"
    except LogCorruptError:
        return True
    return False


@pytest.mark.parametrize("step", [193, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bit_of_any_file_is_error_or_changes_no_answer(root: Path, step: int) -> None:
    expected = list(facts_of_log(ChangeLog(root)))
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.stat().st_size]
    kinds = {path.suffix for path in files} | {path.parent.name for path in files if path.suffix == ".json"}
    assert kinds >= {".claim", ".json", ".arrow", "terms", "heartbeats", "epochs"}
    noticed = {}
    for path in files:
        size, name = path.stat().st_size, str(path.relative_to(root))
        bits = range(step % 8, size * 8, step if size <= SMALL_BYTES else 64 * step)
        noticed[name] = sum(is_noticed(root, name, bit, expected) for bit in bits) / len(bits)
    # Files of the past of the job are read, too: each of them notices nearly all flips.
    assert {name for name, share in noticed.items() if share < 0.9} <= set(), noticed


def test_bit_in_name_of_state_is_error_of_job(root: Path) -> None:
    path = root / "job/terms/2.json"
    stored = path.read_bytes()
    bit = 8 * stored.index(b'"g"') + 8 + 4  # g becomes w
    log = ChangeLog(DamagedFilesystem(root, "job/terms/2.json", bit)).job("job")
    with pytest.raises(LogCorruptError, match=r"job/terms/2\.json does not match its checksum; restore it from a copy"):
        log.visible()


def test_files_without_checksum_are_read_as_older_versions_wrote_them(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "job", [STATE], "q") as writer:
        writer.publish([Change("g", Op.PUT, b"job:g:1", value=b"1")])
    before = ChangeLog(tmp_path).job("job")
    expected = before.visible(), before.terms.claim(1), before.heartbeat()
    for path in [*tmp_path.glob("job/terms/*"), *tmp_path.glob("job/heartbeats/*")]:
        content = json.loads(path.read_bytes())
        del content["checksum"]
        path.write_text(json.dumps(content))
    older = ChangeLog(tmp_path).job("job")
    assert (older.visible(), older.terms.claim(1), older.heartbeat()) == expected
    with LogWriter(tmp_path, "job", [STATE], "q") as writer:
        assert writer.publish([]) == 1


def test_file_under_name_of_another_one_is_error(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "job", [STATE], "q") as writer:
        for _ in range(2):
            writer.publish([Change("g", Op.PUT, b"job:g:1", value=b"1")])
    log = ChangeLog(tmp_path).job("job")
    current = log.visible()
    assert current is not None
    epochs, terms = tmp_path / "job" / current.generation / "epochs", tmp_path / "job/terms"
    (epochs / "1.json").write_bytes((epochs / "0.json").read_bytes())
    with pytest.raises(LogCorruptError, match=r"1\.json is the file of epoch 0"):
        log.epoch(current, 1)
    for suffix in ("json", "claim"):
        (terms / f"2.{suffix}").write_bytes((terms / f"1.{suffix}").read_bytes())
    with pytest.raises(LogCorruptError, match=r"2\.json is the file of number 1"):
        log.terms.read(2)
    with pytest.raises(LogCorruptError, match=r"2\.claim is the file of number 1"):
        log.terms.claim(2)


def test_checksum_is_of_content_and_not_of_its_form() -> None:
    content = {"b": [1, 2.5, None, "é"], "a": {"nested": True}}
    stored = with_checksum(content, indent=1)
    assert checked_object(stored) == content
    assert checked_object(json.dumps(json.loads(stored), sort_keys=True, ensure_ascii=False).encode()) == content
