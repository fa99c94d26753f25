"""Passwords, tokens and keys are in nothing that a program shows: a log at level debug, SLOWLOG, MONITOR, INFO, ..."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis

from compat.conformance.servers import free_port, redis_server
from compat.conformance.wire import request
from compat.waiting import WAIT_S_MAX, eventually
from tests.server.commands import Command, Start

STARTED = r"started @ 127\.0\.0\.1:(\d+)"
# All secrets have this in common, so that one search finds each of them.
SECRET_PART = "planted"
OURS, UPSTREAMS, WRONG, NEW = (f"{SECRET_PART}-{whose}" for whose in ("ours", "upstreams", "wrong", "new"))


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET_PART}/secret+key")
    monkeypatch.setenv("SPARKIS_SERVER_PASSWORD", f"{SECRET_PART}-between-servers")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "users.acl").write_text(
        f"user default on >{OURS} ~* &* +@all\nuser other on >{SECRET_PART}-of-other ~* +@read\n"
    )
    (tmp_path / "token").write_text(f"{SECRET_PART}-token")
    return {"acl": tmp_path / "users.acl", "token": tmp_path / "token"}


def watch(port: int) -> socket.socket:
    """Return a client that sees all requests."""
    client = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
    client.sendall(request("AUTH", OURS) + request("MONITOR"))
    received = b""
    while received.count(b"+OK\r\n") < 2:
        received += client.recv(4096)
    return client


def provoke(port: int) -> None:
    """Send secrets in all the ways that there are, right and wrong."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S_MAX) as client:
        for words in (
            ("AUTH", WRONG),
            ("AUTH", "other", WRONG),
            ("AUTH", "other", WRONG, "more"),
            ("HELLO", "3", "AUTH", "other", WRONG),
            ("HELLO", "7", "AUTH", "default", OURS),
            ("HELLO", "2", "AUTH", "default", OURS, "SETNAME", "a b"),
            ("AUTH", OURS),
            ("ACL", "SETUSER", "third", f">{NEW}", f"#{'0' * 63}", "+nothing"),
            ("ACL", "SETUSER", "third", f">{NEW}", "on"),
            ("ACL", "SETUSER", "third", f"<{NEW}", f"<{WRONG}"),
            ("CONFIG", "SET", "timeout", "x", "requirepass", NEW),
            ("MIGRATE", "127.0.0.1", "1", "k", "0", "1", "AUTH2", "user", NEW),
            ("AUTH", "other", f"{SECRET_PART}-of-other"),
            ("SET", "k", "v"),
        ):
            client.sendall(request(*words))
            assert client.recv(65536)
        client.sendall(b"*1\r\n$x\r\n" + request("AUTH", OURS))
        while client.recv(65536):
            pass


def visible_text(port: int, monitor: socket.socket, metrics: int) -> str:
    """Return all that a server shows to an administrator, but for CONFIG GET requirepass, which is as in Redis."""
    asked = (("SLOWLOG", "GET", "1000"), ("INFO", "everything"), ("CLIENT", "LIST"), ("ACL", "LOG"), ("ACL", "LIST"))
    with Redis(port=port, password=OURS, protocol=2, decode_responses=True) as client:
        client.execute_command("ECHO", "the-end")
        said = b""
        while b"the-end" not in said:
            said += monitor.recv(65536)
        texts = [said.decode(), *(str(client.execute_command(*words)) for words in asked)]
        texts.append(str(client.execute_command("CONFIG", "GET", "[^r]*")))
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as reply:
        texts.append(reply.read().decode())
    return "\n".join(texts)


def read_on(command: Command) -> str:
    """Return all that a program has logged, once it has ended."""
    logged = command.logged
    command.end()
    command.read_for(1.0)
    while command.logged != logged:
        logged = command.logged
        command.read_for(1.0)
    return logged


DEBUG = ("--loglevel", "debug", "--slowlog-log-slower-than", "0", "--port", 0)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_server_shows_no_secret(start: Start, log: Path, tmp_path: Path, files: dict[str, Path], workers: int) -> None:
    metrics = free_port()
    options = ("--aclfile", files["acl"], "--workers", workers, "--metrics", metrics, *DEBUG)
    server = start("serve", "--log", log, "--store", tmp_path / "store", *options)
    found = server.wait_for(STARTED)
    server.logged = found.string
    port = int(found[1])
    with closing(watch(port)) as monitor:
        provoke(port)
        text = visible_text(port, monitor, metrics)
    files["acl"].write_text(f"user default on >{NEW} nonsense\n")
    server.hang_up()
    server.wait_for("ERROR")
    assert "ACL" in text and "(redacted)" in text
    assert SECRET_PART not in text
    assert SECRET_PART not in read_on(server)


@pytest.mark.parametrize("password", [UPSTREAMS, pytest.param(WRONG, marks=pytest.mark.slow)])
def test_overlay_shows_no_secret(
    start: Start, log: Path, tmp_path: Path, files: dict[str, Path], password: str
) -> None:
    metrics = free_port()
    with redis_server(tmp_path, password=UPSTREAMS) as upstream:
        options = ("--upstream", f"redis://:{password}@127.0.0.1:{upstream.port}", "--metrics", metrics)
        options = (*options, "--ownership", tmp_path / "owners.json", "--aclfile", files["acl"], *DEBUG)
        server = start("serve", "--log", log, "--store", tmp_path / "store", *options)
        if password == WRONG:
            eventually(lambda: "WRONGPASS" in _more(server), awaited="the refused password is logged")
        else:
            found = server.wait_for(STARTED)
            server.logged = found.string
            port = int(found[1])
            with closing(watch(port)) as monitor:
                provoke(port)
                assert SECRET_PART not in visible_text(port, monitor, metrics)
        assert SECRET_PART not in read_on(server)


def _more(command: Command) -> str:
    command.read_for(0.1)
    return command.logged


def test_mistakes_name_no_secret(log: Path, tmp_path: Path, files: dict[str, Path]) -> None:
    bucket = f"s3://bucket/log?access_key=AKIA&secret_key={SECRET_PART}&endpoint_override=http://127.0.0.1:1"
    config = tmp_path / "sparkis.toml"
    config.write_text(f'requirepass = "{OURS}"\n[serve]\nlog = "{bucket}"\nupstream = "redis://:{NEW}@127.0.0.1:1"\n')
    without_scheme = tmp_path / "ui.toml"
    without_scheme.write_text(f'[ui]\nurl = "user:{NEW}@127.0.0.1:1"\n')
    for words in (
        ("serve", "--log", bucket, "--port", "0", "--compact", "no"),
        ("serve", "--log", f"s3://AKIA:{SECRET_PART}/x@bucket/log", "--port", "0"),
        ("proxy", "--log", str(log), "--upstream", f"redis://:{NEW}@127.0.0.1:x"),
        ("proxy", "--log", str(log), "--upstream", f"http://user:{NEW}@127.0.0.1:1"),
        ("status", "--url", f"redis://:{OURS}@127.0.0.1:1"),
        ("health", "--url", f"redis://:{OURS}@127.0.0.1:1"),
        ("config", "show", "serve", "--config", str(config)),
        ("status", "--url", f"redis://:{OURS}@127.0.0.1:x"),
        ("health", "--url", f"user:{OURS}@127.0.0.1:1"),
        ("ui", "--url", f"redis://:x/{OURS}@127.0.0.1:1"),
        ("config", "show", "ui", "--config", str(without_scheme)),
        ("config", "check", str(config)),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "sparkis", *words],
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
            check=False,
            env=os.environ | {"SPARKIS_CONTROL_TOKEN": f"{SECRET_PART}-token"},
        )
        assert ended.stdout + ended.stderr, words
        assert SECRET_PART not in ended.stdout + ended.stderr, words


def test_registry_and_server_show_no_secret(start: Start, log: Path, tmp_path: Path, files: dict[str, Path]) -> None:
    debug = ("--loglevel", "debug")
    registry = start("registry", "--log", log, "--port", 0, "--token-file", files["token"], *debug)
    found = registry.wait_for(r"started registry @ 127\.0\.0\.1:(\d+)")
    registry.logged = found.string
    with socket.create_connection(("127.0.0.1", int(found[1])), WAIT_S_MAX) as stranger:
        stranger.sendall(request("AUTH", WRONG))
        assert stranger.recv(4096)
    server = start("state-server", "--log", log, "--store", tmp_path / "s", *DEBUG, "--token-file", files["token"])
    server.wait_for("of the topology")
    assert SECRET_PART not in read_on(server)
    assert SECRET_PART not in read_on(registry)
