"""Shared by the Python scripts: read a feature's name, run it, print its outcome.

Lines of JSON on the standard streams. In: `{"feature": name, "at": {...}}`. Out: any number of `{"do": ...}`, which is
done before the script gets an empty line back, and then `{"outcome": ...}` or `{"error": text}`.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Addresses are each server's own.
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


@dataclass(frozen=True)
class At:
    """A server's address and protocol.

    live is a key that the script may have changed. In a cluster `port` is its owner's, `other_port` another node's.
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


def ask(what: str, **arguments: str) -> None:
    """Ask the runner to `put` or `delete` a key or to `restart` the server, and wait for it."""
    print(json.dumps({"do": what, **arguments}), flush=True)
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

    why: str
    outcome: Any


def main(
    version: str, features: Mapping[str, Callable[[At], Any]], expected: Mapping[str, Expected] | None = None
) -> None:
    """Run features until the input ends."""
    told = {name: {"why": each.why, "outcome": plain(each.outcome)} for name, each in (expected or {}).items()}
    print(json.dumps({"version": version, "features": list(features), "expected": told}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"outcome": plain(features[asked["feature"]](At(**asked["at"])))}
        except Exception:
            answer = {"error": traceback.format_exc(limit=-2)}
        print(json.dumps(answer), flush=True)


def in_order(values: Iterable[Any]) -> list[Any]:
    """Sort values without a defined order."""
    return sorted(plain(value) for value in values)
