"""A master, its replica and three real sentinels, as processes of a test."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

from compat.conformance.servers import Running, free_port, redis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually

NAME = "the-master"
DOWN_MS = 1000
QUORUM = 2


class Sentinels:
    """A master, its replica, and three sentinels."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.master = self._start_redis("master")
        self.replica = self._start_redis("replica", "--replicaof", "127.0.0.1", str(self.master.port))
        self._wait_for_replica()
        self.ports = [self._start_sentinel() for _ in range(3)]
        for port in self.ports:
            with Connection(port) as sentinel:
                eventually(lambda sentinel=sentinel: self._sees(sentinel))  # type: ignore[misc]

    def _wait_for_replica(self) -> None:
        with self.replica.connect() as replica:
            eventually(lambda: b"master_link_status:up" in replica.call("INFO", "replication").plain)

    @staticmethod
    def _sees(sentinel: Connection) -> bool:
        words = sentinel.call("SENTINEL", "MASTER", NAME).plain
        found = dict(zip(words[::2], words[1::2], strict=True))
        return found[b"num-slaves"] == b"1" and found[b"num-other-sentinels"] == b"2"

    def _start_redis(self, name: str, *options: str) -> Running:
        folder = self._folder / name
        folder.mkdir()
        server = redis_server(folder, *options, "--repl-diskless-sync-delay", "0")
        return self._stack.enter_context(server)

    def _start_sentinel(self) -> int:
        port = free_port()
        folder = self._folder / f"sentinel{port}"
        folder.mkdir()
        path = folder / "sentinel.conf"
        path.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nloglevel warning\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.master.port} {QUORUM}\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_MS}\nsentinel failover-timeout {NAME} 5000\n"
        )
        command = ["redis-server", str(path), "--sentinel"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        eventually(lambda: _replies(port))
        return port

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in self.ports) + f"/{NAME}"


def _replies(port: int) -> bool:
    try:
        with Connection(port) as connection:
            return connection.call("PING").plain == b"PONG"
    except OSError:
        return False
