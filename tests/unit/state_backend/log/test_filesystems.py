"""A file appears as a whole or not at all, and `create` never overwrites; on every kind of filesystem."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pyarrow.fs
import pytest

from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import (
    Filesystem,
    LocalFilesystem,
    ObjectStoreFilesystem,
    credentials,
    open_filesystem,
)
from state_backend.log.filesystems.arrow import CONTENT, ArrowFilesystem
from state_backend.log.filesystems.object_store import _reason
from state_backend.model.errors import LogUnavailableError
from tests.unit.state_backend.log.moves_like_hdfs import like_hdfs


@pytest.fixture(params=["local", "arrow", "hdfs"])
def filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    if request.param == "local":
        return LocalFilesystem(tmp_path)
    of_arrow = pyarrow.fs.LocalFileSystem() if request.param == "arrow" else like_hdfs()
    return ArrowFilesystem(of_arrow, str(tmp_path), "arrow:local")


def everything_in(folder: Path) -> list[str]:
    """Return the names of the files; one that pyarrow's `create` made is a folder with its content in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted((path.parent if path.name == CONTENT else path).name for path in files)


def test_created_file_can_be_read(filesystem: Filesystem) -> None:
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


def test_one_of_threads_racing_for_name_wins(filesystem: Filesystem, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        for turn in range(50):
            won = list(threads.map(lambda by, turn=turn: filesystem.create(f"{turn}", b"%d" % by), range(4)))  # type: ignore[misc]
            assert sum(won) == 1
            assert filesystem.read(f"{turn}") == b"%d" % won.index(True)
    assert everything_in(tmp_path) == sorted(map(str, range(50)))


def test_replace_overwrites_whole(filesystem: Filesystem, tmp_path: Path) -> None:
    filesystem.replace("a", b"a long first one")
    filesystem.replace("a", b"two", is_durable=False)
    assert filesystem.read("a") == b"two"
    assert everything_in(tmp_path) == ["a"]


def test_new_file_has_no_name_before_it_is_whole(filesystem: Filesystem) -> None:
    with filesystem.open_new("a") as file:
        file.write(b"one")
        assert filesystem.read("a") is None
        file.write(b"two")
    assert filesystem.read("a") == b"onetwo"


def test_error_while_new_file_is_written_leaves_nothing(filesystem: Filesystem, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), filesystem.open_new("a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert everything_in(tmp_path) == []


def test_crash_before_naming_leaves_no_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise SystemError("killed")

    filesystem = LocalFilesystem(tmp_path)
    monkeypatch.setattr(os, "link", crash)
    with pytest.raises(SystemError):
        filesystem.create("a", b"one")
    assert filesystem.read("a") is None
    monkeypatch.undo()
    assert filesystem.create("a", b"two")


def test_new_local_file_does_not_take_name_of_existing_one(tmp_path: Path) -> None:
    filesystem = LocalFilesystem(tmp_path)
    filesystem.create("a", b"one")
    with pytest.raises(LogUnavailableError, match="cannot write a"), filesystem.open_new("a") as file:
        file.write(b"two")
    assert filesystem.read("a") == b"one"


def test_missing_file_reads_as_none(filesystem: Filesystem) -> None:
    filesystem.create("file", b"")
    for path in ("a", "a/b", "file/b"):
        assert filesystem.read(path) is None
        assert filesystem.open_input(path) is None


def test_empty_file_is_not_missing_one(filesystem: Filesystem) -> None:
    filesystem.create("a", b"")
    assert filesystem.read("a") == b""
    buffer = filesystem.open_input("a")
    assert buffer is not None
    assert buffer.size == 0


def test_folders_are_made_at_any_depth_and_listed(filesystem: Filesystem) -> None:
    filesystem.make_folder("a/b/c")
    filesystem.make_folder("a/b/c")
    filesystem.create("a/b/x", b"")
    with filesystem.open_new("a/b/y"):
        pass
    assert sorted(filesystem.names("a/b")) == ["c", "x", "y"]
    assert set(filesystem.folders("a/b")) - {"x"} == {"c"}  # on HDFS a created file is a folder, too
    assert filesystem.names("a/b/nothing") == []
    assert filesystem.folders("a/b/nothing") == []


def test_files_and_folders_are_removed_even_if_missing(filesystem: Filesystem) -> None:
    filesystem.make_folder("a/b")
    filesystem.create("a/b/x", b"")
    filesystem.remove("a/b/x")
    filesystem.remove("a/b/x")
    assert filesystem.names("a/b") == []
    filesystem.create("a/b/x", b"")
    filesystem.remove("a")
    filesystem.remove("a")
    assert filesystem.names("") == []


@pytest.mark.parametrize(
    ("name", "doing"),
    [
        ("make the folder", lambda filesystem: filesystem.make_folder("a")),
        ("create", lambda filesystem: filesystem.create("a", b"")),
        ("replace", lambda filesystem: filesystem.replace("a", b"")),
        ("write", lambda filesystem: filesystem.open_new("a").__enter__()),
    ],
)
def test_unusable_root_is_named_with_reason(name: str, doing: Callable[[Filesystem], object], tmp_path: Path) -> None:
    root = str(tmp_path / "file")
    Path(root).write_bytes(b"")
    for filesystem in (LocalFilesystem(root), ArrowFilesystem(pyarrow.fs.LocalFileSystem(), root, root)):
        with pytest.raises(LogUnavailableError, match=rf"^cannot {name} a in the log {root}: .*(?i:not a directory)"):
            doing(filesystem)


def test_root_of_arrow_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    root = str(tmp_path / "file")
    Path(root).write_bytes(b"")
    with pytest.raises(LogUnavailableError, match=rf"^cannot list \. in the log {root}: "):
        ArrowFilesystem(pyarrow.fs.LocalFileSystem(), root, root).names("")


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "file://localhost{}"])
def test_path_and_every_form_of_file_uri_is_local_folder(form: str, tmp_path: Path) -> None:
    filesystem = open_filesystem(form.format(tmp_path))
    assert isinstance(filesystem, LocalFilesystem)
    assert filesystem.root == str(tmp_path)


def test_file_uri_is_decoded(tmp_path: Path) -> None:
    assert open_filesystem(f"file://{tmp_path}/a%20b").root == f"{tmp_path}/a b"


@pytest.mark.parametrize(
    ("root", "error"),
    [
        ("nothing://there", "nothing: is not supported; give a path, file:, s3://"),
        ("http://host/x", "http: is not supported"),
        ("folder:/x", r"write \./folder:/x"),
        ("dbfs:/x", "or /dbfs/"),
        ("dbfs:///x", "or /dbfs/"),
        ("s3:/b/x", "write s3://b/x"),
        ("s3:b/x", "write s3://b/x"),
        ("s3:///b/x", "write s3://b/x"),
        ("s3a:/b/x", "write s3a://b/x"),
        ("S3:/b/x", "write s3://b/x"),
        ("s3://", "it names no bucket or host"),
        ("gs:/b", "write gs://b"),
        ("gcs://b/x", "write gs://"),
        ("hdfs:/x", "write hdfs://x"),
        ("hdfs://name node/x", "Cannot parse URI.*; hdfs:// needs libhdfs, a JVM and the CLASSPATH of Hadoop"),
        ("wasbs://c@a.blob.core.windows.net/x", "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"),
        ("wasb:/x", "write abfss://"),
        ("webhdfs://namenode:9870/x", "write hdfs://HOST/PATH, which needs libhdfs"),
        ("s3://b/x?endpoint_override=localhost:9000", "AWS_ENDPOINT_URL"),
    ],
)
def test_impossible_address_is_refused_with_correct_form(
    root: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LogUnavailableError, match=error) as raised:
        open_filesystem(root)
    assert root in str(raised.value)
    with pytest.raises(LogUnavailableError, match=error):
        check_writable(root)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("root", ["hdfs://namenode:8020/log", "hdfs:///log", "viewfs://cluster/log"])
def test_address_of_hdfs_is_opened_by_pyarrow(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hdfs:
        @staticmethod
        def from_uri(uri: str) -> tuple[pyarrow.fs.FileSystem, str]:
            return like_hdfs(), f"{tmp_path}{urlsplit(uri).path}"

    monkeypatch.setattr(pyarrow.fs, "FileSystem", Hdfs)
    filesystem = open_filesystem(root)
    assert filesystem.root == root
    filesystem.make_folder("")
    filesystem.replace("a", b"one")
    assert (tmp_path / "log" / "a").read_bytes() == b"one"


@pytest.mark.parametrize("name", ["log", "a:b", "./s3:/b", "~", "c:log"])
def test_path_with_colon_is_path(name: str) -> None:
    assert isinstance(open_filesystem(name), LocalFilesystem)


@pytest.mark.parametrize(
    ("root", "opened"),
    [
        ("s3://b/x/", "s3://b/x"),
        ("s3a://b/x", "s3://b/x"),
        ("S3N://b", "s3://b"),
        ("gs://b/x", "gs://b/x"),
        ("az://container/x", "az://container/x"),
        ("abfs://c@account.dfs.core.windows.net/x", "abfss://c@account.dfs.core.windows.net/x"),
        ("abfss://c@account.dfs.core.windows.net/x", "abfss://c@account.dfs.core.windows.net/x"),
    ],
)
def test_object_store_has_usual_names(root: str, opened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no credentials of whoever runs this
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    filesystem = open_filesystem(root)
    assert isinstance(filesystem, ObjectStoreFilesystem)
    assert filesystem.root == opened
    assert open_filesystem(filesystem.root).root == opened


def test_object_store_without_extra_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "obstore" else find_spec(name))
    with pytest.raises(LogUnavailableError, match=r"pip install 'sparkis\[object-store\]'"):
        open_filesystem("s3://b/x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "S3: status code: 404 Not Found: <Code>NoSuch</Code>\n<Message>No\n bucket</Message>\n\nDebug source:",
            "404 Not Found: NoSuch: No bucket",
        ),
        (
            "Server returned error response: <Error><Code>InternalError</Code><Message>Try again</Message></Error>",
            "InternalError: Try again",
        ),
        ("Generic S3 error:\n  no route to host \n\nDebug source:\nGeneric", "Generic S3 error: no route to host"),
        ("", "OSError"),
    ],
)
def test_reason_of_error_is_stores_own_message_in_one_line(text: str, reason: str) -> None:
    assert _reason(OSError(text)) == reason


def test_aws_profiles_are_read_without_other_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text("[ours]\naws_access_key_id = id\naws_secret_access_key = secret\n")
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert credentials.options("s3://b") == {}
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    found = credentials.options("s3://b")["credential_provider"]()
    assert (found["access_key_id"], found["secret_access_key"]) == ("id", "secret")
    assert credentials.options("gs://b") == {}
    monkeypatch.setenv("AWS_PROFILE", "nobody's")
    with pytest.raises(LogUnavailableError, match="nobody's"):
        open_filesystem("s3://b")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    assert credentials.options("s3://b") == {}


@pytest.mark.parametrize("where", ["home", "variable"])
def test_file_of_credentials_is_used_unless_other_credentials_are_set(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".aws" / "credentials" if where == "home" else tmp_path / "file"
    file.parent.mkdir(exist_ok=True)
    file.write_text("[default]\naws_access_key_id = id\naws_secret_access_key = secret\n")
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if where == "variable":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    assert list(credentials.options("s3://b")) == ["credential_provider"]
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "token")
    assert credentials.options("s3://b") == {}


ENDPOINTS = ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_plain_http_needs_endpoint_with_http(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ENDPOINTS:
        monkeypatch.delenv(each, raising=False)
    assert credentials.client_options() == {}
    monkeypatch.setenv(name, "https://127.0.0.1:9000")
    assert credentials.client_options() == {}
    monkeypatch.setenv(name, "http://127.0.0.1:9000")
    assert credentials.client_options() == {"allow_http": True}


def no_link(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # as vfat answers


def test_folder_without_hard_links_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_link)
    check_writable(tmp_path)
    assert everything_in(tmp_path) == []
    filesystem = LocalFilesystem(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        for turn in range(50):
            won = list(threads.map(lambda by, turn=turn: filesystem.create(f"{turn}", b"%d" % by), range(4)))  # type: ignore[misc]
            assert sum(won) == 1
            assert filesystem.read(f"{turn}") == b"%d" % won.index(True)
    with filesystem.open_new("a") as file:
        file.write(b"one")
    with pytest.raises(LogUnavailableError, match="cannot write a"), filesystem.open_new("a") as file:
        file.write(b"two")
    assert filesystem.copy("a", "b")
    assert filesystem.copy("a", "b")
    assert not filesystem.copy("nothing", "c")
    assert filesystem.read("b") == b"one"
    assert everything_in(tmp_path) == sorted([*map(str, range(50)), "a", "b"])


def test_folder_that_cannot_separate_writers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)  # as FUSE answers
        return -1

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=rename))
    with pytest.raises(LogUnavailableError, match=r"neither hard links nor .* give its own address \(s3://"):
        check_writable(tmp_path)
    assert everything_in(tmp_path) == []


def test_files_removed_by_others_at_same_time_are_removed(filesystem: Filesystem, tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / "folder" / str(number)).mkdir(parents=True)
        (tmp_path / "folder" / str(number) / "file").write_bytes(b"")
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(filesystem.remove, "folder") for _ in range(4)]:
            done.result()
    assert everything_in(tmp_path) == []
    filesystem.remove("folder")


def test_time_of_file_is_when_it_was_written(filesystem: Filesystem, tmp_path: Path) -> None:
    filesystem.replace("a", b"one")
    os.utime(tmp_path / "a", ns=(2_000_000_000, 1_500_000_000))
    assert (filesystem.modified_ns("a"), filesystem.modified_ns("nothing")) == (1_500_000_000, None)


def test_size_of_file_is_known(filesystem: Filesystem) -> None:
    filesystem.create("a", b"\x00one")
    filesystem.create("empty", b"")
    assert (filesystem.size("a"), filesystem.size("empty"), filesystem.size("nothing")) == (4, 0, None)


def test_copy_survives_removal_of_first_name(filesystem: Filesystem) -> None:
    filesystem.make_folder("b")
    filesystem.create("a", b"one")
    assert filesystem.copy("a", "b/c")
    assert filesystem.copy("a", "b/c")
    filesystem.remove("a")
    assert filesystem.read("b/c") == b"one"
    assert not filesystem.copy("a", "b/d")
    assert filesystem.names("b") == ["c"]
