"""A file appears as a whole or not at all, and `create` never overwrites; on every kind of filesystem."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.fs
import pytest

from state_backend.errors import LogUnavailableError
from state_backend.filesystems import ArrowFilesystem, Filesystem, LocalFilesystem, open_filesystem


@pytest.fixture(params=["local", "arrow"])
def filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    if request.param == "local":
        return LocalFilesystem(tmp_path)
    return ArrowFilesystem(pyarrow.fs.LocalFileSystem(), str(tmp_path), "arrow:local")


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_what_is_created_can_be_read(filesystem: Filesystem) -> None:
    assert filesystem.create("a", b"\x00one")
    assert filesystem.read("a") == b"\x00one"
    buffer = filesystem.open_input("a")
    assert buffer is not None
    assert buffer.to_pybytes() == b"\x00one"


def test_create_never_overwrites(filesystem: Filesystem, tmp_path: Path) -> None:
    assert filesystem.create("a", b"one")
    assert not filesystem.create("a", b"two")
    assert filesystem.read("a") == b"one"
    assert everything_in(tmp_path) == ["a"]


def test_replace_overwrites_as_a_whole(filesystem: Filesystem, tmp_path: Path) -> None:
    filesystem.replace("a", b"a long first one")
    filesystem.replace("a", b"two", is_durable=False)
    assert filesystem.read("a") == b"two"
    assert everything_in(tmp_path) == ["a"]


def test_a_new_file_has_no_name_before_it_is_whole(filesystem: Filesystem) -> None:
    with filesystem.open_new("a") as file:
        file.write(b"one")
        assert filesystem.read("a") is None
        file.write(b"two")
    assert filesystem.read("a") == b"onetwo"


def test_an_error_while_a_new_file_is_written_leaves_nothing(filesystem: Filesystem, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), filesystem.open_new("a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert everything_in(tmp_path) == []


def test_a_crash_before_the_name_is_given_leaves_no_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise SystemError("killed")

    filesystem = LocalFilesystem(tmp_path)
    monkeypatch.setattr(os, "link", crash)
    with pytest.raises(SystemError):
        filesystem.create("a", b"one")
    assert filesystem.read("a") is None
    monkeypatch.undo()
    assert filesystem.create("a", b"two")


def test_a_new_local_file_does_not_take_anothers_name(tmp_path: Path) -> None:
    filesystem = LocalFilesystem(tmp_path)
    filesystem.create("a", b"one")
    with pytest.raises(LogUnavailableError, match="cannot write a"), filesystem.open_new("a") as file:
        file.write(b"two")
    assert filesystem.read("a") == b"one"


def test_what_is_not_there_reads_as_none(filesystem: Filesystem) -> None:
    filesystem.create("file", b"")
    for path in ("a", "a/b", "file/b"):
        assert filesystem.read(path) is None
        assert filesystem.open_input(path) is None


def test_an_empty_file_is_not_a_missing_one(filesystem: Filesystem) -> None:
    filesystem.create("a", b"")
    assert filesystem.read("a") == b""
    buffer = filesystem.open_input("a")
    assert buffer is not None
    assert buffer.size == 0


def test_folders_are_made_at_any_depth_and_listed(filesystem: Filesystem) -> None:
    filesystem.make_folder("a/b/c")
    filesystem.make_folder("a/b/c")
    filesystem.create("a/b/x", b"")
    assert sorted(filesystem.names("a/b")) == ["c", "x"]
    assert filesystem.names("a/b/nothing") == []


def test_files_and_folders_are_removed_and_may_be_gone_already(filesystem: Filesystem) -> None:
    filesystem.make_folder("a/b")
    filesystem.create("a/b/x", b"")
    filesystem.remove("a/b/x")
    filesystem.remove("a/b/x")
    assert filesystem.names("a/b") == []
    filesystem.create("a/b/x", b"")
    filesystem.remove("a")
    filesystem.remove("a")
    assert filesystem.names("") == []


def test_an_unusable_root_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for filesystem in (
        LocalFilesystem(tmp_path / "file"),
        ArrowFilesystem(pyarrow.fs.LocalFileSystem(), str(tmp_path / "file"), str(tmp_path / "file")),
    ):
        with pytest.raises(LogUnavailableError, match=str(tmp_path / "file")):
            filesystem.make_folder("a")
        with pytest.raises(LogUnavailableError, match=str(tmp_path / "file")):
            filesystem.create("a", b"")
        with pytest.raises(LogUnavailableError, match=str(tmp_path / "file")):
            filesystem.replace("a", b"")


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "file://localhost{}"])
def test_a_path_and_every_form_of_file_uri_is_a_local_folder(form: str, tmp_path: Path) -> None:
    filesystem = open_filesystem(form.format(tmp_path))
    assert isinstance(filesystem, LocalFilesystem)
    assert filesystem.root == str(tmp_path)


def test_a_file_uri_is_decoded(tmp_path: Path) -> None:
    assert open_filesystem(f"file://{tmp_path}/a%20b").root == f"{tmp_path}/a b"


def test_an_unknown_uri_is_refused_by_name() -> None:
    with pytest.raises(LogUnavailableError, match="nothing://there"):
        open_filesystem("nothing://there")


def test_what_others_remove_at_the_same_time_is_removed(filesystem: Filesystem, tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / "folder" / str(number)).mkdir(parents=True)
        (tmp_path / "folder" / str(number) / "file").write_bytes(b"")
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(filesystem.remove, "folder") for _ in range(4)]:
            done.result()
    assert everything_in(tmp_path) == []
    filesystem.remove("folder")


def test_the_size_of_a_file_is_told(filesystem: Filesystem) -> None:
    filesystem.create("a", b"\x00one")
    filesystem.create("empty", b"")
    assert (filesystem.size("a"), filesystem.size("empty"), filesystem.size("nothing")) == (4, 0, None)


def test_a_copy_stays_when_the_first_name_goes(filesystem: Filesystem) -> None:
    filesystem.make_folder("b")
    filesystem.create("a", b"one")
    assert filesystem.copy("a", "b/c")
    assert filesystem.copy("a", "b/c")
    filesystem.remove("a")
    assert filesystem.read("b/c") == b"one"
    assert not filesystem.copy("a", "b/d")
    assert filesystem.names("b") == ["c"]
