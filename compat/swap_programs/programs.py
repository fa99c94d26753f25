"""The programs: what each runs, its version, and how its outcomes are collected."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from compat.swap_programs import environments, suites, tools
from compat.swap_programs.outcomes import Outcomes
from compat.swap_programs.targets import Target

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PYTHON_PROGRAMS = "programs"

# The time limit of a script with all of its checks: it ends a hang.
SCRIPT_S_MAX = 900.0
# What is printed of a failed script's log.
LOG_CHARS_MAX = 4_000


@dataclass(frozen=True)
class Program:
    """A program; its versions as the table shows them, what its checks do, and the function that runs them."""

    name: str
    versions: Callable[[], str]
    about: str
    run: Callable[[Target], Outcomes]


def python_script(name: str) -> Callable[[Target], Outcomes]:
    """Return a function that runs a Python script in the programs' environment."""

    def run(target: Target) -> Outcomes:
        python = environments.python_of(PYTHON_PROGRAMS)
        return printed([str(python), "-m", f"compat.swap_programs.scripts.{name}", target.url], REDIS_URL=target.url)

    return run


def javascript(name: str) -> Callable[[Target], Outcomes]:
    """Return a function that runs a JavaScript script with npm's packages."""

    def run(target: Target) -> Outcomes:
        return printed(["node", str(SCRIPTS / name), str(environments.modules_of_npm()), str(target.port)])

    return run


def printed(command: list[str], **variables: str) -> Outcomes:
    """Run a script, and return the outcomes that it prints; what it has printed if it does not end."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DJANGO_SETTINGS_MODULE": "compat.swap_programs.scripts.django_settings",
        **variables,
    }
    with (
        TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment) as process,
    ):
        try:
            text, _ = process.communicate(timeout=SCRIPT_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        errors.seek(0)
        log = errors.read().decode("utf-8", "replace")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith(b'{"check"')]
    found: Outcomes = {line["check"]: line["outcome"] for line in lines}
    if process.returncode:
        print(log[-LOG_CHARS_MAX:], flush=True)
        found["the exit code"] = process.returncode
    return found


def of_redis() -> str:
    """Return the version of the installed redis-cli."""
    return subprocess.run(["redis-cli", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def of_python(*packages: str) -> Callable[[], str]:
    """Return a function that returns the locked versions of Python packages."""
    return lambda: ", ".join(f"{each} {environments.python_version(each, PYTHON_PROGRAMS)}" for each in packages)


def of_npm(*packages: str) -> Callable[[], str]:
    """Return a function that returns the locked versions of JavaScript packages."""
    return lambda: ", ".join(f"{each} {environments.npm_version(each)}" for each in packages)


PROGRAMS = (
    Program("redis-cli", of_redis, "commands of all groups, and its options", tools.redis_cli),
    Program("redis-cli --pipe", of_redis, "15,000 writes, and what is stored after", tools.piped),
    Program("redis-benchmark", of_redis, "its default set, with and without pipelines", tools.redis_benchmark),
    Program(
        "RQ",
        of_python("rq", "redis"),
        "results, failures, retries, dependencies, the scheduler, commands to workers",
        python_script("rq_checks"),
    ),
    Program(
        "Celery",
        of_python("celery", "redis"),
        "broker and result store: group, chain, chord, countdown, retry, revoke, inspect",
        python_script("celery_checks"),
    ),
    Program(
        "django-redis",
        of_python("django-redis", "Django"),
        "the cache, its locks and patterns, and sessions",
        python_script("django_checks"),
    ),
    Program(
        "limits",
        of_python("limits", "Flask-Limiter"),
        "all strategies, which are scripts, and a Flask application",
        python_script("limits_checks"),
    ),
    Program(
        "redlock",
        of_npm("redlock", "ioredis"),
        "locks that are wanted, extended, expire",
        javascript("redlock_checks.mjs"),
    ),
    Program(
        "BullMQ",
        of_npm("bullmq", "ioredis"),
        "scripts, streams of events, blocked workers; retries, delays, priorities, flows, schedulers, limits",
        javascript("bullmq_checks.mjs"),
    ),
    Program(
        "redis-py's tests",
        lambda: f"redis {environments.python_version('redis', suites.REDIS_PY)}",
        "its own tests of commands, pipelines, scripts, functions, locks, encodings, messages and MONITOR",
        suites.redis_py,
    ),
    Program(
        "ioredis' tests",
        lambda: f"ioredis {suites.IOREDIS_VERSION}",
        "its own functional tests, but those of clusters: commands, pipelines, scripts, messages, MONITOR",
        suites.ioredis,
    ),
    Program(
        "node-redis' tests",
        lambda: f"@redis/client {suites.NODE_REDIS_VERSION}",
        "its client's own tests, with and without a server: commands, pipelines, pools, scripts, messages, caching",
        suites.node_redis,
    ),
)
