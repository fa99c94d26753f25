"""Files of a log in a bucket: one PUT each, one winner of each name, and no failure of the network changes that."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections import Counter
from urllib.request import urlopen

import pytest

from compat.object_store.faulty_proxy import FaultyProxy, Kind
from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import Filesystem, open_filesystem
from state_backend.log.filesystems.object_store import PART_BYTES
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogUnavailableError
from tests.object_store.conftest import BUCKET

ROUNDS = 20
WRITERS = 4

RACER = """
import sys
from state_backend.log.filesystems import open_filesystem

filesystem = open_filesystem(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    print(int(filesystem.create(name, f"{name} by {sys.argv[2]}".encode())), flush=True)
"""


def methods(proxy: FaultyProxy) -> Counter[str]:
    return Counter(request.method for request in proxy.taken())


def uploads(proxy: FaultyProxy) -> int:
    """Return how many uploads in parts were begun and neither finished nor given up."""
    with urlopen(f"http://127.0.0.1:{proxy.server_port}/{BUCKET}?uploads") as answer:
        return answer.read().count(b"<UploadId>")


def test_one_of_writers_racing_for_name_wins(root: str, filesystem: Filesystem) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, root, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for number in range(WRITERS)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for turn in range(ROUNDS):
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(f"epochs/{turn}.json\n")
            won = [number for number, racer in enumerate(racers) if int(racer.stdout.readline())]  # type: ignore[union-attr]
            assert len(won) == 1
            assert filesystem.read(f"epochs/{turn}.json") == f"epochs/{turn}.json by {won[0]}".encode()
    finally:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.close()
            racer.wait()


def test_small_file_is_one_put(proxy: FaultyProxy, filesystem: Filesystem) -> None:
    proxy.taken()
    assert filesystem.create("a", b"one")
    assert methods(proxy) == {"PUT": 1}
    filesystem.replace("a", b"two")
    assert methods(proxy) == {"PUT": 1}
    with filesystem.open_new("b") as file:
        file.write(b"three")
        file.write(b"four")
    assert methods(proxy) == {"PUT": 1}
    filesystem.make_folder("folder/in/it")
    assert methods(proxy) == {}


@pytest.mark.s3
def test_each_file_operation_is_one_request(proxy: FaultyProxy, filesystem: Filesystem) -> None:
    filesystem.create("a/b", b"one")
    filesystem.create("a/c/d", b"two")
    proxy.taken()
    assert filesystem.read("a/b") == b"one"
    assert methods(proxy) == {"GET": 1}
    assert filesystem.read("a/nothing") is None
    assert methods(proxy) == {"GET": 1}
    assert filesystem.size("a/b") == 3
    assert filesystem.size("a/nothing") is None
    assert methods(proxy) == {"HEAD": 2}
    assert sorted(filesystem.names("a")) == ["b", "c"]
    assert filesystem.names("nothing") == []
    assert methods(proxy) == {"GET": 2}
    assert filesystem.copy("a/b", "a/e")
    assert methods(proxy) == {"PUT": 1}
    filesystem.remove_files(["a/b", "a/e", "a/nothing"])
    assert methods(proxy) == {"POST": 1}
    assert filesystem.names("a") == ["c"]


def test_folder_is_removed_with_all_in_it_and_not_its_neighbour(filesystem: Filesystem) -> None:
    for path in ("job/q1/epochs/1.json", "job/q1/job.json", "job/q10/job.json", "job/q1.json"):
        filesystem.create(path, b"")
    filesystem.remove("job/q1")
    filesystem.remove("job/q1")
    assert sorted(filesystem.names("job")) == ["q1.json", "q10"]
    filesystem.remove("job/q1.json")
    assert filesystem.names("job") == ["q10"]


def test_copy_of_missing_file_is_none(filesystem: Filesystem) -> None:
    assert not filesystem.copy("nothing", "a")
    assert filesystem.read("a") is None


def test_large_file_is_seen_whole(filesystem: Filesystem) -> None:
    chunk = bytes(range(256)) * (PART_BYTES >> 9)
    with filesystem.open_new("large") as file:
        for _ in range(5):
            file.write(chunk)
        assert filesystem.read("large") is None
    assert filesystem.read("large") == chunk * 5


@pytest.mark.s3
def test_large_file_is_written_in_parts(proxy: FaultyProxy, filesystem: Filesystem) -> None:
    proxy.taken()
    with filesystem.open_new("large") as file:
        for _ in range(5):
            file.write(bytes(PART_BYTES // 2))
    assert methods(proxy) == {"POST": 2, "PUT": 3}
    assert uploads(proxy) == 0


@pytest.mark.s3
@pytest.mark.parametrize("chunks", [1, 5])
def test_file_of_task_that_failed_is_not_there(proxy: FaultyProxy, filesystem: Filesystem, chunks: int) -> None:
    before = uploads(proxy)
    with pytest.raises(ZeroDivisionError), filesystem.open_new("large") as file:
        for _ in range(chunks):
            file.write(b"x" * (PART_BYTES // 2))
        raise ZeroDivisionError
    assert filesystem.read("large") is None
    assert filesystem.names("") == []
    assert uploads(proxy) == before


@pytest.mark.s3
def test_parts_are_given_up_when_one_is_refused(proxy: FaultyProxy, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_TIMEOUT_S", 0.0)
    filesystem = open_filesystem(root)
    proxy.fail("500", "PUT", "partNumber", times=1000)
    with pytest.raises(LogUnavailableError, match="cannot write large"), filesystem.open_new("large") as file:
        for _ in range(5):
            file.write(b"x" * (PART_BYTES // 2))
    proxy.heal()
    assert filesystem.read("large") is None
    assert uploads(proxy) == 0


@pytest.mark.parametrize("kind", ["cut", "lose", "500", "503", "late"])
def test_unanswered_create_is_known_again(proxy: FaultyProxy, filesystem: Filesystem, kind: Kind) -> None:
    fault = proxy.fail(kind, "PUT", "a.json")
    assert filesystem.create("a.json", b"one")
    assert fault.times == 0
    assert filesystem.read("a.json") == b"one"
    assert not filesystem.create("a.json", b"one")  # the same content, and yet another's
    assert not filesystem.create("a.json", b"two")
    assert filesystem.read("a.json") == b"one"


@pytest.mark.parametrize("kind", ["cut", "lose", "500", "late"])
def test_lost_race_to_create_file_is_lost_on_bad_network_too(
    proxy: FaultyProxy, filesystem: Filesystem, kind: Kind
) -> None:
    assert filesystem.create("a.json", b"one")
    proxy.fail(kind, "PUT", "a.json")
    proxy.fail(kind, "GET", "a.json")
    assert not filesystem.create("a.json", b"one")
    assert filesystem.read("a.json") == b"one"


@pytest.mark.parametrize("kind", ["cut", "500", "lose", "late"])
def test_everything_else_is_tried_again(proxy: FaultyProxy, filesystem: Filesystem, kind: Kind) -> None:
    for method in ("GET", "PUT", "HEAD", "POST"):
        proxy.fail(kind, method)
    filesystem.replace("a/b", b"one")
    assert filesystem.read("a/b") == b"one"
    assert filesystem.size("a/b") == 3
    filesystem.remove_files(["a/b"])
    assert filesystem.read("a/b") is None


def test_mute_store_is_error_with_its_name(proxy: FaultyProxy, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_TIMEOUT_S", 0.0)
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_PAUSES_S", ())
    filesystem = open_filesystem(root)
    for method in ("GET", "PUT", "HEAD", "POST"):
        proxy.fail("500", method, times=1000)
    for name, doing in (
        ("create", lambda: filesystem.create("a", b"")),
        ("replace", lambda: filesystem.replace("a", b"")),
        ("read", lambda: filesystem.read("a")),
        ("look at", lambda: filesystem.size("a")),
        ("list", lambda: filesystem.names("a")),
        ("remove", lambda: filesystem.remove("a")),
        ("remove", lambda: filesystem.remove_files(["a"])),
        ("copy", lambda: filesystem.copy("a", "b")),
    ):
        with pytest.raises(LogUnavailableError, match=rf"cannot {name} a in the log {root}: .*500 Internal Server"):
            doing()


def test_missing_bucket_is_not_empty_log(own_folder: str) -> None:
    filesystem = open_filesystem(own_folder.replace(BUCKET, f"no-such-bucket-{uuid.uuid4().hex}"))
    for doing in (
        lambda: filesystem.read("a"),
        lambda: filesystem.names(""),
        lambda: filesystem.create("a", b""),
    ):
        with pytest.raises(LogUnavailableError, match=r"NoSuchBucket|ContainerNotFound"):
            doing()


def test_log_that_can_be_written_is_left_as_it_was(proxy: FaultyProxy, root: str, filesystem: Filesystem) -> None:
    check_writable(root)
    assert filesystem.names("") == []


@pytest.mark.s3  # Azure's signature is of this header, too
@pytest.mark.parametrize("is_sink", [True, False])
def test_store_that_ignores_condition_of_put_is_found_out(proxy: FaultyProxy, own_folder: str, is_sink: bool) -> None:
    proxy.drop_header = b"if-none-match"
    with pytest.raises(LogUnavailableError, match="ignores the condition of a PUT"):
        if is_sink:
            check_writable(own_folder)
        else:
            LogWriter(own_folder, "job", [StateDescriptor("v", key="k", value="v")])
    assert open_filesystem(own_folder).names("") == []
