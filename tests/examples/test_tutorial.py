"""docs/tutorial.md runs line by line, in one bash, and prints what stands there.

Both parts are slow: the story starts Spark several times, and the installation downloads half a gigabyte.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX, eventually
from tests.examples.example import ROOT, environment

pytestmark = pytest.mark.spark

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
INSTALL, STORY = PAGE.split("\n## Some data\n")
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*\n(?:> .*\n)*)((?:(?!\$ ).*\n)*)", re.MULTILINE)
# What bash says of a job that it starts, or that has ended; the page leaves it out.
JOB_NOTICE = re.compile(r"\[\d+\]")
PAGE_PORT = "7379"
PAGE_FOLDER = "/home/ada/first-hour"
# The options with which a command uses another port than its default.
PORT_OPTIONS = {"sparkis status": "--url redis://127.0.0.1:{}", "sparkis serve": "--port {}"}

# What a command prints depends on events: it is run again until it prints what the page shows.
READS = ("redis-cli ", "sparkis status", "sparkis inspect", "sparkis get")

# The parts of outputs that are others in each run: what they are called in a comparison, and how they look.
VARIABLE = {
    "AGE RATES": r"\d+(\.\d)? (s|min) +\d+ +\d+(?= +(live|stale)\n)",
    "UUID": r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    "WRITER": r"host \S+, pid \d+",
    "TIME": r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z",
    "BYTES": r"\b\d+(?= bytes\b)",
    "PACKAGE": r"(?<=[a-z0-9]-)\d+(\.\d+)+(?= |\n)",
    "CORE": r"\b(compiled|python)(?= core$)",
}


@dataclass(frozen=True)
class File:
    """A file that the page tells its reader to save."""

    name: str
    text: str


@dataclass(frozen=True)
class Typed:
    """A command of the page, and what it prints there."""

    command: str
    printed: str


def steps(text: str) -> Iterator[File | Typed]:
    """Return the files and the commands of some text, in its order."""
    for language, block in BLOCK.findall(text):
        if language == "python":
            name = re.match(r"# (\S+)\n", block)
            assert name, f"a file without a name in its first line: {block}"
            yield File(name[1], block)
        else:
            assert block.startswith("$ ")
            for command, printed in COMMAND.findall(block):
                yield Typed(command.replace("\n> ", "\n"), printed)


def comparable(printed: str) -> str:
    """Return an output with names in place of its variable parts, and columns of any width."""
    for name, pattern in VARIABLE.items():
        printed = re.sub(pattern, f"<{name}>", printed, flags=re.MULTILINE)
    return re.sub(" {2,}", "  ", printed)


class Shell:
    """One bash, in a folder of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._port = str(free_port())
        self._folder = folder
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._run("set -m\n")  # as in an interactive shell, jobs are process groups

    def save(self, file: File) -> None:
        """Save a file of the page."""
        (self._folder / file.name).write_text(file.text.replace(PAGE_PORT, self._port))

    def type(self, typed: Typed) -> None:
        """Run a command; AssertionError if it does not print what the page shows."""
        command, expected = typed.command.replace(PAGE_PORT, self._port), comparable(typed.printed)
        for name, option in PORT_OPTIONS.items():
            command = command.replace(name, f"{name} {option.format(self._port)}")
        if command.startswith(READS):
            eventually(
                lambda: comparable(self._run(command)), lambda printed: printed == expected, f"{command}not {expected}"
            )
        else:
            assert comparable(self._run(command)) == expected, command

    def _run(self, command: str) -> str:
        end = uuid4().hex
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"{command}jobs > /dev/null 2>&1\necho {end}\n")
        self._bash.stdin.flush()
        lines = []
        while (line := self._bash.stdout.readline()) != f"{end}\n":
            assert line, f"bash has ended at {command}"
            if not JOB_NOTICE.match(line):
                lines.append(line)
        return "".join(lines).replace(str(self._folder), PAGE_FOLDER).replace(self._port, PAGE_PORT)

    def end(self) -> None:
        """End the shell and all that it has started."""
        self._bash.communicate("kill -9 $(jobs -p)\nsparkis stop --log state/log\n", timeout=WAIT_S_MAX)


@pytest.mark.slow
def test_page_shows_output_of_its_commands(tmp_path: Path) -> None:
    # FAKETTY: redis-cli prints as it does on a terminal.
    shell = Shell(tmp_path, environment(XDG_CACHE_HOME=str(tmp_path / "cache"), FAKETTY="1", TMPDIR=str(tmp_path)))
    try:
        for step in steps(STORY):
            if isinstance(step, File):
                shell.save(step)
            else:
                shell.type(step)
    finally:
        shell.end()


def test_packages_of_server_are_those_that_it_depends_on() -> None:
    [light, _] = re.findall(r"^Successfully installed (.*)$", INSTALL, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.match(r"[\w-]+", each)[0] for each in [*project["dependencies"], project["name"]]}  # type: ignore[index]
    assert {package.rpartition("-")[0] for package in light.split()} == named


@pytest.mark.slow
def test_installation_has_shown_output(tmp_path: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "VIRTUAL"))}
    shell = Shell(tmp_path, bare | {"HOME": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    clone, *rest = steps(INSTALL)
    assert isinstance(clone, Typed) and clone.command == "git clone https://github.com/sparkis/sparkis\n"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "node_modules", "*.so", "*.cpp")
    shutil.copytree(ROOT, tmp_path / "sparkis", ignore=ignored)
    try:
        for step in rest:
            assert isinstance(step, Typed)
            shell.type(step)
    finally:
        shell.end()
