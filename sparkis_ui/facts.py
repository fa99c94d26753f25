"""The facts of an endpoint, parsed from its replies in RESP3. Pure: no socket, no clock.

The server may be older or newer: a missing field is None, an unknown one is ignored.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkis_ui.text import shown

# A job with a longer lag is shown as `behind`.
LAG_MS_MAX = 10_000
CLIENTS_SHOWN_MAX = 200
NAME_CHARS_MAX = 200


def text_of(value: Any) -> str:
    """Return a name or a text of a reply."""
    return shown(value, NAME_CHARS_MAX) if isinstance(value, bytes | str) else str(value)


def fields_of(reply: Any) -> dict[str, Any]:
    """Return a reply as a map by the names of its fields. The reply may be a flat array, as in RESP2."""
    if isinstance(reply, Mapping):
        return {text_of(name): value for name, value in reply.items()}
    items = reply if isinstance(reply, list | tuple) else []
    return {text_of(name): value for name, value in zip(items[::2], items[1::2], strict=False)}


def info_of(reply: bytes | str) -> dict[str, str]:
    """Return the lines of INFO as a map."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    return dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line and not line.startswith("#"))


def integer(value: Any) -> int | None:
    """Return a value of a reply as an integer; None if it is not one."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Job:
    """A row of STATE JOBS."""

    name: str
    generation: str
    states: tuple[str, ...]
    key_formats: tuple[str, ...]
    keys: int
    applied: int | None
    committed: int | None
    lag_epochs: int
    lag_ms: int | None
    age_ms: int | None
    epochs_per_minute: int | None
    changes_per_minute: int | None
    is_stale: bool
    is_incomplete: bool
    held_back_epoch: int | None
    as_of: str
    error: str
    store_bytes: int | None
    skipped_rows: int = 0
    source_lag_records: int | None = None
    source_lag_age_ms: int | None = None
    record_delay_p50_ms: int | None = None
    record_delay_p99_ms: int | None = None
    fresh_keys: int = 0
    fresh_age_ms: int | None = None
    is_fresh_incomplete: bool = False

    @property
    def condition(self) -> str:
        """The job's worst condition."""
        if self.error:
            return "failing"
        if self.is_stale:
            return "stale"
        if (self.lag_ms or 0) > LAG_MS_MAX:
            return "behind"
        if self.held_back_epoch is not None:
            return "held back"
        if self.is_incomplete:
            return "incomplete"
        return "past" if self.as_of else "live"

    @property
    def rank(self) -> int:
        """The number by which jobs are sorted: 0 for the worst condition."""
        order = ("failing", "stale", "behind", "held back", "incomplete", "live", "past")
        return order.index(self.condition)


def jobs_of(reply: Any) -> list[Job]:
    """Return the rows of STATE JOBS, the worst condition first, then by name."""
    return sorted((_job_of(fields_of(row)) for row in reply), key=lambda job: (job.rank, job.name))


def _job_of(row: Mapping[str, Any]) -> Job:
    return Job(
        name=text_of(row.get("name", b"")),
        generation=text_of(row.get("generation", b"")),
        states=tuple(map(text_of, row.get("state_names") or ())),
        key_formats=tuple(map(text_of, row.get("key_formats") or ())),
        keys=integer(row.get("keys")) or 0,
        applied=integer(row.get("applied")),
        committed=integer(row.get("committed")),
        lag_epochs=integer(row.get("lag_epochs")) or 0,
        lag_ms=integer(row.get("lag_ms")),
        age_ms=integer(row.get("age_ms")),
        epochs_per_minute=integer(row.get("epochs_per_minute")),
        changes_per_minute=integer(row.get("changes_per_minute")),
        is_stale=bool(row.get("stale")),
        is_incomplete=bool(row.get("incomplete")),
        held_back_epoch=integer(row.get("held_back_epoch")),
        as_of=text_of(row.get("as_of") or b""),
        error=text_of(row.get("error") or b""),
        store_bytes=integer(row.get("store_bytes")),
        skipped_rows=integer(row.get("skipped_rows")) or 0,
        source_lag_records=integer(row.get("source_lag_records")),
        source_lag_age_ms=integer(row.get("source_lag_age_ms")),
        record_delay_p50_ms=integer(row.get("record_delay_p50_ms")),
        record_delay_p99_ms=integer(row.get("record_delay_p99_ms")),
        fresh_keys=integer(row.get("fresh_keys")) or 0,
        fresh_age_ms=integer(row.get("fresh_age_ms")),
        is_fresh_incomplete=bool(row.get("fresh_incomplete")),
    )


@dataclass(frozen=True)
class State:
    """A row of STATE LIST."""

    name: str
    kind: str
    keys: int
    bytes: int | None


def states_of(reply: Any) -> list[State]:
    """Return the rows of STATE LIST."""
    return [
        State(
            text_of(row.get("name")),
            text_of(row.get("kind")),
            integer(row.get("keys")) or 0,
            integer(row.get("bytes")),
        )
        for row in map(fields_of, reply)
    ]


@dataclass(frozen=True)
class Node:
    """A server of a cluster.

    Args:
        slots: The ranges that it owns, none for a replica.
        replica_of: Its master's id.
    """

    id: str
    host: str
    port: int
    slots: tuple[tuple[int, int], ...]
    replica_of: str
    health: str
    zone: str

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    @property
    def slot_count(self) -> int:
        """The number of slots."""
        return sum(last - first + 1 for first, last in self.slots)


def nodes_of(reply: bytes | str) -> list[Node]:
    """Return the nodes in the reply of STATE TOPOLOGY."""
    nodes = json.loads(reply)["nodes"]
    return [
        Node(
            str(node.get("id", f"{node['host']}:{node['port']}")),
            str(node["host"]),
            int(node["port"]),
            ranges_of(str(node.get("slots", ""))),
            str(node.get("replica_of") or ""),
            str(node.get("health", "online")),
            str(node.get("zone") or node["host"]),
        )
        for node in nodes
    ]


def ranges_of(text: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges of `0-100,200`."""
    return tuple((int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text))


def moves_of(before: Iterable[Node], after: Iterable[Node]) -> list[tuple[int, int, str, str]]:
    """Return the slots whose owner has changed, as (first, last, old address, new address); empty: no owner."""
    old, new = _owners(before), _owners(after)
    found: list[tuple[int, int, str, str]] = []
    for slot, (source, target) in enumerate(zip(old, new, strict=True)):
        if source == target:
            continue
        if found and found[-1][1] == slot - 1 and found[-1][2:] == (source, target):
            found[-1] = (found[-1][0], slot, source, target)
        else:
            found.append((slot, slot, source, target))
    return found


def _owners(nodes: Iterable[Node]) -> list[str]:
    owners = [""] * 16_384
    for node in nodes:
        for first, last in node.slots:
            owners[first : last + 1] = [node.address] * (last + 1 - first)
    return owners


@dataclass(frozen=True)
class SlowRequest:
    """An entry of SLOWLOG GET."""

    at_s: int
    duration_us: int
    request: str
    client: str
    name: str


def slow_requests_of(reply: Any) -> list[SlowRequest]:
    """Return the entries of SLOWLOG GET, the slowest first."""
    found = []
    for entry in reply:
        _, at_s, duration_us, words, *who = entry
        request = shown(b" ".join(words), NAME_CHARS_MAX)
        address, name = (text_of(each) for each in (*who, b"", b"")[:2])
        found.append(SlowRequest(int(at_s), int(duration_us), request, address, name))
    return sorted(found, key=lambda each: -each.duration_us)


@dataclass(frozen=True)
class LatencyEvent:
    """A row of LATENCY LATEST: an event's last time, and its last and longest duration."""

    name: str
    at_s: int
    last_ms: int
    longest_ms: int


def events_of(reply: Any) -> list[LatencyEvent]:
    """Return the rows of LATENCY LATEST."""
    return [LatencyEvent(text_of(row[0]), int(row[1]), int(row[2]), int(row[3])) for row in reply]


@dataclass(frozen=True)
class Command:
    """A line of INFO commandstats."""

    name: str
    calls: int
    us_per_call: float
    failed: int


def commands_of(info: Mapping[str, str]) -> list[Command]:
    """Return the commands of INFO commandstats, those with the most processor time first."""
    found = []
    for name, text in info.items():
        if name.startswith("cmdstat_"):
            facts = dict(pair.partition("=")[::2] for pair in text.split(","))
            failed = int(facts.get("rejected_calls", 0)) + int(facts.get("failed_calls", 0))
            per_call = float(facts.get("usec_per_call", 0))
            found.append(Command(name.removeprefix("cmdstat_"), int(facts.get("calls", 0)), per_call, failed))
    return sorted(found, key=lambda each: -each.calls * each.us_per_call)


def clients_of(reply: bytes | str) -> list[dict[str, str]]:
    """Return the lines of CLIENT LIST as maps."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    return [
        {name: shown(value, NAME_CHARS_MAX) for name, value in (pair.partition("=")[::2] for pair in line.split(" "))}
        for line in text.splitlines()
    ]


# Counters of a client since it connected, in CLIENT LIST of Redis 8.
CLIENT_COUNTERS = ("tot-cmds", "tot-net-in", "tot-net-out")


@dataclass(frozen=True)
class Listing:
    """A reply of CLIENT LIST, and when it came, by any clock in seconds."""

    clients: Sequence[Mapping[str, str]]
    at_s: float


@dataclass(frozen=True)
class User:
    """The clients of a user.

    Args:
        active: Those that sent a request within the last two seconds.
        requests_per_s, input_per_s, output_per_s: Between two listings; None: there is only one, or no counters.
    """

    name: str
    clients: int
    active: int
    tracking: int
    subscribed: int
    waiting_bytes: int
    commands: str
    requests_per_s: float | None = None
    input_per_s: float | None = None
    output_per_s: float | None = None


def users_of(now: Listing, before: Listing | None = None) -> list[User]:
    """Return the users of clients, those with the most clients first.

    A client that connected since then counts whole. What a client did between the earlier listing and its end is lost.

    Args:
        before: An earlier listing; rates are the differences to it. None: there are no rates.
    """
    by_user: dict[str, list[Mapping[str, str]]] = {}
    for client in now.clients:
        by_user.setdefault(client.get("user", ""), []).append(client)
    seconds = 0.0 if before is None else now.at_s - before.at_s
    earlier = {} if before is None else {client.get("id"): client for client in before.clients}
    found = [_user(name, theirs, earlier, seconds) for name, theirs in by_user.items()]
    return sorted(found, key=lambda user: (-user.clients, user.name))


def _rate(
    name: str, clients: Iterable[Mapping[str, str]], earlier: Mapping[str | None, Mapping[str, str]], seconds: float
) -> float | None:
    """Return by how much a counter of clients grew in a second; None: it is not known."""
    total = 0
    for client in clients:
        count = integer(client.get(name))
        if count is None or seconds <= 0:
            return None
        then = integer(earlier.get(client.get("id"), {}).get(name)) or 0
        total += count - then if count >= then else count  # less: another client, of a server that was started again
    return total / seconds


def _user(
    name: str, clients: list[Mapping[str, str]], earlier: Mapping[str | None, Mapping[str, str]], seconds: float
) -> User:
    commands = Counter(client.get("cmd", "") for client in clients)
    return User(
        name,
        len(clients),
        sum((integer(client.get("idle")) or 0) < 2 for client in clients),
        sum("t" in client.get("flags", "") for client in clients),
        sum(any((integer(client.get(kind)) or 0) for kind in ("sub", "psub", "ssub")) for client in clients),
        sum(integer(client.get("omem")) or 0 for client in clients),
        ", ".join(name for name, _ in commands.most_common(3)),
        *(_rate(counter, clients, earlier, seconds) for counter in CLIENT_COUNTERS),
    )


def rows_of(reply: Any) -> list[dict[str, Any]]:
    """Return the maps of a reply with texts in place of bytes, at any depth: STATE SHADOW, STATE OWNERS.

    The field `key` keeps its bytes, to which a page has a link.
    """
    return [_plain(row) for row in reply]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {text_of(name): each if name == b"key" else _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return shown(value, NAME_CHARS_MAX) if isinstance(value, bytes | str) else value
