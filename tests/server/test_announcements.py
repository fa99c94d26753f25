"""A writer announces its epochs to servers that only poll; announcements are hints that cost a commit nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from compat.conformance.certificates import Authority
from compat.conformance.servers import free_port, redis_server
from compat.waiting import WAIT_S_MAX, eventually, eventually_async
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client, ClientError
from resp_server.net.tls import Certificates, TlsFiles, client_context
from resp_server.registry import announcer as announcer_module
from resp_server.registry.announcer import Announcer
from resp_server.serving import log_watch
from resp_server.serving.announcement_port import AnnouncementListener
from resp_server.serving.appliers import Appliers
from resp_server.serving.job_catalog import LocalJobCatalog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Keyspace
from tests.server.announced import TOKEN, listening
from tests.server.commands import Start

HOUR_S = 3600.0
STATE = StateDescriptor("s", key="k", value="v")
CHANGE = Change("s", Op.PUT, b"job:s:a", None, b"1")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(announcer_module, "RECORD_PAUSE_S", 0.01)


@pytest.fixture
def announcing(tmp_path: Path) -> Iterator[Callable[..., Announcer]]:
    made: list[Announcer] = []

    def make(*addresses: str) -> Announcer:
        made.append(Announcer(str(tmp_path), addresses, token=TOKEN))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_epoch_is_announced_with_its_job_and_term(announcing: Callable[..., Announcer]) -> None:
    with listening() as (port, receiver), listening() as (other_port, other):
        announcer = announcing(f"127.0.0.1:{port}", f"127.0.0.1:{other_port}")
        announcer.announce("job", 3, 7)
        eventually(lambda: receiver.noticed == other.noticed == [("job", 3, 7)], awaited="the announcement")


def test_newest_epoch_is_announced_once_receiver_is_back(announcing: Callable[..., Announcer]) -> None:
    with listening() as (port, receiver):
        announcer = announcing(f"127.0.0.1:{port}")
        announcer.announce("job", 1, 0)
        eventually(lambda: receiver.noticed)
    for epoch in range(1, 5):
        announcer.announce("job", 1, epoch)
    with listening(port) as (_, receiver):
        eventually(lambda: ("job", 1, 4) in receiver.noticed, awaited="the newest epoch")


def test_mute_receiver_delays_no_commit_and_no_receiver(
    announcing: Callable[..., Announcer],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, listening() as (port, receiver):
        announcer = announcing(f"127.0.0.1:{silent.getsockname()[1]}", f"127.0.0.1:{port}")
        for epoch in range(100):
            announcer.announce("job", 1, epoch)
        eventually(lambda: receiver.noticed and receiver.noticed[-1] == ("job", 1, 99), awaited="the last epoch")


def test_moved_registry_is_found_by_its_record(announcing: Callable[..., Announcer], tmp_path: Path) -> None:
    def record(port: int, term: int) -> None:
        text = '{"format": 1, "term": %d, "address": "127.0.0.1:%d", "replicas": 0, "topology": null}'
        (tmp_path / "registry.json").write_text(text % (term, port))

    announcer = announcing()
    announcer.announce("job", 1, 0)  # there is no registry yet
    with listening() as (port, receiver):
        record(port, 1)

        def is_announced() -> bool:
            announcer.announce("job", 1, 1)
            return bool(receiver.noticed)

        eventually(is_announced)
    with listening() as (port, receiver):
        announcer.announce("job", 1, 2)  # to the one that has ended
        record(port, 2)
        eventually(lambda: ("job", 1, 2) in receiver.noticed, awaited="the registry of the next term")


def test_announcements_need_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    Announcer(str(tmp_path)).announce("job", 1, 1)
    with pytest.raises(ValueError, match=f"set {TOKEN_VARIABLE} to the same secret"):
        Announcer(str(tmp_path), ["127.0.0.1:1"])
    with pytest.raises(ValueError, match="'here' is not HOST:PORT"):
        Announcer(str(tmp_path), ["here"], token=TOKEN)


def test_port_takes_announcements_with_token_and_nothing_else() -> None:
    with listening() as (port, receiver):
        with Client("127.0.0.1", port, password=TOKEN) as client:
            assert client.call("NOTICE", "job", "1") == "OK"
            for words in (("NOTICE", "job"), ("NOTICE", "job", "x"), ("STOP", "0"), ("WAIT", "job", "1", "1")):
                with pytest.raises(ClientError, match="not a request of the announcements port"):
                    client.call(*words)
        with pytest.raises(ClientError, match="AUTH with the server's token must be the first request"):
            Client("127.0.0.1", port, password="wrong")
        assert receiver.noticed == [("job", 0, 1)]


@pytest.mark.parametrize("has_certificate", [True, False])
def test_epochs_are_announced_over_tls(tmp_path: Path, has_certificate: bool) -> None:
    authority = Authority(tmp_path)
    cert, key = map(str, authority.issue("server"))
    certificates = Certificates(TlsFiles(cert, key, str(authority.ca), "yes" if has_certificate else "no"))
    shown = TlsFiles(*map(str, authority.issue("writer"))) if has_certificate else TlsFiles()
    with listening(certificates=certificates) as (port, receiver):
        to = [f"127.0.0.1:{port}"]
        with closing(Announcer(tmp_path, to, token=TOKEN)) as plain:  # it gets nowhere
            plain.announce("plain", 1, 1)
            with closing(Announcer(tmp_path, to, token=TOKEN, tls=replace(shown, ca=str(authority.ca)))) as announcer:
                announcer.announce("job", 3, 7)
                eventually(lambda: receiver.noticed, awaited="the announcement")
        assert receiver.noticed == [("job", 3, 7)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_server_with_upstream_takes_announcements_over_tls_as_it_serves_its_clients(
    tmp_path: Path, start: Start, workers: str
) -> None:
    authority = Authority(tmp_path)
    with LogWriter(tmp_path / "log", "job", [STATE]) as writer, redis_server(tmp_path) as upstream:
        writer.publish([CHANGE])
        port = free_port()
        server = start(
            *("serve", "--log", tmp_path / "log", "--store", tmp_path / "store", "--workers", workers, "--port", 0),
            *("--upstream", f"redis://127.0.0.1:{upstream.port}", "--ownership", tmp_path / "owners.json"),
            *("--announcements", port, *authority.options()),
        )
        clients_port = int(server.wait_for(r"started @ 127\.0\.0\.1:(\d+), .*TLS")[1])
        shown = authority.client("writer")
        tls = client_context(TlsFiles(shown["ssl_certfile"], shown["ssl_keyfile"], str(authority.ca)))
        with Client("127.0.0.1", port, password="of-the-test", tls=tls, timeout_s=WAIT_S_MAX) as client:
            assert client.call("NOTICE", "job", "1", "1") == "OK"
        with pytest.raises(ClientError):
            Client("127.0.0.1", port, password="of-the-test", timeout_s=WAIT_S_MAX)
        with redis.Redis(port=clients_port, ssl=True, **shown) as reader:
            assert eventually(lambda: value_of(reader)) == b"1"


def value_of(reader: redis.Redis) -> object:
    """Return the state's value; None while the server is loading."""
    with suppress(redis.ConnectionError, redis.ResponseError):
        return reader.get("job:s:a")
    return None


def test_writer_without_spark_announces_its_epochs(tmp_path: Path, announcing: Callable[..., Announcer]) -> None:
    with listening() as (port, receiver):
        announcer = announcing(f"127.0.0.1:{port}")
        with LogWriter(tmp_path, "job", [STATE], announce=announcer.announce) as writer:
            eventually(lambda: receiver.noticed == [("job", 1, -1)], awaited="the writer's begin")
            writer.publish([CHANGE])
            eventually(lambda: receiver.noticed[-1] == ("job", 1, 0), awaited="the epoch")


def test_announced_epoch_is_applied_without_poll_or_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watch.LogWatch, "watch", lambda *_: None)  # as for a log on another machine

    async def follow() -> None:
        keyspace = Keyspace()
        writer = LogWriter(tmp_path / "log", "job", [STATE])
        writer.publish([CHANGE])
        appliers = Appliers(LocalJobCatalog(keyspace), [str(tmp_path / "log")], tmp_path, probe_interval_s=HOUR_S)
        await appliers.start()
        await appliers.catch_up()
        listener = AnnouncementListener(appliers, TOKEN)
        announcer = Announcer(tmp_path, [f"127.0.0.1:{listener.start('127.0.0.1', 0)}"], token=TOKEN)
        try:
            for _ in range(3):
                epoch = writer.publish([CHANGE])
                announcer.announce("job", 1, epoch)
                await eventually_async(lambda: appliers.visible["job"].epoch, lambda seen, epoch=epoch: seen == epoch)
            late = LogWriter(tmp_path / "log", "late", [STATE.for_job("late")])
            late.publish([Change("s", Op.PUT, b"late:s:a", None, b"1")])
            announcer.announce("late", 1, 0)
            await eventually_async(lambda: "late" in appliers.visible)
        finally:
            await asyncio.to_thread(announcer.close)
            listener.stop()
            await appliers.stop()

    asyncio.run(follow())


def test_serve_listens_for_announcements(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    server = start("serve", "--log", tmp_path / "log", "--store", tmp_path / "store", "--port", 0, "--announcements", 0)
    port = int(server.wait_for(r"announcements @ 127\.0\.0\.1:(\d+)")[1])
    with Client("127.0.0.1", port, password="of-the-test") as client:
        assert client.call("NOTICE", "job", "1", "1") == "OK"


def test_serve_refuses_announcements_without_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkis", "serve", "--log", str(tmp_path), "--announcements", "0"]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert ended.returncode != 0
    assert f"--announcements needs a token: set {TOKEN_VARIABLE}" in ended.stderr
    assert "Traceback" not in ended.stderr
