"""Values of options: ports, numbers, times and addresses. A program that is given another value ends with one line."""

from __future__ import annotations

import argparse

import pytest

from resp_server.settings.option_values import http_address
from spark_hooks.cli import main

SERVER_COMMANDS = (["serve", "--log", "log"], ["proxy", "--log", "log"], ["state-server", "--log", "log"])
PORTS = [(["registry", "--log", "log"], "--port"), (["demo"], "--port"), (["attach", "--checkpoint", "c"], "--port")]
PORTS += [(words, "--port") for words in SERVER_COMMANDS] + [(words, "--tls-port") for words in SERVER_COMMANDS[:2]]


@pytest.mark.parametrize("given", ["70000", "-1", "abc", "", "7_379", "\u0663", "9" * 5000])
@pytest.mark.parametrize(("words", "option"), PORTS)
def test_invalid_port_is_refused(words: list[str], option: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"{option}={given}"])
    assert f"argument {option}: {given!r} is not a port from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("words", SERVER_COMMANDS)
@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--maxclients", "0", "'0' is not a number of connections from 1 to 4294967295"),
        ("--maxclients", "-1", "'-1' is not a number of connections from 1 to 4294967295"),
        ("--timeout", "-1", "'-1' is not a number of seconds from 0 to 2147483647"),
        ("--timeout", "1.5", "'1.5' is not a number of seconds from 0 to 2147483647"),
    ],
)
def test_out_of_range_number_is_refused(
    words: list[str], option: str, given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"{option}={given}"])
    assert f"argument {option}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["compact", "--log", "log"], ["serve", "--log", "log"], ["state-server", "--log", "log"]]
)
@pytest.mark.parametrize("given", ["-1", "-0.5", "nan", "inf", "an hour"])
def test_invalid_retention_is_refused(words: list[str], given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"--retention={given}"])
    assert f"argument --retention: {given!r} is not a number of minutes, 0 or more" in capsys.readouterr().err


def test_malformed_registry_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["state-server", "--log", "log", "--registry", "host0"])
    assert "argument --registry: 'host0' is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9379", ("127.0.0.1", 9379)),
        (":9379", ("127.0.0.1", 9379)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:9379", ("::1", 9379)),
    ],
)
def test_metrics_address_may_lack_its_host(text: str, address: tuple[str, int]) -> None:
    assert http_address(text) == address


@pytest.mark.parametrize("text", ["", ":", "::1", "::1:9379", "[::1]", "host:", "host:x", "99999", "http://host:1"])
def test_malformed_metrics_address_is_refused_with_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not \[HOST:\]PORT, such as 9379, .* or \[::1\]:9379"):
        http_address(text)
