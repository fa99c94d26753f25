"""Commands of an upstream's modules: only the upstream knows where the keys of some of them are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.conformance.servers import redis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from tests.server.overlay import Overlay

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler for the module")
OWNED = b"ERR key 'job:speed:1' is owned by state job:speed"


@pytest.fixture
def direct(overlay: Overlay, tmp_path: Path) -> Iterator[Connection]:
    module = tmp_path / "keyword_module.so"
    source = Path(__file__).with_name("keyword_module.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(module), str(source)], check=True)
    with redis_server(tmp_path, "--loadmodule", str(module)) as server, server.connect() as connection:
        yield connection


@pytest.fixture
def client(overlay: Overlay, direct: Connection) -> Iterator[Connection]:
    proxy = overlay.start_at(f"redis://127.0.0.1:{direct.call('CONFIG', 'GET', 'port').plain[1].decode()}")
    with proxy.connect() as connection:
        eventually(lambda: connection.call("GET", "job:speed:1").plain == b"10")
        eventually(lambda: not connection.call("GET", "nobody's").is_error)
        yield connection


def test_module_command_keys_come_from_upstream(client: Connection, direct: Connection) -> None:
    for _ in range(2):  # the second time the keys are known
        assert client.call("KW.SET", "v", "some", "words", "mine").plain == b"OK"
        assert client.call("kw.get", "job:speed:1", "mine").plain == b"v"
        assert client.call("KW.SET", "v", "job:speed:1").plain == OWNED
        assert client.call("KW.GET", "job:speed:1").plain == OWNED
    assert direct.call("EXISTS", "job:speed:1").plain == 0
    assert client.call("KW.GET").is_error
    # In a pipeline, requests keep their order.
    client.send(b"SET p 1\r\nKW.SET 2 p\r\nGET p\r\nKW.GET x p\r\nGET job:speed:1\r\nKW.SET 3 job:speed:1\r\n")
    assert [client.read().plain for _ in range(6)] == [b"OK", b"OK", b"2", b"2", b"10", OWNED]
    client.send(b"MULTI\r\nKW.SET 4 p\r\nGET job:speed:1\r\nKW.GET y p\r\nEXEC\r\n")
    assert [client.read().plain for _ in range(5)] == [b"OK", b"QUEUED", b"QUEUED", b"QUEUED", [b"OK", b"10", b"4"]]
    client.send(b"MULTI\r\nKW.SET 4 job:speed:1\r\nEXEC\r\n")
    assert [client.read().plain for _ in range(3)] == [
        b"OK",
        OWNED,
        b"EXECABORT Transaction discarded because of previous errors.",
    ]


def test_subscribing_module_command_gets_dedicated_connection(client: Connection, direct: Connection) -> None:
    assert client.call("KW.SUB").plain == (
        b"ERR command 'kw.sub' of a module, which may subscribe, needs RESP3; send HELLO 3 first"
    )
    client.call("HELLO", 3)
    own = client.call("KW.SUB").plain
    assert isinstance(own, int) and client.call("KW.SUB").plain == own
    assert client.call("SET", "p", "4").plain == b"OK"
    line = next(each for each in direct.call("CLIENT", "LIST").plain.splitlines() if each.startswith(b"id=%d " % own))
    assert b" cmd=set " in line  # later requests take it, too
