"""The common part of the Python scripts: read a feature's name, run the feature, print its outcome.

The standard streams have lines of JSON. Input: `{"feature": name, "at": {...}}`. Output: any number of requests
`{"do": ...}`, each of which gets an empty object back once it is done; then `{"outcome": ...}` or `{"error": text}`.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# The port of an address, which differs between servers.
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


@dataclass(frozen=True)
class At:
    """A server's address and protocol.

    live: a key that the script may change. In a cluster, `port` is the port of its owner, `other_port` of another node.
    """

    host: str
    port: int
    is_cluster: bool
    other_port: int
    tls_port: int
    ca: str
    user: str
    password: str
    live: str


def request(action: str, **arguments: str) -> None:
    """Have the runner `put` or `delete` a key, or `restart` the server, and wait for it."""
    print(json.dumps({"do": action, **arguments}), flush=True)
    if not sys.stdin.readline():
        raise SystemExit


def plain(value: Any) -> Any:
    """Return a result as comparable JSON values: bytes as text, sets and maps sorted."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Exception):
        return error_text(value)
    if isinstance(value, Mapping):
        return sorted([plain(key), plain(each)] for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(plain(each) for each in value)
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def error_text(error: Exception) -> str:
    """Return an error's class and text, without the addresses in it."""
    return f"{type(error).__name__}: {PORT.sub('PORT', str(error))}"


class Expected(NamedTuple):
    """The outcome of a feature that the installed real server does not have."""

    reason: str
    outcome: Any


def main(
    version: str, features: Mapping[str, Callable[[At], Any]], expected: Mapping[str, Expected] | None = None
) -> None:
    """Run features until the input ends."""
    outcomes = {
        name: {"reason": each.reason, "outcome": plain(each.outcome)} for name, each in (expected or {}).items()
    }
    print(json.dumps({"version": version, "features": list(features), "expected": outcomes}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        result: dict[str, Any]
        try:
            result = {"outcome": plain(features[task["feature"]](At(**task["at"])))}
        except Exception:
            result = {"error": traceback.format_exc(limit=-2)}
        print(json.dumps(result), flush=True)


def in_order(values: Iterable[Any]) -> list[Any]:
    """Sort values without a defined order."""
    return sorted(plain(value) for value in values)
