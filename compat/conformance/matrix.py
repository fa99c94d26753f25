"""The matrix of clients, features and servers: every feature of every client, at a real server and at ours.

A cell is right if the client's outcome at ours equals that at the real server, value by value.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from compat.conformance.environments import prepared
from compat.conformance.targets import LIVE, Target, Targets

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "clients"
MODULES = ROOT / "tests" / "clients"

# The time limit of one feature of one client, in all variants; longer than any feature takes on a busy machine.
FEATURE_S_MAX = 120.0

# For these features, a client at our cluster is compared with the client at a single real server: a master of a real
# cluster accepts writes, and the other features do not depend on a cluster.
COMPARED_WITH_SERVER = ("write refused", "TLS", "--tls", "ACL user", "--user", "reconnect after a restart")

# A script's outcome for a feature that its client does not have at this kind of server.
NOT_SUPPORTED = "not supported"

PRINTED_CHARS_MAX = 1500


@dataclass(frozen=True)
class Client:
    """A client's script, its packages (the name of an environment or of npm), and one package to hide (`without`)."""

    name: str
    script: str
    packages: str = ""
    without: str = ""

    def command(self) -> list[str]:
        """Return the command line."""
        if self.script.endswith(".mjs"):
            return ["node", str(HERE / self.script), str(MODULES), self.packages]
        module = f"compat.conformance.clients.{self.script}"
        if not self.without:
            return [sys.executable, "-m", module]
        lines = (
            f"import runpy, sys; sys.modules[{self.without!r}] = None; runpy.run_module({module!r}, None, '__main__')"
        )
        return [sys.executable, "-c", lines]

    def environment(self) -> dict[str, str]:
        """Return the environment variables; missing packages are installed."""
        paths = [] if self.script.endswith(".mjs") or not self.packages else [str(prepared(self.packages))]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}


CLIENTS = (
    Client("redis-py 8", "redis_py", "redis-py-8"),
    # Its cache does not work with hiredis.
    Client("redis-py 5", "redis_py", "redis-py-5", without="hiredis"),
    Client("ioredis 6", "ioredis.mjs", "ioredis"),
    Client("ioredis 5", "ioredis.mjs", "ioredis5"),
    Client("node-redis 6", "node_redis.mjs", "redis"),
    Client("node-redis 5", "node_redis.mjs", "redis5"),
    Client("django-redis", "django_cache", "django-redis"),
    Client("redis-cli", "redis_cli"),
)


@dataclass
class Cell:
    """One feature of one client at one of our servers. is_right: None if the client does not have the feature."""

    client: str
    feature: str
    target: str
    is_right: bool | None
    problem: str = ""


@dataclass
class Script:
    """A client's process. It is started on first use, and restarted after it hung."""

    client: Client
    version: str = ""
    features: list[str] = field(default_factory=list)
    # The outcomes of features that no installed real server has, with the reason.
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _buffered: bytes = b""
    # The client's standard error: warnings, and the reason if the process ends.
    _errors: IO[bytes] = field(default_factory=TemporaryFile)

    def __enter__(self) -> Script:
        self._start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop()
        self._errors.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self.client.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env=self.client.environment(),
        )
        self._buffered = b""
        greeting = self._read()
        self.version, self.features, self.expected = greeting["version"], greeting["features"], greeting["expected"]

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def run(self, feature: str, target: Target) -> Any:
        """Return the outcome of a feature; RuntimeError if it failed, timed out, or ended its process."""
        if self._process is None:
            self._start()
        try:
            self._write({"feature": feature, "at": target.at()})
            while True:
                line = self._read()
                if "outcome" in line:
                    return line["outcome"]
                if "error" in line:
                    raise RuntimeError(line["error"])
                self._do(line, target)
                self._write({})
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._stop()
            raise RuntimeError(f"the script of {self.client.name}: {error!r}") from error

    @staticmethod
    def _do(request: dict[str, str], target: Target) -> None:
        match request["do"]:
            case "put":
                target.put(request["key"], request["value"])
            case "delete":
                target.delete(request["key"])
            case "restart":
                target.restart()
            case other:
                raise ValueError(f"a script requested the unknown action {other!r}")

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([pipe], [], [], FEATURE_S_MAX)
            if not ready:
                raise TimeoutError(f"no line within {FEATURE_S_MAX:.0f} s")
            received = os.read(pipe, 1 << 20)
            if not received:
                self._errors.seek(0)
                raise EOFError(self._errors.read()[-PRINTED_CHARS_MAX:])
            self._buffered += received
        line, _, self._buffered = self._buffered.partition(b"\n")
        return json.loads(line)


def cells_of(script: Script, features: Sequence[str], targets: Targets) -> Iterator[Cell]:
    """Run features of a client at all targets."""
    for feature in features:
        seen: dict[str, Any] = {}
        for ours in targets.ours:
            is_cluster = bool(ours.at()["is_cluster"]) and feature not in COMPARED_WITH_SERVER
            real: Target = targets.cluster if is_cluster else targets.plain
            if feature in script.expected:
                expected_outcome = script.expected[feature]["outcome"]
            else:
                if real.name not in seen:
                    seen[real.name] = _outcome(script, feature, real)
                expected_outcome = seen[real.name]
            cell = Cell(script.client.name, feature, ours.name, None)
            if isinstance(expected_outcome, Failure):
                cell.is_right, cell.problem = False, f"at {real.name}: {expected_outcome.text}"
            elif not is_unsupported(expected_outcome):
                found = _outcome(script, feature, ours)
                cell.is_right = None if is_unsupported(found) else found == expected_outcome
                if isinstance(found, Failure):
                    cell.problem = found.text
                elif cell.is_right is False:
                    cell.problem = difference(expected_outcome, found)
            yield cell


@dataclass
class Failure:
    """The outcome of a feature that failed, with the reason."""

    text: str


def _outcome(script: Script, feature: str, target: Target) -> Any:
    target.delete(LIVE)
    try:
        return script.run(feature, target)
    except RuntimeError as error:
        return Failure(str(error))


def is_unsupported(outcome: Any) -> bool:
    """Return whether a client does not have a feature, in any of its variants."""
    is_by_variant = isinstance(outcome, list) and bool(outcome) and all(_is_pair(each) for each in outcome)
    return outcome == NOT_SUPPORTED or (is_by_variant and all(each[1] == NOT_SUPPORTED for each in outcome))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def difference(expected: Any, found: Any, path: str = "") -> str:
    """Return the first difference between two outcomes, as text."""
    both = (expected, found)
    if all(isinstance(each, dict) for each in both) and expected.keys() == found.keys():
        pairs = [(name, expected[name], found[name]) for name in expected]
    elif all(isinstance(each, list) for each in both) and len(expected) == len(found):
        pairs = [(str(at), *pair) for at, pair in enumerate(zip(expected, found, strict=True))]
    else:
        pairs = []
    for name, one, other in pairs:
        if one != other:
            return difference(one, other, f"{path}/{name}")
    return f"at {path or '/'}\n    the real server: {_shortened(expected)}\n    ours:            {_shortened(found)}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= PRINTED_CHARS_MAX else text[:PRINTED_CHARS_MAX] + "..."
