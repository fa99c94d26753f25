"""A log's identity: the first writer gives it, and no later one changes it."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from state_backend.log.change_log import ChangeLog
from state_backend.log.checked_json import with_checksum
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.identity import IDENTITY_FILE, ensure_identity, identity_of
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogCorruptError, NewerFormatError
from tests.builders import put_value, write_log

STATE = StateDescriptor("g", key="k", value="v")


def publish(log: Path, job: str = "job", query: str = "q") -> None:
    write_log(log, job, [STATE], [put_value("g", b"job:g:1", b"1")], query_id=query)


def test_all_writers_of_log_find_identity_that_first_gave_it(tmp_path: Path) -> None:
    assert identity_of(LocalFilesystem(tmp_path)) is None
    publish(tmp_path)
    given = identity_of(LocalFilesystem(tmp_path))
    assert given
    publish(tmp_path)
    publish(tmp_path, "another", "q2")
    assert identity_of(LocalFilesystem(tmp_path)) == given
    publish(tmp_path / "beside")
    assert identity_of(LocalFilesystem(tmp_path / "beside")) not in (None, given)
    assert ChangeLog(tmp_path).jobs() == ["another", "job"]


def test_one_of_several_first_writers_gives_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: ensure_identity(LocalFilesystem(tmp_path)), range(8)))
    assert len(found) == 1


def test_log_without_identity_is_read_and_gets_one_from_its_next_writer(tmp_path: Path) -> None:
    publish(tmp_path)
    (tmp_path / IDENTITY_FILE).unlink()
    log = ChangeLog(tmp_path).job("job")
    current = log.visible()
    assert current is not None
    assert log.numbers(current.generation) == [0]
    assert identity_of(LocalFilesystem(tmp_path)) is None
    publish(tmp_path)
    assert identity_of(LocalFilesystem(tmp_path))
    assert log.numbers(current.generation) == [0, 1]


def test_copy_keeps_identity(tmp_path: Path) -> None:
    publish(tmp_path / "log")
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    publish(tmp_path / "copy")
    assert identity_of(LocalFilesystem(tmp_path / "copy")) == identity_of(LocalFilesystem(tmp_path / "log"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1, "id": "a"}', b'{"id": "a", "checksum": 1}'])
def test_damaged_identity_is_error_and_never_another_identity(tmp_path: Path, content: bytes) -> None:
    publish(tmp_path)
    (tmp_path / IDENTITY_FILE).write_bytes(content)
    with pytest.raises(LogCorruptError, match=r"log\.json .*; restore it from a copy of the log"):
        identity_of(LocalFilesystem(tmp_path))
    with pytest.raises(LogCorruptError):
        publish(tmp_path)
    assert (tmp_path / IDENTITY_FILE).read_bytes() == content


def test_identity_of_newer_format_is_error(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_FILE).write_bytes(with_checksum({"format": 99, "id": "a"}))
    with pytest.raises(NewerFormatError):
        identity_of(LocalFilesystem(tmp_path))
