"""The image: what is in it, and how it starts, answers, says that it is healthy, and ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
from pathlib import Path

from compat.conformance.wire import request
from compat.waiting import WAIT_S_MAX, eventually
from tests.builders import put_value, value_state, write_log
from tests.image.image import ROOT, inspected, running
from tests.nspawn import START_S_MAX, Container

USER = 10001
PASSWORD = "secret"
LOGIN = request("AUTH", PASSWORD)
# What the image has with its base, and without.
IMAGE_MB_MAX, ADDED_MB_MAX = 300, 180
MB = 1_000_000


def replies(container: Container, *requests: bytes) -> bytes:
    """Return what a new connection replies; nothing if there is none yet."""
    with container.network():
        try:
            client = socket.create_connection(("127.0.0.1", 7379), WAIT_S_MAX)
        except OSError:
            return b""
    with client:
        client.sendall(b"".join(requests) + request("QUIT"))
        return b"".join(iter(lambda: client.recv(4096), b""))


def test_container_serves_a_log_is_healthy_and_ends_at_sigterm(tmp_path: Path) -> None:
    log, store = tmp_path / "log", tmp_path / "store"
    write_log(log, "job", [value_state("s")], [put_value("s", b"job:s:a", b"1")])
    store.mkdir(mode=0o750)
    os.chown(store, USER, USER)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with running(log, store, tmp_path / "output", SPARKIS_PASSWORD=PASSWORD) as container:
        eventually(
            lambda: replies(container, LOGIN, request("GET", "job:s:a")),
            lambda reply: reply.startswith(b"+OK\r\n$1\r\n1\r\n"),
            awaited=lambda: (tmp_path / "output").read_text(),
            timeout_s=START_S_MAX,
        )
        assert b"-NOAUTH" in replies(container, request("GET", "job:s:a"))
        health = shlex.join(inspected()["Healthcheck"]["Test"][1:])
        container.run(f"SPARKIS_PASSWORD={PASSWORD} {health}")
        assert {os.stat(f"/proc/{each}").st_uid for each in _processes(container)} == {USER}
        os.kill(container.first, signal.SIGTERM)
        assert container.process.wait(START_S_MAX) == 0
    assert "ended" in (tmp_path / "output").read_text()


def _processes(container: Container) -> list[int]:
    """Return the processes of the container, by their ids here."""
    found, waiting = [], [container.first]
    while waiting:
        found.append(waiting.pop())
        waiting += map(int, Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text().split())
    return found


def test_image_is_as_small_as_the_page_says() -> None:
    whole, added = _megabytes(ROOT), _megabytes(ROOT / "opt" / "sparkis")
    assert (whole < IMAGE_MB_MAX, added < ADDED_MB_MAX) == (True, True), (
        f"{whole:.0f} MB, of which {added:.0f} MB added"
    )


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()) / MB


def test_sparkis_has_no_pip_and_no_tests_of_packages() -> None:
    packages = next((ROOT / "opt" / "sparkis" / "lib").glob("python3*")) / "site-packages"
    names = {path.relative_to(packages).as_posix() for path in packages.rglob("*")}
    assert "resp_server/native/__init__.py" in names
    assert [name for name in names if name.split("/")[0] == "pip" or "_flight" in name] == []
    assert {"numpy/_core/tests", "pyarrow/tests"} & names == set()
