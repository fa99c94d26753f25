"""The log names the core that runs, and both reply alike: two servers as processes, one with SPARKIS_PURE."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running, sparkis_server, wait_for_keys
from compat.conformance.wire import requests
from tests.server.conftest import Peer

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[dict[str, Running]]:
    """Servers of the data set by the core that each runs."""
    with ExitStack() as stack:
        servers = {
            core: stack.enter_context(
                sparkis_server(tmp_path_factory.mktemp(core), dataset_log, is_pure=core == "python")
            )
            for core in ("compiled", "python")
        }
        for server in servers.values():
            wait_for_keys(server, len(dataset.keys))
        yield servers


def test_log_names_core_that_runs(both: dict[str, Running]) -> None:
    for core, server in both.items():
        with server.connect() as connection:
            assert b"\r\nsparkis_core:%b\r\n" % core.encode() in connection.call("INFO", "server").value
        command = [sys.executable, "-m", "sparkis", "status", "--url", f"redis://127.0.0.1:{server.port}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert shown.endswith(f", {core} core\n")


@pytest.mark.parametrize("hello", [b"HELLO 2\r\n", b"HELLO 3\r\n"])
def test_compiled_and_python_core_reply_alike(both: dict[str, Running], dataset: Dataset, hello: bytes) -> None:
    asked = []
    for key in [*dataset.keys, "nothing:here"]:
        name = key if isinstance(key, bytes) else key.encode()
        asked += [[command, name] for command in (b"GET", b"HGETALL", b"STRLEN", b"TYPE", b"EXISTS", b"MGET")]
        asked += [[b"LRANGE", name, b"0", b"-1"], [b"LINDEX", name, b"-1"], [b"HMGET", name, b"a", b"name"]]
        asked += [[b"SMISMEMBER", name, b"a", b"d"], [b"ZSCORE", name, b"d"], [b"ZREVRANK", name, b"d"]]
        asked += [[b"ZRANGE", name, b"0", b"99", b"WITHSCORES"], [b"ZREVRANGE", name, b"1", b"9"]]
    data = requests(asked) + b"ECHO the-end\r\n"
    replies = {}
    for core, server in both.items():
        peer = Peer(server.port)
        peer.socket.settimeout(60)
        peer.send(hello)
        peer.send(b"PING hello\r\n")
        peer.read_until(b"hello\r\n")
        peer.send(data)
        replies[core] = peer.read_until(b"the-end\r\n")
        peer.socket.close()
    assert replies["compiled"] == replies["python"]
