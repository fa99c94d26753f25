"""The clients' programs: how each is installed and started, and how it is asked for a measurement.

A program connects to PORT, and reads lines: a workload, the number of its tasks, and seconds. Each task repeats the
workload's call until the time is over, at least once, and checks each reply; the program answers with a line of JSON.
All tasks of a program walk through the same keys in order:

<prefix>:text:<number>      the text `value:<number>`
<prefix>:map:<number>       20 fields: field:<field> has `<number>:<field>`; one for ten texts
<prefix>:written:<number>   what `set` writes
<prefix>:counter            what `optimistic` increments: WATCH, GET, MULTI, SET, EXEC, again if EXEC replies nil

What is installed or built is in `.clients`, which git ignores, but for the clients that the tests have anyway.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from benchmarks.servers import BenchmarkError
from compat.conformance.dataset import Dataset
from compat.swap_programs.environments import INSTALLED

HERE = Path(__file__).parent
GO, RUST, JAVA = HERE / "go", HERE / "rust", HERE / "java"
NODE_MODULES = HERE.parents[1] / "tests" / "clients" / "node_modules"

KEYS, MAPS, FIELDS = 10_000, 1_000, 20
# A program that has not answered so long after its measurement should have ended is killed (guess: time-outs of
# clients are shorter).
ANSWER_S_MAX = 60.0


class Workload(NamedTuple):
    """What the tasks of a program repeat."""

    title: str
    name: str
    tasks: int


READS = (
    Workload("GET by 50 tasks", "get", 50),
    Workload("MGET of 20 by 50", "mget", 50),
    Workload("HGETALL of 20 by 50", "hgetall", 50),
    Workload("pipeline of 100 GETs by 10", "pipeline", 10),
    Workload("MULTI GET GET EXEC by 100", "transaction", 100),
)
WRITES = (
    Workload("SET by 50", "set", 50),
    Workload("WATCH GET MULTI SET EXEC by 1", "optimistic", 1),
    Workload("the same by 10 of one key", "optimistic", 10),
)


def dataset(prefix: str, keys: int = KEYS) -> Dataset:
    """Return the keys that programs read."""
    maps = range(keys * MAPS // KEYS)
    return Dataset(
        strings={b"%b:text:%d" % (prefix.encode(), each): b"value:%d" % each for each in range(keys)},
        hashes={
            b"%b:map:%d" % (prefix.encode(), each): {b"field:%d" % at: b"%d:%d" % (each, at) for at in range(FIELDS)}
            for each in maps
        },
        lists={},
        sets={},
        sorted_sets={},
    )


@dataclass(frozen=True)
class Program:
    """A client's program.

    Args:
        needs: The commands that must be on the PATH.
        installed: Installs what is missing, and returns the command that runs the program.
        version: Returns the client's version.
    """

    name: str
    needs: Sequence[str]
    installed: Callable[[], Sequence[str]]
    version: Callable[[], str]

    @property
    def missing(self) -> Sequence[str]:
        """The commands that it needs, and that are not installed."""
        return [each for each in self.needs if shutil.which(each) is None]


def _go(client: str) -> Callable[[], Sequence[str]]:
    def installed() -> Sequence[str]:
        built = INSTALLED / "benchmark-go"
        _run("go", "build", "-o", str(built), ".", cwd=GO)
        return [str(built), client]

    return installed


def _rust() -> Sequence[str]:
    target = INSTALLED / "benchmark-rust"
    _run("cargo", "build", "--quiet", "--release", "--target-dir", str(target), cwd=RUST)
    return [str(target / "release" / "benchmark-clients")]


def _java() -> Sequence[str]:
    jars, pom = INSTALLED / "benchmark-java", JAVA / "pom.xml"
    installed = jars / pom.name  # of the jars that are there
    if not installed.exists() or installed.read_text() != pom.read_text():
        shutil.rmtree(jars, ignore_errors=True)
        _run("mvn", "--batch-mode", "--quiet", "dependency:copy-dependencies", f"-DoutputDirectory={jars}", cwd=JAVA)
        shutil.copy(pom, installed)
    return ["java", "-cp", f"{jars}/*", str(JAVA / "Lettuce.java")]


def _python() -> Sequence[str]:
    return [sys.executable, str(HERE / "redis_py.py")]


def _node() -> Sequence[str]:
    return ["node", str(HERE / "node_redis.mjs")]


def _run(*command: str, cwd: Path) -> None:
    found = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if found.returncode:
        text = "\n".join((found.stdout + found.stderr).splitlines()[-10:])
        raise BenchmarkError(f"{' '.join(command[:2])} failed in {cwd.name}:\n{text}")


def _written_in(path: Path, pattern: str) -> Callable[[], str]:
    """Return a function that finds a version in a file."""

    def found() -> str:
        match = re.search(pattern, path.read_text(), re.DOTALL)
        if match is None:
            raise BenchmarkError(f"{path} names no version of the client")
        return match[1]

    return found


GO_REDIS = _written_in(GO / "go.mod", r"/go-redis/v9 v(\S+)")
RUEIDIS = _written_in(GO / "go.mod", r"/rueidis v(\S+)")
PROGRAMS = (
    Program("go-redis", ("go",), _go("go-redis"), GO_REDIS),
    Program("rueidis without tracking", ("go",), _go("rueidis"), RUEIDIS),
    Program("rueidis", ("go",), _go("rueidis-tracking"), RUEIDIS),
    Program("rueidis with its cache", ("go",), _go("rueidis-cache"), RUEIDIS),
    Program("redis-rs", ("cargo",), _rust, _written_in(RUST / "Cargo.toml", r'redis = \{ version = "=([^"]+)')),
    Program("Lettuce", ("java", "mvn"), _java, _written_in(JAVA / "pom.xml", r"lettuce-core.*?<version>([\d.]+\d)")),
    Program("redis-py", (), _python, lambda: version("redis")),
    Program("node-redis", ("node",), _node, _written_in(NODE_MODULES / "redis/package.json", r'"version": "([^"]+)')),
)


class Outcome(NamedTuple):
    """What a program has measured. error: the text of one of the errors."""

    requests: int
    seconds: float
    errors: int
    wrong: int
    error: str = ""


class Running:
    """A program that is connected to an address."""

    def __init__(self, name: str, command: Sequence[str], port: int, prefix: str, keys: int = KEYS) -> None:
        self._name = name
        with _half_of_the_processors():
            self._process = subprocess.Popen(
                [*command, str(port), prefix, str(keys)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def measured(self, workload: Workload, seconds: float) -> Outcome:
        """Run a workload. BenchmarkError: a reply was wrong, a request failed, or the program did not answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        limit = Timer(seconds + ANSWER_S_MAX, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(f"{workload.name} {workload.tasks} {seconds}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            code = self._process.wait()
            raise BenchmarkError(f"{self._name} ended during {workload.title}, with exit code {code}")
        found = Outcome(**json.loads(line))
        if found.errors or found.wrong:
            raise BenchmarkError(
                f"{self._name}, {workload.title}: of {found.requests:,} calls {found.wrong:,} had a wrong reply, and "
                f"{found.errors:,} failed: {found.error}"
            )
        return found

    def stop(self) -> None:
        """End the program, which ends with its input."""
        limit = Timer(ANSWER_S_MAX, self._process.kill)
        limit.start()
        self._process.communicate()
        limit.cancel()


@contextmanager
def _half_of_the_processors() -> Iterator[None]:
    """Have a process that is started in the block run on half of the processors: a server has the other half free."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[len(before) // 2 :])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
