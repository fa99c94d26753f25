"""Run test files in several processes, each of them a fork of the one that has collected all tests.

    python -m pytest --processes 6

To collect all tests takes as long as some hundred of them, so it is done once. A file's tests run in one process, as
they share servers. The files that took longest in the last run begin first, so that none is left over at the end.
"""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

# What each file took in some whole run, in seconds; the cache has those of the last run in this checkout.
DURATIONS = Path(__file__).with_name("durations.json")
CACHED = "sparkis/durations"
# So many of the processes take files of Spark while there are others for the rest. The modules of a process share a
# session, and each session begins with a cold JVM and cold Python workers.
SPARK_PROCESSES = 2
# The others leave the processors to them: a module of Spark waits for itself most of the time, and a run would end with
# minutes in which one of them is left over, beside an idle processor. (Measured: a minute.)
NICENESS_OF_OTHERS = 5
# Files whose tests run Spark in their own process.
SPARK_FILES = ("tests/spark/", "tests/adversity/test_batches.py")
UNKNOWN_S = 1.0

Items = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes that run tests."""
    parser.addoption("--processes", type=int, default=1, help="run so many test files at a time (see tests/forks.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Run tests in several processes, if there are to be some."""
    if (processes := config.getoption("processes")) > 1:
        config.pluginmanager.register(Forks(config, processes))


def durations_of(config: pytest.Config) -> dict[str, float]:
    """Return what each file took, by its path."""
    stored: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    cache = getattr(config, "cache", None)
    return stored | (cache.get(CACHED, {}) if cache is not None else {})


class Process:
    """A fork, as the process that has collected sees it."""

    def __init__(self, number: int, pid: int, connection: Connection) -> None:
        self.number, self.pid, self.connection = number, pid, connection
        self.items: Items = []  # those of its file that it has not begun
        self.running: pytest.Item | None = None


class Forks:
    """The plugin that runs the tests instead of pytest's own loop."""

    def __init__(self, config: pytest.Config, processes: int) -> None:
        self._config, self._count = config, processes
        self._processes: list[Process] = []
        self._files: list[Items] = []
        self._took_s: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests, and report their results here."""
        if session.config.option.collectonly or (
            session.testsfailed and not session.config.option.continue_on_collection_errors
        ):
            return None
        by_file: dict[Path, Items] = {}
        for item in session.items:
            by_file.setdefault(item.path, []).append(item)
        took_s = durations_of(session.config)
        self._files = sorted(by_file.values(), key=lambda items: -took_s.get(path_of(items[0]), UNKNOWN_S))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for number in range(min(self._count, len(self._files))):
            self._fork(session, number)
        try:
            while self._processes:
                self._take_messages(session)
        finally:
            for each in self._processes:  # after Ctrl-C
                os.kill(each.pid, signal.SIGINT)
                os.waitpid(each.pid, 0)
        self._store_durations()
        return True

    def _fork(self, session: pytest.Session, number: int) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            ours.close()
            for each in self._processes:
                each.connection.close()
            run(session, theirs, number)
        theirs.close()
        self._processes.append(Process(number, pid, ours))

    def _take_messages(self, session: pytest.Session) -> None:
        connections = {each.connection: each for each in self._processes}
        for connection in wait([*connections]):
            process = connections[connection]  # type: ignore[index]
            try:
                kind, content = process.connection.recv()
            except (EOFError, ConnectionResetError):
                self._end(session, process)
            else:
                self._take(session, process, kind, content)

    def _take(self, session: pytest.Session, process: Process, kind: str, content: Any) -> None:
        if kind == "file":
            process.items = self._next_file(process.number) if not (session.shouldfail or session.shouldstop) else []
            process.connection.send([session.items.index(item) for item in process.items])
        elif kind == "begin":
            process.running = session.items[content]
            process.items = [item for item in process.items if item is not process.running]
        elif kind == "end":
            process.running = None
        else:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=content)
            self._took_s[report.nodeid.partition("::")[0]] += getattr(report, "duration", 0.0)
            self._config.hook.pytest_runtest_logreport(report=report)

    def _next_file(self, number: int) -> Items:
        """Take a file off the list: the longest one that is for such a process, or else the longest one."""
        is_for_spark = number < SPARK_PROCESSES
        fitting = (items for items in self._files if path_of(items[0]).startswith(SPARK_FILES) == is_for_spark)
        found = next(fitting, self._files[0] if self._files else [])
        if found:
            self._files.remove(found)
        return found

    def _end(self, session: pytest.Session, process: Process) -> None:
        """Note that a process has ended; if it ended within a test, that test failed, and another process goes on."""
        self._processes.remove(process)
        process.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if process.running is not None:
            item, text = process.running, f"the process ended within this test, with exit code {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")  # type: ignore[arg-type]
            self._config.hook.pytest_runtest_logreport(report=report)
        if process.items:
            self._files.insert(0, process.items)
        if self._files and not (session.shouldfail or session.shouldstop):
            self._fork(session, process.number)

    def _store_durations(self) -> None:
        cache = getattr(self._config, "cache", None)
        if cache is not None:
            rounded = {path: round(took_s, 1) for path, took_s in self._took_s.items()}
            cache.set(CACHED, cache.get(CACHED, {}) | rounded)


def path_of(item: pytest.Item) -> str:
    """Return the path of a test's file, as in its id."""
    return item.nodeid.partition("::")[0]


class Reporter:
    """Sends a fork's reports to the process that has collected."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def run(session: pytest.Session, connection: Connection, number: int) -> NoReturn:
    """Run files until there are no more, in a fork, and end it."""
    code = 1
    try:
        begin(session.config, number)
        if number >= SPARK_PROCESSES:
            os.nice(NICENESS_OF_OTHERS)
        session.config.pluginmanager.register(Reporter(session.config, connection))
        given = items_given(session, connection)
        item = next(given, None)
        while item is not None:
            connection.send(("begin", session.items.index(item)))
            # The next one is known before this one ends, because it keeps the fixtures that both use.
            following = next(given, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("end", None))
            item = following
        code = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    finally:
        connection.close()
        os._exit(code)


def begin(config: pytest.Config, number: int) -> None:
    """Give a fork its own output, its own folder for temporary files, and no terminal."""
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"process{number}-{os.getpid()}"
    factory._basetemp.mkdir()


def items_given(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    """Iterate over the tests of this process, which asks for one file after the other."""
    while True:
        connection.send(("file", None))
        indexes: list[int] = connection.recv()
        if not indexes:
            return
        yield from (session.items[index] for index in indexes)
