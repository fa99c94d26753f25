"""Clients' own tests, from their source distributions and repositories."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compat.swap_programs import environments
from compat.swap_programs.outcomes import FAILED, PASSED, Outcomes
from compat.swap_programs.targets import Target

REDIS_PY = "redis-py"
REDIS_PY_FILES = ("commands", "pipeline", "scripting", "lock", "encoding", "pubsub", "monitor", "function")
# Tests that need other servers: a cluster, modules, TLS, replicas, other machines.
REDIS_PY_MARKS = " and ".join(
    f"not {mark}" for mark in ("onlycluster", "redismod", "ssl", "replica", "cp_integration", "multidb_integration")
)

IOREDIS, IOREDIS_VERSION = "https://github.com/redis/ioredis", "6.0.0"
NODE_REDIS, NODE_REDIS_VERSION = "https://github.com/redis/node-redis", "6.2.1"
# Makes tests that connect to port 6379 connect to another.
REDIRECT = Path(__file__).parent / "scripts" / "redirect.cjs"

# The time limit of a test, which ends a hang, and of the suite.
TEST_S_MAX = 120
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


def ioredis(target: Target) -> Outcomes:
    """Run ioredis' own functional tests, without those of its cluster client, which speak with mock servers only."""
    folder = environments.repository_of(IOREDIS, f"v{IOREDIS_VERSION}")
    options = ["--no-experimental-strip-types", "--require", str(REDIRECT), "--ignore", "test/functional/cluster/**"]
    variables = {"TS_NODE_TRANSPILE_ONLY": "true", "NODE_ENV": "test", "REDIRECT_PORT": str(target.port)}
    return mocha(folder, [*options, "test/helpers/*.ts", "test/functional/**/*.ts"], variables)


def node_redis(target: Target) -> Outcomes:
    """Run node-redis' own tests of its client.

    They start servers in Docker, or read the address of a running server from a file, as here. Then tests of clusters
    and sentinels skip themselves. Those of TLS do not, and need Docker.
    """
    repository = environments.repository_of(
        NODE_REDIS, f"redis@{NODE_REDIS_VERSION}", built=("packages/test-utils", "packages/bloom")
    )
    with TemporaryDirectory() as folder:
        endpoints = Path(folder) / "endpoints.json"
        address = {"dns_name": "127.0.0.1", "port": target.port}
        endpoints.write_text(json.dumps({"standalone": {"tls": False, "raw_endpoints": [address]}}), encoding="utf-8")
        variables = {"RE_CLUSTER": "true", "REDIS_ENDPOINTS_CONFIG_PATH": str(endpoints)}
        files = ["--ignore", "lib/client/tls.spec.ts", "lib/**/*.spec.ts"]
        options = ["--require", "tsx", *files, f"--redis-version={target.version}"]
        return mocha(repository / "packages" / "client", options, variables)


def mocha(folder: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> Outcomes:
    """Run mocha in a folder, and return the outcome of each test, without those that were skipped."""
    with TemporaryDirectory() as reports:
        report = Path(reports) / "report.json"
        reporter = ["--reporter", "json", "--reporter-option", f"output={report}", "--timeout", f"{TEST_S_MAX}s"]
        done = subprocess.run(
            ["npx", "mocha", *reporter, "--exit", *arguments],
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            timeout=SUITE_S_MAX,
            check=False,
        )
        if not report.exists():
            print((done.stdout + done.stderr)[-LOG_CHARS_MAX:].decode("utf-8", "replace"), flush=True)
            return {}
        return outcomes_of_mocha(report.read_text(encoding="utf-8"), folder)


def outcomes_of_mocha(report: str, folder: Path) -> Outcomes:
    """Return the outcome of each test of mocha's report, passed or failed, without those that were skipped.

    A test's name is its file and titles; equal names are numbered. A hook that failed is an outcome, too:
    the tests after it did not run. After a failure of a hook of all files, no more tests ran at all.
    """
    found: Outcomes = {}
    times: Counter[str] = Counter()
    read = json.loads(report)
    for test in read["tests"]:
        name = _name(test, folder)
        times[name] += 1
        is_failed, is_skipped = bool(test["err"]), "duration" not in test
        if is_failed or not is_skipped:
            found[name if times[name] == 1 else f"{name} ({times[name]})"] = FAILED if is_failed else PASSED
    for hook in read["failures"]:
        if " hook" in hook["title"]:
            is_of_all_files = hook["fullTitle"].startswith('"')
            found[_name(hook, folder)] = {"error": hook["err"].get("message")} if is_of_all_files else FAILED
    return found


def _name(test: Mapping[str, Any], folder: Path) -> str:
    title = str(test["fullTitle"])
    return (
        f"{Path(test['file']).relative_to(folder)}: {title}" if "file" in test else title
    )  # a hook of a required file


def outcomes_in(report: str) -> Outcomes:
    """Return the outcome of each test of a JUnit report, passed or failed, without those that were skipped."""
    found: Outcomes = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        parts = {part.tag for part in case}
        if "skipped" not in parts:
            is_failed = not parts.isdisjoint(FAILURES)
            found[f"{case.get('classname')}::{case.get('name')}"] = FAILED if is_failed else PASSED
    return found
