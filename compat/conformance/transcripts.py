"""Replays transcripts of clients that cannot run here (the format is in `transcripts/README.md`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compat.conformance.targets import Target, Targets
from compat.conformance.wire import Connection, Reply, Words, requests

FOLDER = Path(__file__).parent / "transcripts"


@dataclass(frozen=True)
class Line:
    """A request, its connection, and the checks of its reply."""

    connection: int
    words: Words
    check: Sequence[str]
    number: int


@dataclass(frozen=True)
class Transcript:
    """The requests of one client, their purpose (`what`), and the kinds of our servers that get them.

    kinds: `server`, `proxy`. writes: groups of requests; each group is sent in one write.
    """

    client: str
    what: str
    kinds: Sequence[str]
    writes: Sequence[Sequence[Line]]


@dataclass(frozen=True)
class Replay:
    """The result of a transcript at one of our servers."""

    client: str
    what: str
    target: str
    is_right: bool
    problem: str


def load(path: Path) -> Transcript:
    """Read a transcript; ValueError names an invalid line."""
    facts: dict[str, str] = {}
    writes: list[list[Line]] = [[]]
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, separator, value = text.partition(":")
        if not text.strip():
            writes.append([])
        elif separator and name in ("client", "what", "on") and name not in facts:
            facts[name] = value.strip()
        else:
            writes[-1].append(_line(text, number, path))
    if facts.keys() != {"client", "what", "on"} or not set(facts["on"].split()) <= {"server", "proxy"}:
        raise ValueError(f"{path.name} has to begin with client:, what: and on: server or proxy")
    return Transcript(facts["client"], facts["what"], facts["on"].split(), [write for write in writes if write])


def _line(text: str, number: int, path: Path) -> Line:
    sent, arrow, check = text.rpartition(" => ")
    words = shlex.split(sent)
    connection = 1
    if words and words[0].startswith("@"):
        connection = int(words.pop(0)[1:])
    if not arrow or not words or not check.split():
        raise ValueError(f"{path.name}:{number} is not 'REQUEST => check': {text!r}")
    return Line(connection, [word.encode() for word in words], check.split(), number)


def problems(transcript: Transcript, host: str, port: int) -> list[str]:
    """Replay a transcript; return the replies that fail their checks, as text."""
    found = []
    with ExitStack() as stack:
        connections: dict[int, Connection] = {}
        for write in transcript.writes:
            by_connection: dict[int, list[Line]] = {}
            for line in write:
                by_connection.setdefault(line.connection, []).append(line)
            for number, lines in by_connection.items():
                if number not in connections:
                    connections[number] = stack.enter_context(Connection(port, host))
                connections[number].send(requests([line.words for line in lines]))
                for line in lines:
                    reply = connections[number].read()
                    if not is_right(reply, line.check):
                        words = b" ".join(line.words).decode()
                        found.append(f"line {line.number}: {words} => {' '.join(line.check)}, not {reply.raw[:300]!r}")
    return found


def is_right(reply: Reply, check: Sequence[str]) -> bool:
    """Return whether a reply passes a check; ValueError for an unknown check."""
    kind, *words = check
    text = " ".join(words).encode()
    match kind:
        case "any":
            return True
        case "error":
            return reply.is_error and bool(reply.value.startswith(text))
        case "some":
            return not reply.is_error and reply.value is not None
        case "ok":
            return reply.raw == b"+OK\r\n"
        case "nil":
            return reply.value is None
        case "integer":
            return reply.type == ":"
        case "array":
            return isinstance(reply.value, list) and reply.type in "*~>"
        case "text":
            return not reply.is_error and _text(reply) == text
        case "contains":
            return not reply.is_error and all(word.encode() in _text(reply) for word in words)
        case "fields":
            names = {line.partition(b":")[0] for line in _text(reply).splitlines()}
            return not reply.is_error and {word.encode() for word in words} <= names
        case "map":
            return {word.encode() for word in words} <= _names(reply)
    raise ValueError(f"there is no check {kind!r}")


def _text(reply: Reply) -> bytes:
    value = reply.value
    return value.removeprefix(b"txt:") if isinstance(value, bytes) else b""


def _names(reply: Reply) -> set[Any]:
    flat = reply.plain
    return set(flat[::2]) if isinstance(flat, list) and reply.type in "%*" else set()


def replays(targets: Targets) -> Iterator[Replay]:
    """Replay all transcripts at our servers, and at the real ones: these must pass all checks, too."""
    for path in sorted(FOLDER.glob("*.txt")):
        transcript = load(path)
        real_problems = [f"at {targets.plain.name}: {each}" for each in _problems(transcript, targets.plain)]
        for ours in targets.ours:
            if ours.kind in transcript.kinds:
                found = real_problems + _problems(transcript, ours)
                yield Replay(transcript.client, transcript.what, ours.name, not found, "\n    ".join(found))


def _problems(transcript: Transcript, target: Target) -> list[str]:
    at = target.at()
    try:
        return problems(transcript, at["host"], at["port"])
    except (OSError, EOFError) as error:
        return [f"the connection ended: {error!r}"]
