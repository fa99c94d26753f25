"""An upstream with TLS: a real redis-server, real certificates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.certificates import Authority
from compat.conformance.servers import free_port, redis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from tests.server.overlay import PREFIX, Overlay, tls_options
from tests.server.redis_cluster import RedisCluster


@pytest.fixture(scope="module")
def tls_port(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[int]:
    """The TLS port of an upstream that requires a client certificate; its own is for the name `cache.internal`."""
    authority.issue("upstream", "cache.internal")
    port = free_port()
    options = ("--tls-port", str(port), *authority.options("upstream", auth_clients="yes"))
    with redis_server(tmp_path_factory.mktemp("upstream"), *options, password="secret"):
        yield port


def reason_for(client: Connection) -> bytes:
    """Wait until the upstream is known to be unreachable; return the error."""
    eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
    return bytes(eventually(lambda: client.call("GET", "k").plain, lambda found: b"cannot be reached: " in found))


def test_upstream_with_tls_is_read_and_written(overlay: Overlay, authority: Authority, tls_port: int) -> None:
    options = [*tls_options(authority, "proxy"), f"{PREFIX}server-name", "cache.internal"]
    proxy = overlay.start_at(f"rediss://:secret@127.0.0.1:{tls_port}", *options)
    with proxy.connect() as client:
        eventually(lambda: client.call("SET", "k", b"v" * 1_000_000).plain == b"OK")
        assert client.call("HELLO", 3).raw.startswith(b"%")
        assert client.call("MGET", "k", "job:speed:2").plain == [b"v" * 1_000_000, b"20"]


def test_renewed_certificate_is_used_for_new_connections(overlay: Overlay, authority: Authority, tls_port: int) -> None:
    options = [*tls_options(authority, "renewed"), f"{PREFIX}server-name", "cache.internal"]
    Authority(authority.folder / "other").issue("renewed")  # a certificate that the upstream refuses
    cert, key = authority.folder / "renewed.crt", authority.folder / "renewed.key"
    good = cert.read_bytes(), key.read_bytes()
    for path in (key, cert):
        path.write_bytes((authority.folder / "other" / path.name).read_bytes())
    proxy = overlay.start_at(f"rediss://:secret@127.0.0.1:{tls_port}", *options)
    with proxy.connect() as client:
        assert b"cannot be reached" in reason_for(client)
        for path, text in zip((cert, key), good, strict=True):
            path.write_bytes(text)
        eventually(lambda: client.call("SET", "renewed", "1").plain == b"OK")


def test_certificate_for_other_name_is_refused(overlay: Overlay, authority: Authority, tls_port: int) -> None:
    proxy = overlay.start_at(f"rediss://:secret@127.0.0.1:{tls_port}", *tls_options(authority, "proxy"))
    with proxy.connect() as client:
        assert b"its certificate is refused: IP address mismatch" in reason_for(client)


def test_certificate_of_unknown_authority_is_refused(overlay: Overlay, tls_port: int) -> None:
    proxy = overlay.start_at(f"rediss://127.0.0.1:{tls_port}", f"{PREFIX}server-name", "cache.internal")
    with proxy.connect() as client:
        assert b"its certificate is refused: " in reason_for(client)


def test_error_names_upstream_without_tls(overlay: Overlay, authority: Authority) -> None:
    proxy = overlay.start_at(f"rediss://127.0.0.1:{overlay.upstream_port}", *tls_options(authority, "proxy"))
    with proxy.connect() as client:
        assert b"it does not reply, or does not speak TLS" in reason_for(client)


def test_cluster_nodes_are_reached_at_tls_ports(overlay: Overlay, authority: Authority, tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = RedisCluster(tmp_path, stack, tls=authority.options("node", auth_clients="yes"))
        proxy = overlay.start_at(f"rediss+cluster://127.0.0.1:{cluster.tls_ports[0]}", *tls_options(authority, "proxy"))
        names = [f"name{number}" for number in range(30)]
        with proxy.connect() as client:
            eventually(lambda: client.call("MSET", *(word for name in names for word in (name, name))).plain == b"OK")
            assert client.call("MGET", *names).plain == [name.encode() for name in names]
        assert overlay.info(proxy)["upstream_nodes"] == "3"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--upstream", "redis://h", f"{PREFIX}server-name", "n"), "need an upstream with TLS: --upstream rediss://"),
        (("--upstream", "rediss://h", f"{PREFIX}cert-file", "c"), f"{PREFIX}cert-file needs {PREFIX}key-file"),
        (("--upstream", "rediss://h", f"{PREFIX}ca-cert-file", "/nowhere"), f"{PREFIX}ca-cert-file /nowhere: No such"),
    ],
)
def test_wrong_tls_options_are_refused(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    given = ("--log", str(tmp_path), "--ownership", str(tmp_path / "owners.json"), *options)
    command = [sys.executable, "-m", "resp_server.programs.proxy", "--port", "0", *given]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode and reason in ended.stderr, ended.stderr
