"""Clients' own tests, from their source distributions."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory

from compat.swap_programs import environments
from compat.swap_programs.outcomes import Outcomes
from compat.swap_programs.targets import Target

REDIS_PY = "redis-py"
REDIS_PY_FILES = ("commands", "pipeline", "scripting", "lock", "encoding", "pubsub", "monitor", "function")
# Tests that need other servers: a cluster, modules, TLS, replicas, other machines.
REDIS_PY_MARKS = " and ".join(
    f"not {mark}" for mark in ("onlycluster", "redismod", "ssl", "replica", "cp_integration", "multidb_integration")
)

# The time limit of a test, which ends a hang, and of the suite.
TEST_S_MAX = 60
SUITE_S_MAX = 1800.0
FAILURES = ("failure", "error")
LOG_CHARS_MAX = 4_000


def redis_py(target: Target) -> Outcomes:
    """Run redis-py's own tests of commands, pipelines, scripts, locks and messages."""
    source = environments.source_of("redis", REDIS_PY)
    files = [f"tests/test_{each}.py" for each in REDIS_PY_FILES]
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout", str(TEST_S_MAX), "-m", REDIS_PY_MARKS]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(environments.python_of(REDIS_PY)), "-m", "pytest", *options, "--redis-url", target.url]
        done = subprocess.run(
            [*command, "--junitxml", str(report), *files],
            cwd=source,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=SUITE_S_MAX,
            check=False,
        )
        if not report.exists():
            print(done.stdout[-LOG_CHARS_MAX:].decode("utf-8", "replace"), flush=True)
            return {}
        return outcomes_in(report.read_text(encoding="utf-8"))


def outcomes_in(report: str) -> Outcomes:
    """Return the outcome of each test of a JUnit report, passed or failed, without those that were skipped."""
    found: Outcomes = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        parts = {part.tag for part in case}
        if "skipped" not in parts:
            is_failed = not parts.isdisjoint(FAILURES)
            found[f"{case.get('classname')}::{case.get('name')}"] = "failed" if is_failed else "passed"
    return found
