"""The README's first block is what its commands print. The checkpoint is that of the query `airports` of the demo.

It was copied from a `sparkis demo --speed 0` on Spark 4.3, without the list of its input files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```\n(\$ sparkis inspect .*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
README_HOME, README_PORT = "/home/ada", "7379"


class Terminal:
    """Runs commands in the home folder of the README's reader, with another port."""

    def __init__(self, home: Path) -> None:
        self._home, self._port = home, str(free_port())
        # FAKETTY: redis-cli prints as it does on a terminal.
        self._environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT), "FAKETTY": "1"}
        self._environment |= {"XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command."""
        program, *arguments = command.replace(README_PORT, self._port).split()
        whole = [sys.executable, "-m", "sparkis", *arguments] if program == "sparkis" else [program, *arguments]
        whole += ["--port", self._port] if "--serve" in arguments else []
        return subprocess.Popen(whole, cwd=self._home, env=self._environment, stdout=subprocess.PIPE, text=True)

    def printed_by(self, command: str) -> str:
        """Run a command to its end, and return what it prints."""
        return self.as_in_the_readme(self.start(command).communicate(timeout=WAIT_S_MAX)[0])

    def as_in_the_readme(self, printed: str) -> str:
        """Return a command's output with the README's folder and port."""
        return printed.replace(str(self._home), README_HOME).replace(self._port, README_PORT)


def test_readmes_first_block_is_output_of_its_commands(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "golden" / "airports.tar.xz") as archive:
        archive.extractall(tmp_path / "checkpoints", filter="data")
    [block] = BLOCK.findall(README)
    (inspect, facts), (attach, served), (read, value) = COMMAND.findall(block)
    terminal = Terminal(tmp_path)
    assert terminal.printed_by(inspect) == f"{facts.rstrip()}\n"
    attaching = terminal.start(attach)
    assert attaching.stdout is not None
    try:
        lines = [attaching.stdout.readline() for _ in served.rstrip().splitlines()]
        assert terminal.as_in_the_readme("".join(lines)) == f"{served.rstrip()}\n"
        assert terminal.printed_by(read) == value
    finally:
        attaching.terminate()
        attaching.communicate(timeout=WAIT_S_MAX)
