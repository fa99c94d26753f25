"""The clients of `<folder>/clients.toml`, and how a folder's programs are built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
# What is built and fetched; git ignores it.
BUILT = ROOT / "build" / "clients"
MAVEN_PACKAGES = ROOT / "build" / "maven"

BUILD_S_MAX = 1_800.0
LOG_CHARS_MAX = 4_000
# Debian's packages of commands that programs need. Its Go and Rust may be too old, so they are not installed.
PACKAGES = {"cc": "gcc", "javac": "default-jdk-headless", "make": "make", "mvn": "maven"}


class BuildError(Exception):
    """A folder's programs cannot be built."""


@dataclass(frozen=True)
class Client:
    """A client's program.

    Args:
        folder: The folder that is built, of this package.
        name: The client's name.
        about: What the program does, for the page.
        command: The program and its arguments; `{built}` is the folder of what is built, `{folder}` that of the source.
        places: The names of the places where the program runs.
        version: The file that names the client's version, and the text before it: `go.mod go-redis/v9`.
        needs: Commands that must be on the PATH: those of `PACKAGES` are installed, without others it is skipped.
        debian: Debian's packages that are installed where they are missing.
        part: What is built of the folder, so that a client does not wait for others': a Maven module, a Go
            package, a program of Cargo.
        is_quick: Whether the program belongs to the short selection.
    """

    folder: str
    name: str
    about: str
    command: str
    places: Sequence[str]
    version: str
    needs: Sequence[str] = ()
    debian: Sequence[str] = ()
    part: str = ""
    is_quick: bool = False

    @property
    def words(self) -> list[str]:
        """The command line."""
        places = {"built": str(BUILT / self.folder), "folder": str(HERE / self.folder)}
        return [word.format(**places) for word in self.command.split()]

    @property
    def missing(self) -> list[str]:
        """The commands that it needs, and that are not installed."""
        return [each for each in self.needs if shutil.which(each) is None]

    def version_text(self) -> str:
        """Return the client's version: of the build file, or of Debian's package."""
        place, _, package = self.version.partition(" ")
        if place == "debian":
            command = ["dpkg-query", "--show", "--showformat=${Version}", package]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        text = (HERE / self.folder / place).read_text(encoding="utf-8")
        found = re.search(re.escape(package) + r"\D*?(\d+\.\d[\w.-]*)", text)
        if found is None:
            raise BuildError(f"{self.folder}/{place} has no version of {package}")
        return found[1]


def clients() -> Iterator[Client]:
    """Return the clients of all folders; ValueError if a row has unknown or missing fields."""
    for path in sorted(HERE.glob("*/clients.toml")):
        rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["client"]
        for row in rows:
            try:
                yield Client(path.parent.name, **row)
            except TypeError as error:
                raise ValueError(f"{path}: {row.get('name')}: {error}") from None


def install(client: Client) -> None:
    """Install Debian's packages that a client needs and that are missing; BuildError if that is not possible.

    A language that cannot be installed is no error: its clients are skipped.
    """
    for missing in client.missing:
        package = PACKAGES.get(missing)
        if package is not None:
            with suppress(BuildError):
                _run(["sh", "scripts/program.sh", missing, package, package], ROOT)
    if client.missing:
        return
    for package in client.debian:
        command = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
        if subprocess.run(command, capture_output=True, text=True).stdout != "installed":
            _run(["sh", "scripts/program.sh", package, package], ROOT)


@cache
def build(folder: str, part: str) -> None:
    """Build a part of a folder by its build files, if the folder has changed; BuildError with the end of the log."""
    source, built = HERE / folder, BUILT / folder
    ready = built / f".ready-{part}"
    changed_s = max(path.stat().st_mtime for path in source.rglob("*"))
    if ready.exists() and ready.stat().st_mtime > changed_s:
        return
    built.mkdir(parents=True, exist_ok=True)
    _build(source, part, built)
    ready.touch()


def _build(source: Path, part: str, built: Path) -> None:
    if (source / "pom.xml").exists():
        given = [
            f"-Dmaven.repo.local={MAVEN_PACKAGES}",
            f"-Dbuilt={built}",
            "-DoutputDirectory=${project.build.directory}/lib",
        ]
        goals = ("compile", "dependency:copy-dependencies")
        # The JDK of the tests' Spark may have no compiler.
        java = Path(shutil.which("javac") or "javac").resolve().parents[1]
        _run(["mvn", "--batch-mode", "--quiet", "--projects", part, *given, *goals], source, JAVA_HOME=str(java))
    if (source / "go.mod").exists():
        _run(["go", "build", "-o", f"{built}/", f"./{part}"], source)
    if (source / "Cargo.toml").exists():
        _run(["cargo", "build", "--quiet", "--release", "--bin", part, "--target-dir", str(built)], source)
    if (source / "package.json").exists():
        shutil.copytree(source, built, dirs_exist_ok=True)  # Node finds packages beside the program
        _run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"], built)
    if (source / "requirements.txt").exists():
        _run([sys.executable, "-m", "venv", str(built)], source)
        pip = [str(built / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        _run([*pip, "-r", "requirements.txt"], source)
    if (source / "Makefile").exists():
        _run(["make", f"BUILT={built}"], source)


def _run(command: Sequence[str], folder: Path, **variables: str) -> None:
    environment = {**os.environ, "CLICOLOR": "0", **variables}
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
        env=environment,
    )
    if done.returncode:
        raise BuildError(
            f"{' '.join(command[:2])} failed in {folder.name}:\n{(done.stdout + done.stderr)[-LOG_CHARS_MAX:]}"
        )
