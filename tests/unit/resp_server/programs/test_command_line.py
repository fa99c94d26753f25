"""What the programs take on their command lines, and the one line that is said of anything else."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resp_server.net.listeners import cannot_listen
from resp_server.settings.option_values import http_address
from spark_hooks.cli import CLOSED_PIPE, main
from tests.golden_checkpoints import NEWEST, unpack

OF_SERVERS = (["serve", "--log", "log"], ["proxy", "--log", "log"], ["state-server", "--log", "log"])
PORTS = [(["registry", "--log", "log"], "--port"), (["demo"], "--port"), (["attach", "--checkpoint", "c"], "--port")]
PORTS += [(words, "--port") for words in OF_SERVERS] + [(words, "--tls-port") for words in OF_SERVERS[:2]]


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """A program leaves its process, which is that of the tests here, without handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("given", ["70000", "-1", "abc", "", "7_379", "\u0663", "9" * 5000])
@pytest.mark.parametrize(("words", "option"), PORTS)
def test_invalid_port_is_refused(words: list[str], option: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"{option}={given}"])
    assert f"argument {option}: {given!r} is not a port from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("words", OF_SERVERS)
@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--maxclients", "0", "'0' is not a number of connections from 1 to 4294967295"),
        ("--maxclients", "-1", "'-1' is not a number of connections from 1 to 4294967295"),
        ("--timeout", "-1", "'-1' is not a number of seconds from 0 to 2147483647"),
        ("--timeout", "1.5", "'1.5' is not a number of seconds from 0 to 2147483647"),
    ],
)
def test_a_number_that_cannot_be_is_refused(
    words: list[str], option: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"{option}={given}"])
    assert f"argument {option}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["compact", "--log", "log"], ["serve", "--log", "log"], ["state-server", "--log", "log"]]
)
@pytest.mark.parametrize("given", ["-1", "-0.5", "nan", "inf", "an hour"])
def test_invalid_retention_is_refused(words: list[str], given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"--retention={given}"])
    assert f"argument --retention: {given!r} is not a number of minutes, 0 or more" in capsys.readouterr().err


def test_an_address_of_a_registry_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["state-server", "--log", "log", "--registry", "host0"])
    assert "argument --registry: 'host0' is not HOST:PORT" in capsys.readouterr().err


def test_one_of_two_equal_options_is_needed(tmp_path: os.PathLike[str], capsys: pytest.CaptureFixture[str]) -> None:
    log = os.fspath(tmp_path)
    assert main(["serve", "--log", log, "--store", log, "--requirepass", "a", "--requirepass-file", "b"]) == 1
    assert "--requirepass and --requirepass-file are both given; give one of them" in capsys.readouterr().err
    assert main(["state-server", "--log", log, "--port", "0", "--ports", "7400"]) == 1
    assert "--port and --ports are both given; give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["state-server", "--port", "0", "--ports", "7400", "--ready-lag-max", "1"],
            ["--log /nowhere is not a folder", "--port and --ports", "--ready-lag-max is for", "--token-file /nowhere"],
        ),
        (["registry", "--bind", "0.0.0.0"], ["--token-file /nowhere", "say with --advertise HOST"]),
    ],
)
def test_all_mistakes_of_a_command_line_are_reported_together(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--log", "/nowhere", "--token-file", "/nowhere"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith(f"sparkis {words[0]}: ") and text in line


def test_a_port_that_is_taken_is_named_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError) as raised:
            socket.create_server(("127.0.0.1", port))
    assert (
        cannot_listen("127.0.0.1", port, raised.value).strerror
        == f"cannot listen on 127.0.0.1, port {port}: {os.strerror(errno.EADDRINUSE)}"
    )


def test_a_host_that_is_not_known_is_named_in_plain_words() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert cannot_listen("nowhere", 0, error).strerror == "cannot listen on nowhere, port 0: Name or service not known"


def test_unmakeable_folder_of_stores_is_named_with_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for store, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        assert main(["serve", "--log", str(tmp_path), "--store", str(tmp_path / store)]) == 1
        assert f"sparkis serve: --store {tmp_path / store}: {reason}; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_closes_its_pipe_ends_a_command_silently(tmp_path: Path, unbuffered: str) -> None:
    unpack(NEWEST, "hdfs-window", tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "sparkis", "inspect", str(tmp_path)],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, b"")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9379", ("127.0.0.1", 9379)),
        (":9379", ("127.0.0.1", 9379)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:9379", ("::1", 9379)),
    ],
)
def test_an_address_of_metrics_has_a_host_or_not(text: str, address: tuple[str, int]) -> None:
    assert http_address(text) == address


@pytest.mark.parametrize("text", ["", ":", "::1", "::1:9379", "[::1]", "host:", "host:x", "99999", "http://host:1"])
def test_an_address_of_metrics_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not \[HOST:\]PORT, such as 9379, .* or \[::1\]:9379"):
        http_address(text)
