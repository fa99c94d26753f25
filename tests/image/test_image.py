"""The image: what is in it, and how it starts, answers, says that it is healthy, and ends."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from compat.conformance.wire import request
from compat.waiting import WAIT_S_MAX, eventually
from tests.builders import put_value, value_state, write_log
from tests.image.image import LIMITS, NAME, ROOT, TAG, Engine, engine, printed_command

USER = 10001
PASSWORD = "secret"
LOGIN = request("AUTH", PASSWORD)
# What the image has with its base, and without.
IMAGE_MB_MAX, ADDED_MB_MAX = 300, 180
MB = 1_000_000


def replies(podman: Engine, *requests: bytes) -> bytes:
    """Return what a new connection to the published port replies; nothing if it fails."""
    with podman.network(), suppress(OSError), socket.create_connection(("127.0.0.1", 7379), WAIT_S_MAX) as client:
        client.sendall(b"".join(requests) + request("QUIT"))
        return b"".join(iter(lambda: client.recv(4096), b""))
    return b""  # the port is published before the server listens


def test_container_serves_log_is_healthy_and_ends_at_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write_log(log, "job", [value_state("s")], [put_value("s", b"job:s:a", b"1")])
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    podman, run, *options, _ = printed_command()
    assert [podman, run] == ["podman", "run"]
    options = [option.replace("/data/log", str(log)) for option in options]
    with engine() as started:
        started.podman(
            "run", "--detach", "--replace", "--name", NAME, *LIMITS, *options, TAG, SPARKIS_PASSWORD=PASSWORD
        )
        eventually(
            lambda: replies(started, LOGIN, request("GET", "job:s:a")),
            lambda reply: reply.startswith(b"+OK\r\n$1\r\n1\r\n"),
            awaited=lambda: started.podman("logs", NAME),
        )
        assert b"-NOAUTH" in replies(started, request("GET", "job:s:a"))
        started.podman("healthcheck", "run", NAME)
        users = started.podman("top", NAME, "huser").split()[1:]
        assert set(users) == {str(USER)}
        started.podman("kill", "--signal", "TERM", NAME)
        assert started.podman("wait", NAME).startswith("0\n")
        assert "ended" in started.podman("logs", NAME)


def test_image_size_is_that_of_page() -> None:
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
