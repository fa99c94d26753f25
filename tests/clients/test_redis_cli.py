"""redis-cli and redis-benchmark, as they are installed with redis-server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running
from compat.conformance.wire import requests
from compat.processes import killed_at_end
from compat.waiting import WAIT_S_MAX

READONLY = "READONLY You can't write against a read only replica."
NO_TERMINAL = {"TERM": "dumb", "HOME": "/nonexistent"}  # no history file, no colours

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli on the PATH")


def cli(server: Running, *arguments: str, program: str = "redis-cli", given: bytes | None = None) -> str:
    """Run a program to its end and return what it prints."""
    command = [program, "-p", str(server.port), *arguments]
    environment = {**os.environ, **NO_TERMINAL}
    done = subprocess.run(command, input=given, capture_output=True, timeout=WAIT_S_MAX, env=environment, check=False)
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def test_one_command_is_answered(sparkis: Running) -> None:
    assert cli(sparkis, "get", "plain") == "value\n"
    assert cli(sparkis, "--no-raw", "get", "plain") == '"value"\n'
    assert cli(sparkis, "--no-raw", "get", "missing") == "(nil)\n"
    assert cli(sparkis, "--no-raw", "mget", "number", "missing") == '1) "42"\n2) (nil)\n'
    assert cli(sparkis, "set", "a", "b") == READONLY + "\n\n"


def test_resp3_is_shown_as_maps(sparkis: Running) -> None:
    assert cli(sparkis, "-3", "--no-raw", "hgetall", "hash:one") == '1# "field" => "value"\n'
    assert json.loads(cli(sparkis, "--json", "hgetall", "hash:small")) == {f"f{at}": f"v{at}" for at in range(10)}


def test_commands_on_standard_input_are_answered_in_order(sparkis: Running) -> None:
    assert cli(sparkis, given=b"get plain\nget 'with space'\nnope\nstrlen big\n").splitlines() == [
        "value",
        "a b c",
        "ERR unknown command 'nope', with args beginning with: ",
        "",
        "65536",
    ]


def test_scan_lists_keys(sparkis: Running, dataset: Dataset) -> None:
    assert sorted(cli(sparkis, "--scan", "--pattern", "user:*").split()) == ["user:1:name", "user:2:name"]
    assert len(cli(sparkis, "--scan", "--pattern", "many:*").split()) == 300


def test_biggest_keys_are_found(sparkis: Running, dataset: Dataset) -> None:
    shown = cli(sparkis, "--bigkeys")
    assert f"Sampled {len(dataset.keys)} keys in the keyspace!" in shown
    assert "Biggest string found '\"big\"' has 65536 bytes" in shown
    assert "Biggest   hash found '\"hash:large\"' has 1500 fields" in shown
    assert "Biggest   list found '\"list:long\"' has 1500 items" in shown


def test_another_database_is_empty(sparkis: Running) -> None:
    assert cli(sparkis, "-n", "1", "dbsize") == "0\n"


def test_pipe_of_writes_is_refused_and_counted(sparkis: Running) -> None:
    writes = requests([[b"SET", b"a", b"b"], [b"HSET", b"c", b"d", b"e"], [b"GET", b"plain"]])
    shown = cli(sparkis, "--pipe", given=writes)
    assert shown.count(READONLY) == 2
    assert "errors: 2, replies: 3" in shown


def test_right_password_is_accepted(locked_sparkis: Running) -> None:
    password = str(locked_sparkis.password)
    assert cli(locked_sparkis, "--no-auth-warning", "-a", password, "get", "plain") == "value\n"
    assert (
        cli(locked_sparkis, "--no-auth-warning", "--user", "default", "--pass", password, "get", "plain") == "value\n"
    )
    assert "NOAUTH Authentication required." in cli(locked_sparkis, "get", "plain")
    assert "WRONGPASS" in cli(locked_sparkis, "--no-auth-warning", "-a", "wrong", "get", "plain")


def test_statistics_are_shown_line_by_line(sparkis: Running, dataset: Dataset) -> None:
    with killed_at_end(
        ["redis-cli", "-p", str(sparkis.port), "-i", "0.05", "--stat"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        process.terminate()
    assert lines[1].split()[:2] == ["keys", "mem"]
    assert [line.split()[0] for line in lines[2:]] == [str(len(dataset.keys))] * 2


def test_latency_is_measured(sparkis: Running) -> None:
    assert len(cli(sparkis, "--latency", "-i", "0.1", "--raw").split()) == 4


def test_redis_benchmark_reads(sparkis: Running) -> None:
    shown = cli(sparkis, "-q", "-n", "500", "-c", "5", "-P", "4", "-t", "get,ping", program="redis-benchmark")
    assert re.search(r"GET: [\d.]+ requests per second", shown)
    shown = cli(sparkis, "-q", "-n", "100", "-3", "hgetall", "hash:small", program="redis-benchmark")
    assert re.search(r"hgetall hash:small: [\d.]+ requests per second", shown)


PROMPT = r"\n127\.0\.0\.1:\d+(\[\d+\])?> "


class Terminal:
    """redis-cli at a terminal, as a person has it."""

    def __init__(self, port: int) -> None:
        self._main, child = pty.openpty()
        termios.tcsetwinsize(child, (40, 120))  # a terminal without a size is asked for where its cursor is
        self._process = subprocess.Popen(
            ["redis-cli", "-p", str(port)],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, **NO_TERMINAL, "TERM": "xterm"},
        )
        os.close(child)
        self.shown = ""

    def enter(self, line: str) -> str:
        """Type a line and return what was shown up to the next prompt: what is typed before it is lost now and then."""
        return self.type(f"{line}\r", PROMPT)

    def type(self, text: str, until: str) -> str:
        """Type, wait until what a pattern matches is shown, and return what was shown since."""
        start = len(self.shown)
        os.write(self._main, text.encode())
        ends = monotonic() + WAIT_S_MAX
        while not re.search(until, self.shown[start:]):
            ready, _, _ = select.select([self._main], [], [], max(0.0, ends - monotonic()))
            assert ready, f"{until!r} was not shown, but {self.shown[start:]!r}"
            self.shown += os.read(self._main, 65_536).decode("utf-8", "replace")
        return self.shown[start:]

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(sparkis: Running, tmp_path: Path) -> Iterator[Terminal]:
    """A redis-cli that has shown its prompt."""
    made = Terminal(sparkis.port)
    made.type("", "> ")
    yield made
    made.close()


def test_redis_cli_at_terminal_shows_replies(terminal: Terminal) -> None:
    assert '"value"' in terminal.enter("GET plain")
    assert "(error) WRONGTYPE" in terminal.enter("GET hash:one")
    assert READONLY in terminal.enter("SET a b")
    assert "[1]> " in terminal.enter("SELECT 1")


def test_redis_cli_shows_hints_from_command_docs(terminal: Terminal) -> None:
    assert "key start end" in terminal.type("getrange ", "key start end")
    assert "job" in terminal.type("\x15state list ", "job")  # which its own table does not know


def test_redis_cli_shows_help_from_command_docs(terminal: Terminal) -> None:
    """The words are the server's: redis-cli 7.0's own table says `Get the value of a key`."""
    assert "Returns the string value of a key." in terminal.type("help get\r", "Returns the string value of a key.")


def test_help_of_command_that_only_sparkis_has_is_shown(terminal: Terminal) -> None:
    assert "STATE LAG" in terminal.type("help state lag\r", "STATE LAG").upper()
