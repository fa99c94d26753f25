"""The options of `sparkis ui`, and its error if its packages are missing."""

from __future__ import annotations

import argparse

import pytest

from sparkis_ui import command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=command.DESCRIPTION, epilog=command.EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(made)
    return made


@pytest.mark.parametrize("port", ["x", "-1", "65536", "80.5", "", "7_380", "\u0663", "9" * 5000])
def test_port_is_number(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--port={port}"])
    assert "is not a port from 0 to 65535" in capsys.readouterr().err


def test_help_has_summary_and_examples() -> None:
    said = parser().format_help()
    for words in ("only reads", "sparkis ui --url", "+@read", "default redis://127.0.0.1:7379"):
        assert words in " ".join(said.split()), words


def test_missing_packages_name_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "NEEDED", ("redis", "a_package_that_is_not_there"))
    assert command.run(parser().parse_args([])) == 1
    said = capsys.readouterr().err
    assert said == "sparkis ui: needs a_package_that_is_not_there: pip install 'sparkis[ui]'\n"


def test_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parser().parse_args(["--url", "http://h"])) == 1
    said = capsys.readouterr().err
    assert said.startswith("sparkis ui: 'http://h' is not a URL of the form redis://host[:port]")
    assert said.count("\n") == 1
