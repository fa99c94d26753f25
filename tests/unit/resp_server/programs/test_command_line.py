"""Mistakes of a command line: each is one line on stderr, and all are reported together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_hooks.cli import main


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """A program leaves its process, which is that of the tests here, without handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_password_and_password_file_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(tmp_path)
    assert main(["serve", "--log", log, "--store", log, "--requirepass", "a", "--requirepass-file", "b"]) == 1
    assert "--requirepass and --requirepass-file are both given; give one of them" in capsys.readouterr().err


def test_port_and_ports_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state-server", "--log", str(tmp_path), "--port", "0", "--ports", "7400"]) == 1
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
def test_all_mistakes_of_command_line_are_reported_together(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--log", "/nowhere", "--token-file", "/nowhere"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith(f"sparkis {words[0]}: ") and text in line


def test_unmakeable_folder_of_stores_is_named_with_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for store, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        assert main(["serve", "--log", str(tmp_path), "--store", str(tmp_path / store)]) == 1
        assert f"sparkis serve: --store {tmp_path / store}: {reason}; name a folder" in capsys.readouterr().err
