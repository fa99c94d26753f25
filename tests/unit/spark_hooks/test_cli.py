"""Mistakes on a command line of `sparkis` are one line, with the nearest name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_hooks.cli import CLOSED_PIPE, main
from tests.golden_checkpoints import NEWEST, unpack


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["serv"], "sparkis: 'serv' is not a command (did you mean serve?); see sparkis --help"),
        (["moon"], "sparkis: 'moon' is not a command; see sparkis --help"),
        # The beginning of an option's name is not the option.
        (
            ["serve", "--log", ".", "--prot", "7380"],
            "sparkis serve: unrecognized arguments: --prot 7380 (did you mean --port?); see sparkis serve --help",
        ),
        (
            ["status", "--ulr=x"],
            "sparkis status: unrecognized arguments: --ulr=x (did you mean --url?); see sparkis status --help",
        ),
        (["serve"], "sparkis serve: the following arguments are required: --log; see sparkis serve --help"),
        (
            ["serve", "--log", ".", "--port", "99999"],
            "sparkis serve: argument --port: '99999' is not a port from 0 to 65535; see sparkis serve --help",
        ),
    ],
)
def test_mistake_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_command_ends_silently_when_its_reader_closes_pipe(tmp_path: Path, unbuffered: str) -> None:
    unpack(NEWEST, "hdfs-window", tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "sparkis", "inspect", str(tmp_path)],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, b"")
