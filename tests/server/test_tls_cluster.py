"""A registry, two state servers and a proxy that speak TLS with each other and with clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster

from compat.conformance.certificates import Authority
from compat.conformance.servers import sparkis_proxy, sparkis_server
from compat.fork_server import ForkedProcess
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.client import Client
from resp_server.net.tls import TlsFiles, client_context
from resp_server.registry.announcer import Announcer
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

TOKEN = "of-the-tests"
STATE = StateDescriptor("n", key="k", value="v")
KEYS = [f"job:n:{number}" for number in range(200)]
# Longer than what a proxy passes on over a connection that others share.
LARGE_KEY, LARGE = "job:n:large", b"x" * (8 << 20)


# A server that looks at its log only when an epoch is announced.
WITHOUT_PROBES = """
from resp_server.serving import appliers, log_watch
log_watch.LogWatch.watch = lambda *_: None
appliers.Appliers.__init__.__kwdefaults__["probe_interval_s"] = 3600.0
"""


class Cluster:
    """Processes that are started one by one, and end with the test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.log = folder, folder / "log"
        self._stack = stack
        with LogWriter(self.log, "job", [STATE], "first") as writer:
            changes = [Change("n", Op.PUT, key.encode(), value=key.encode()) for key in KEYS]
            writer.publish([*changes, Change("n", Op.PUT, LARGE_KEY.encode(), value=LARGE)], 0)

    def start(self, name: str, program: str, *options: str, before: str = "") -> int:
        """Start a process, and return the port that it listens on. before: Python to run in it first."""
        main = f"{before}\nimport sys; from resp_server.programs.{program} import main; sys.exit(main())"
        errors = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = ForkedProcess(
            [sys.executable, "-c", main, "--child", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"SPARKIS_CONTROL_TOKEN": TOKEN},
        )
        self._stack.callback(_end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self.output_of(name)
        return int(json.loads(line)["port"])

    def output_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def registry(self, *options: str) -> int:
        return self.start("registry", "registry", "--log", str(self.log), "--port", "0", *options)

    def server(self, name: str, *options: str, before: str = "") -> int:
        given = ("--log", str(self.log), "--store", str(self.folder / name), "--port", "0", *options)
        return self.start(name, "state_server", *given, before=before)

    def proxy(self, name: str, *options: str) -> int:
        return self.start(name, "proxy", "--port", "0", "--bind", "127.0.0.1", *options)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def reads_all(client: Any) -> bool:
    with suppress(redis.RedisError, OSError):
        return bool([client.get(key) for key in KEYS] == [key.encode() for key in KEYS])
    return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def test_all_parts_speak_tls_and_ask_each_other_for_certificates(cluster: Cluster, authority: Authority) -> None:
    registry = cluster.registry(*authority.options("registry"))
    ports = [cluster.server(name, *authority.options(name)) for name in ("server0", "server1")]
    shown: dict[str, Any] = authority.client("reader")
    at = {"host": "127.0.0.1", "ssl": True, **shown}
    eventually(
        lambda: all(reads_all_of_its_own(port, at) for port in ports),
        awaited=lambda: cluster.output_of("server0") + cluster.output_of("server1"),
    )
    with RedisCluster(port=ports[0], **at) as client:
        assert reads_all(client)
        assert {node.port for node in client.get_primaries()} == set(ports)
    for name, options in (
        ("watching", ("--registry", f"127.0.0.1:{registry}")),
        ("reading", ("--log", str(cluster.log))),
    ):
        proxy = cluster.proxy(name, *options, *authority.options("proxy"))
        with redis.Redis(port=proxy, **at) as client:
            eventually(lambda client=client: reads_all(client), awaited=lambda name=name: cluster.output_of(name))
            assert client.dbsize() == len(KEYS) + 1
            assert client.get(LARGE_KEY) == LARGE
        with redis.Redis(port=proxy) as plain, pytest.raises(redis.ConnectionError):
            plain.ping()
    files = TlsFiles(shown["ssl_certfile"], shown["ssl_keyfile"], str(authority.ca))
    with Client("127.0.0.1", registry, password=TOKEN, tls=client_context(files), timeout_s=WAIT_S_MAX) as asking:
        assert len(asking.call("MEMBERS")) == 2
    assert all("Traceback" not in path.read_text() for path in cluster.folder.glob("*.log"))


def test_epochs_are_announced_over_mutual_tls(cluster: Cluster, authority: Authority) -> None:
    cluster.registry(*authority.options("registry"))
    port = cluster.server("server", *authority.options("server"), before=WITHOUT_PROBES)
    shown = authority.client("writer")
    tls = TlsFiles(shown["ssl_certfile"], shown["ssl_keyfile"], str(authority.ca))
    announcer = Announcer(cluster.log, token=TOKEN, tls=tls)
    with (
        closing(announcer),
        LogWriter(cluster.log, "job", [STATE], "first", announce=announcer.announce) as writer,
        redis.Redis(port=port, ssl=True, **shown) as client,
    ):
        eventually(lambda: reads_all(client), awaited=lambda: cluster.output_of("server"))
        for value in (b"1", b"2"):
            writer.publish([Change("n", Op.PUT, KEYS[0].encode(), value=value)])
            eventually(lambda: client.get(KEYS[0]), lambda seen, value=value: seen == value)


def reads_all_of_its_own(port: int, at: dict[str, Any]) -> bool:
    """Return whether a server answers for half of the slots."""
    with suppress(redis.RedisError, OSError), redis.Redis(port=port, **at) as client:
        return 0 < client.dbsize() < len(KEYS)
    return False


def test_server_refuses_registry_of_other_authority(cluster: Cluster, authority: Authority, tmp_path: Path) -> None:
    cluster.registry(*authority.options("registry"))
    cluster.server("stranger", *Authority(tmp_path / "other").options("stranger"))
    cluster.server("plain")
    eventually(
        lambda: "its certificate is refused" in cluster.output_of("stranger"),
        awaited=lambda: cluster.output_of("stranger"),
    )
    eventually(lambda: "no registry at" in cluster.output_of("plain"), awaited=lambda: cluster.output_of("plain"))
    assert "Traceback" not in cluster.output_of("registry") + cluster.output_of("stranger") + cluster.output_of("plain")


def test_proxy_speaks_tls_with_servers_or_with_clients_or_with_neither(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        files = {}
        for name, options in (("tls", authority.options(auth_clients="no")), ("plain", [])):
            server = stack.enter_context(sparkis_server(tmp_path / f"{name}-store", cluster.log, *options))
            files[name] = tmp_path / f"{name}.json"
            nodes = [{"host": "127.0.0.1", "port": server.port, "slots": "0-16383"}]
            files[name].write_text(json.dumps({"version": 1, "nodes": nodes}))
        shows = authority.options(auth_clients="no")
        only_servers = stack.enter_context(sparkis_proxy(files["tls"], "--tls-ca-cert-file", str(authority.ca)))
        only_clients = stack.enter_context(sparkis_proxy(files["plain"], *shows, "--server-tls", "no"))
        wrong = stack.enter_context(sparkis_proxy(files["plain"], "--tls-ca-cert-file", str(authority.ca)))
        with redis.Redis(port=only_servers.port) as client:
            eventually(lambda client=client: reads_all(client), awaited="all keys over TLS")
        with redis.Redis(port=only_clients.port, ssl=True, ssl_ca_certs=str(authority.ca)) as client:
            eventually(lambda client=client: reads_all(client), awaited="all keys with TLS")
        with redis.Redis(port=wrong.port) as client, pytest.raises(redis.ResponseError, match="it does not speak TLS"):
            client.get(KEYS[0])


def test_tls_options_that_make_no_sense_are_refused_by_name(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "log").mkdir()
    ca, tls = ["--tls-ca-cert-file", str(authority.ca)], authority.options()
    at_log = ["--log", str(tmp_path / "log")]
    for program, options, error in (
        ("serve", [*at_log, *ca], "--tls-ca-cert-file has no use without"),
        (
            "serve",
            [*at_log, *tls, "--tls-port", "0", "--cluster", "c.json", "--cluster-node", "a:1"],
            "--tls-port cannot be combined with --cluster",
        ),
        ("state_server", [*at_log, *tls[:2]], "--tls-cert-file needs --tls-key-file"),
        ("registry", [*at_log, *ca], "without --tls-cert-file and --tls-key-file"),
        ("proxy", [*at_log, "--server-tls", "yes"], "--server-tls yes needs --tls-ca-cert-file"),
        ("proxy", [*at_log, *tls[2:]], "--tls-key-file needs --tls-cert-file"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"resp_server.programs.{program}", "--port", "0", *options],
            capture_output=True,
            text=True,
            env=os.environ | {"SPARKIS_CONTROL_TOKEN": TOKEN},
            timeout=WAIT_S_MAX,
            check=False,
        )
        assert done.returncode == 1 and error in done.stderr and "Traceback" not in done.stderr, done.stderr
