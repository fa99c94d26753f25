"""Shared by all tests: servers, the data set as a change log, and the rule that CI fails on an unexpected skip."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import compress
from pathlib import Path

import hypothesis
import pytest

from compat.conformance.dataset import Dataset, standard
from compat.conformance.dataset_log import dataset_writer, publish
from compat.conformance.servers import Running, sparkis_server, wait_for_keys
from compat.examples import examples
from compat.fork_server import use_forks
from resp_server.native import CORE
from state_backend import log_lines
from tests.forks import pytest_addoption, pytest_configure  # noqa: F401  # hooks of pytest

HERE = Path(__file__).parent

# Marks of tests that may be skipped where CI is set, which has all but old versions of Spark and, in a container,
# systemd. `make test-pure` has no compiled core.
EXPECTED_SKIPS = {"expected_skip"} | ({"compiled"} if os.environ.get("SPARKIS_PURE") else set())

# Marks of tests that run only where `-m` names the mark.
LEFT_OUT = ("slow", "large", "cluster", "kafka", "hosts", "systemd", "kubernetes", "image", "hadoop")

# In these folders each test has the mark of the folder's name.
MARKED_FOLDERS = {"spark", "kafka", "hosts", "systemd", "kubernetes", "image", "hadoop"}

# Options of the JVM of every Spark driver that a test, or its program, starts: Spark's launcher reads them. A JVM
# that lives for a minute gains nothing from the optimising compiler, and spends half its time in it.
SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Spark's classes, as `make setup-test` archives them; a JVM that cannot use the archive says nothing.
CLASSES = Path(sys.prefix) / "spark.jsa"
if CLASSES.exists() and CLASSES.stat().st_size:
    SHORT_LIVED_JVM += f" -XX:SharedArchiveFile={CLASSES} -Xlog:disable"
os.environ.setdefault("SPARK_SUBMIT_OPTS", SHORT_LIVED_JVM)

# The folders of tests are in memory, if it has room for them: logs sync each file that they write, and the tests would
# wait for a disk much of the time. (Measured: 5 ms a sync there, 0.1 ms here.)
IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 8 << 30
if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# Our programs that tests start are forks, unless a test says otherwise.
use_forks()

# No example has to be found, or run, within a time.
hypothesis.settings.register_profile(
    "tests", max_examples=examples(50), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")
# `make mutation`: thousands of runs, of which each must find what the one before it found.
hypothesis.settings.register_profile(
    "mutation", hypothesis.settings.get_profile("tests"), max_examples=20, derandomize=True, database=None
)

# What is collected lives to the end. Looking through it for garbage, again and again, is a third of the collection,
# and each process that runs tests collects them all.
gc.disable()

_unexpected_skips: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folders; deselect those that take minutes, unless -m names them; skip by marks."""
    for item in items:
        for folder in MARKED_FOLDERS.intersection(item.nodeid.split("/")[1:2]):
            item.add_marker(folder)
    asked = config.option.markexpr
    if "versions" in asked:  # what covers a slow test in part does not run with other versions of Spark
        asked += " slow"
    unasked = {mark for mark in LEFT_OUT if mark not in asked}
    is_out = [not unasked.isdisjoint(mark.name for mark in item.iter_markers()) for item in items]
    config.hook.pytest_deselected(items=[*compress(items, is_out)])
    items[:] = [item for item, each in zip(items, is_out, strict=True) if not each]
    for item in items:
        if CORE != "compiled" and item.get_closest_marker("compiled"):
            item.add_marker(pytest.mark.skip(reason="the compiled core is not built"))
        for mark in item.iter_markers("expected_skip"):
            item.add_marker(pytest.mark.skipif(*mark.args, **mark.kwargs))


def pytest_collection_finish() -> None:
    """Look for garbage from here on, but not in what was collected."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let Python free what was collected, at its end: DuckDB (nanobind) reports what stays frozen as leaked."""
    gc.unfreeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a skipped test."""
    is_expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not is_expected_failure and not EXPECTED_SKIPS & report.keywords.keys():
        _unexpected_skips.append(f"{report.nodeid}: {report.longrepr[2] if isinstance(report.longrepr, tuple) else ''}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Undo `log_lines.set_up` of a program that a test ran in this process: its stream is the test's."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, log_lines.CountingHandler)]:
        root.removeHandler(handler)
        handler.close()
        os.environ.pop(log_lines.CHILD_VARIABLE, None)
        for name in (None, *log_lines.PARTS):
            logging.getLogger(name).setLevel(logging.NOTSET if name else logging.WARNING)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a skipped module."""
    if report.skipped:
        _unexpected_skips.append(f"{report.nodeid}: {report.longrepr[2] if isinstance(report.longrepr, tuple) else ''}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run on CI that skipped a test: a test that does not run proves nothing."""
    if (
        os.environ.get("CI")
        and _unexpected_skips
        and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the skips that made the run fail."""
    if os.environ.get("CI") and _unexpected_skips:
        terminalreporter.section("skipped, which CI does not expect (other tests have the mark expected_skip)")
        for line in _unexpected_skips:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """The data set of all servers."""
    return standard()


@pytest.fixture(scope="session")
def dataset_log(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    """A change log of the data set: several epochs, some of which change what an earlier one put."""
    root = tmp_path_factory.mktemp("log")
    with dataset_writer(root) as writer:
        publish(dataset, writer)
    return root


@pytest.fixture(scope="session")
def sparkis(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Running]:
    """A sparkis process that serves the data set with default settings."""
    with sparkis_server(tmp_path_factory.mktemp("store"), dataset_log) as server:
        wait_for_keys(server, len(dataset.keys))
        yield server


@pytest.fixture(scope="session")
def locked_sparkis(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Running]:
    """A sparkis process with a password."""
    with sparkis_server(tmp_path_factory.mktemp("store"), dataset_log, password="s3cret pass") as server:
        wait_for_keys(server, len(dataset.keys))
        yield server
