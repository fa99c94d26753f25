"""`make fuzz-paths`: sends millions of random requests to the compiled core and to the general path, and compares them.

A case is a client's requests to two servers over one store: one has the core, the other one has only Python. Between
its pipelines there are epochs that change the store. The client may track keys, its user may be restricted, the server
may be a node with some of the slots, or need a password. The replies are the same bytes, and so are the counts of the
statistics and the keys that the client may cache. If they differ, the program prints the seed of the case, and the
shortest case that still differs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple
from unittest.mock import patch

from compat.conformance.wire import NotAReplyError, replies_in, request
from compat.fuzz.path_requests import (
    GEO_KEY,
    MEMBERS,
    NAMES,
    POINT_LINES,
    SCORES,
    Words,
    core_request,
    end_request,
    odd_request,
)
from compat.fuzz.subject import RecordingTransport
from compat.fuzz.targets import HERE, NOW_MS, STATES
from resp_server import native
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.client.connection import Connection
from resp_server.cluster.topology import Topology
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.lmdb.store import LmdbStore
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slots import SLOTS
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.store import EpochChanges

PIPELINES_PER_CASE = 700
# The requests of a pipeline: few, as the general path answers all that follow one that it has to answer.
LENGTHS, POINT_LENGTHS, ODD_LENGTHS = (1, 2, 3, 4, 5, 6, 8), (5, 10, 20, 30, 50, 100), (1, 1, 1, 2, 3)
ODD_CHANCE, TRANSACTION_CHANCE = 0.1, 0.1
EPOCH_CHANCE, CUT_CHANCE, END_CHANCE, RESET_CHANCE = 0.02, 0.1, 0.01, 0.03
# The sizes of values with elements, on both sides of the limits of packed maps and blocks.
SIZES, MORE_SIZES = (1, 2, 3, 5, 20, 20, 60), (1, 2, 20, 127, 128, 129, 300)
STORE_BYTES_MAX = 1 << 28
# Ends a case that would hang.
TURNS_MAX = 100_000
SHOWN_BYTES_MAX = 600
# The pushes whose moment is not the same on both paths, and what is counted a little later on one of them.
PUSHED = (b"invalidate", b"epoch")
TOTALS = re.compile(rb"[=$]\d+\r\n(?=(?:txt:)?id=)| tot-net-out=\d+ tot-cmds=\d+")
RULES: list[list[bytes]] = [
    *([[]] * 15),
    [b"resetkeys", b"~j:v:*", b"~j:m:?"],
    [b"resetkeys", b"%R~j:l:*", b"%W~j:m:*", b"~j:z:[0-4]", b"(+mget ~j:v:[01])"],
    [b"-@all", b"+get", b"+hget", b"+state|mget", b"+zrange"],
    [b"-get", b"-hgetall", b"-sort_ro"],
    [b"resetkeys", b"(+get ~j:v:0)", b"(+@all -get ~j:*)"],
]
SLOT_RANGES: list[tuple[int, int] | None] = [*([None] * 12), (0, SLOTS - 1), (0, SLOTS // 2), (100, 12_000)]
GREETINGS: list[list[Words]] = [
    [],
    [[b"HELLO", b"3"]],
    [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON"]],
    [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON", b"OPTIN"]],
    [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON", b"BCAST"]],
]


class Epoch(NamedTuple):
    """A step of a case: an epoch, made from a seed."""

    seed: int


class Send(NamedTuple):
    """A step of a case: what was collected is sent, the last bytes in a chunk of their own."""

    cut_bytes: int


Step = Words | Epoch | Send


@dataclasses.dataclass
class Case:
    """What a client does. rules: of its user. slots: those of a cluster's node."""

    password: str | None
    rules: list[bytes]
    slots: tuple[int, int] | None
    first_epoch: Epoch
    steps: list[Step]


def case_of(seed: int) -> Case:
    """Make the case of a seed."""
    rng = random.Random(seed)
    password = "secret" if rng.random() < 0.1 else None
    greeting = [[b"AUTH", b"secret"]] if password else []
    greeting += rng.choice(GREETINGS)
    case = Case(password, rng.choice(RULES), rng.choice(SLOT_RANGES), Epoch(rng.getrandbits(40)), [*greeting, Send(0)])
    for _ in range(PIPELINES_PER_CASE):
        case.steps += _pipeline(rng, is_short=bool(case.rules) or case.slots is not None)
        has_end = rng.random() < END_CHANCE
        if has_end:
            case.steps += [end_request(rng), *(odd_request(rng) for _ in range(rng.randrange(6)))]
        case.steps.append(Send(rng.randrange(400) if rng.random() < CUT_CHANCE else 0))
        if rng.random() < EPOCH_CHANCE:
            case.steps.append(Epoch(rng.getrandbits(40)))
        if has_end or rng.random() < RESET_CHANCE:
            case.steps += [[b"RESET"], *greeting, Send(0)]
    return case


def _pipeline(rng: random.Random, *, is_short: bool) -> list[Words]:
    if rng.random() < ODD_CHANCE:
        return [odd_request(rng) for _ in range(rng.choice(ODD_LENGTHS))]
    if is_short or rng.random() < 0.6:
        made = [core_request(rng) for _ in range(rng.choice(ODD_LENGTHS if is_short else LENGTHS))]
    else:
        made = [core_request(rng, POINT_LINES) for _ in range(rng.choice(POINT_LENGTHS))]
    if rng.random() < TRANSACTION_CHANCE:
        start = rng.randrange(len(made))
        end = start + min(rng.randrange(1, 20), len(made) - start)
        made[start:end] = [[b"MULTI"], *made[start:end], [b"EXEC"]]
    return made


def changes_of(epoch: Epoch, *, is_first: bool) -> list[Change]:
    """Make an epoch's changes: the first one puts most keys, the others change some of them."""
    rng = random.Random(epoch.seed)
    found: list[Change] = []
    is_plain = rng.random() < 0.8  # small, and no field expires: the core answers nearly all
    for state, keys in NAMES.items():
        for key in keys[:-1]:  # the last one is never put
            if rng.random() < (0.97 if is_first else 0.2):
                found += _changes_of_key(state.decode(), key, rng, is_plain=is_plain)
    return found + [Change("z", Op.PUT, GEO_KEY, member, b"%d" % rng.randrange(1 << 52)) for member in MEMBERS[:12]]


def _changes_of_key(state: str, key: bytes, rng: random.Random, *, is_plain: bool) -> Iterator[Change]:
    expires = rng.choice((None, None, None, NOW_MS, NOW_MS + 1_000))
    if state == "v":
        size = rng.choice((0, 1, 5, 20, 20, 63, 64, 200, 200, 9_000))
        value = rng.choice((rng.randbytes(size), b"%d" % rng.randrange(-99, 1 << 40)))
        yield Change(state, Op.PUT, key, None, value, expires)
        return
    if rng.random() < 0.3:
        yield Change(state, Op.CLEAR, key)
    size = rng.choice(SIZES if is_plain else MORE_SIZES)
    if state == "l":
        numbers = rng.random() < 0.5
        for number in range(size):
            yield Change(state, Op.APPEND, key, None, b"%d" % rng.randrange(99) if numbers else _member(number, rng))
        return
    for number in range(size):
        value = {"m": b"v%d" % rng.randrange(1000), "s": b"", "z": rng.choice(SCORES)}[state]
        yield Change(
            state, Op.PUT, key, _member(number, rng), value, expires if not is_plain and rng.random() < 0.1 else None
        )


def _member(number: int, rng: random.Random) -> bytes:
    return rng.choice(MEMBERS) if number < len(MEMBERS) and rng.random() < 0.5 else b"m%d" % number


class Twin:
    """One of the two servers, and its client."""

    def __init__(self, store: LmdbStore, case: Case, *, is_compiled: bool) -> None:
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", STATES, store))
        config = ServerConfig(password=case.password, slowlog_log_slower_than=-1)
        self.server = Server(keyspace, config, pipeline_of_stores, clock=lambda: NOW_MS)
        if not is_compiled:
            self.server.pipeline.compiled = None
        self.server.users.set(b"default", case.rules)
        if case.slots is not None:
            self.server.set_topology(_topology(*case.slots), HERE)
        self.left = 0
        self._count_left()
        self.connect()

    def connect(self) -> None:
        """Let a new client take the place of the last one."""
        self.wire, self.connection = RecordingTransport(), Connection(self.server)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    async def send(self, chunk: bytes) -> bytes:
        """Send bytes and return all that is sent then."""
        wire, connection = self.wire, self.connection
        self.server.context.renew()  # a new round of the loop
        if not wire.is_closed:
            connection.data_received(chunk)
        for _ in range(TURNS_MAX):
            if connection._next_turn is None or wire.is_closed:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("the connection does not come to rest")
        self.server.write_queue.flush()
        sent = b"".join(wire.sent)
        wire.sent.clear()
        return sent

    def _count_left(self) -> None:
        """Count the requests that the core leaves to the general path."""
        pipeline = self.server.pipeline
        answer = pipeline.answer

        def counting(context: Any, requests: Any, *rest: Any) -> Any:
            before = len(requests)
            incomplete = answer(context, requests, *rest)
            self.left += before - len(requests)
            return incomplete

        pipeline.answer = counting  # type: ignore[assignment, method-assign]

    def requests(self) -> Counter[str]:
        """Return how many requests of each command were answered."""
        stats = self.server.context.stats
        stats.collect()
        return Counter({name: each.calls + each.rejected for name, each in stats.commands.items()})

    def counted(self) -> Any:
        """Return what was counted, and which keys the client may cache."""
        stats, session = self.server.context.stats, self.connection.session
        stats.collect()
        commands = {
            name: (each.calls, each.rejected, each.failed)
            for name, each in stats.commands.items()
            if each.calls or each.rejected
        }
        self.server.context.renew_all()
        held = sorted(self.server.context.tracking.clients_by_key)
        return (
            stats.hits,
            stats.misses,
            stats.errors,
            stats.input_bytes,
            commands,
            session.last_command,
            session.calls,
            held,
        )


def _topology(first: int, last: int) -> Topology:
    rest = [part for part in (f"0-{first - 1}" * (first > 0), f"{last + 1}-{SLOTS - 1}" * (last < SLOTS - 1)) if part]
    nodes = [
        {"host": "10.0.0.1", "port": 7379, "slots": f"{first}-{last}"},
        {"host": "10.0.0.2", "port": 7379, "slots": ",".join(rest)},
    ]
    return Topology.of_json({"version": 1, "nodes": nodes})


def without_timing(sent: bytes) -> bytes:
    """Return replies without what may come at another moment."""
    try:
        replies = replies_in(sent)
    except NotAReplyError:
        return sent
    kept = [each for each in replies if not (each.type == ">" and each.value[0].value in PUSHED)]
    return TOTALS.sub(b"", b"".join(each.raw for each in kept))


class Difference(NamedTuple):
    """What the core's server sent or counted, and the general one's."""

    compiled: Any
    general: Any


class Comparison:
    """Runs a case at both servers."""

    def __init__(self, store: LmdbStore, case: Case) -> None:
        self._store, self._case = store, case
        self._is_tracking = any(isinstance(step, list) and b"tracking" in map(bytes.lower, step) for step in case.steps)
        self._pending: list[bytes] = []
        self.requests, self.left = Counter[str](), 0

    async def run(self) -> Difference | None:
        """Return the first difference."""
        self._publish(self._case.first_epoch, is_first=True)
        self._twins = [Twin(self._store, self._case, is_compiled=each) for each in (True, False)]
        try:
            for step in (*self._case.steps, Send(0)):
                if isinstance(step, list):
                    self._pending.append(request(*step))
                elif isinstance(step, Epoch):
                    self._publish(step, is_first=False)
                elif (difference := await self._send(step.cut_bytes)) is not None:
                    return difference
            self.requests, self.left = self._twins[0].requests(), self._twins[0].left
            return _difference(*(twin.counted() for twin in self._twins))
        finally:
            for twin in self._twins:
                twin.server.context.close()

    async def _send(self, cut_bytes: int) -> Difference | None:
        data = b"".join(self._pending)
        self._pending.clear()
        cut = max(0, len(data) - cut_bytes)
        for chunk in (data[:cut], data[cut:]):
            if chunk:
                replies = [await twin.send(chunk) for twin in self._twins]
                if replies[0] != replies[1]:
                    difference = _difference(*map(without_timing, replies))
                    if difference is not None:
                        return difference
        closed = [twin.wire.is_closed for twin in self._twins]
        if closed[0]:
            for twin in self._twins:
                twin.connect()
        return _difference(*closed)

    def _publish(self, epoch: Epoch, *, is_first: bool) -> None:
        rows = list(runs_of(changes_of(epoch, is_first=is_first), [state.name for state in STATES]))
        self._store.apply(EpochChanges(self._store.applied.epoch + 1, 1, NOW_MS, rows), STATES)
        if self._is_tracking and not is_first:  # a request that fails notices no epoch on one of the paths
            for twin in self._twins:
                twin.server.context.renew_all()


def _difference(compiled: Any, general: Any) -> Difference | None:
    return None if compiled == general else Difference(compiled, general)


class Outcome(NamedTuple):
    """The first difference; how many requests of each command were answered, and how many of them not by the core."""

    difference: Difference | None
    requests: Counter[str]
    left: int


def compared(case: Case) -> Outcome:
    """Run a case with a store of its own."""
    with TemporaryDirectory(prefix="sparkis-paths-") as folder:
        store = LmdbStore(folder, "g", map_bytes_max=STORE_BYTES_MAX)
        try:
            comparison = Comparison(store, case)
            return Outcome(asyncio.run(comparison.run()), comparison.requests, comparison.left)
        finally:
            store.close()


def shortest(case: Case, differs: Callable[[Case], bool]) -> Case:
    """Leave out steps as long as the case differs: halves first, then smaller parts, then single ones."""
    size = len(case.steps)
    while size:
        size = max(1, size // 2)
        at = 0
        while at < len(case.steps):
            shorter = dataclasses.replace(case, steps=case.steps[:at] + case.steps[at + size :])
            if differs(shorter):
                case = shorter
            else:
                at += size
        if size == 1:
            break
    return case


def shown(case: Case, difference: Difference) -> str:
    """Return a case as text, with both replies."""
    lines = [f"  password {case.password}, rules {case.rules}, slots {case.slots}, first epoch {case.first_epoch.seed}"]
    lines += [f"  {step}" for step in case.steps]
    for name, found in zip(("compiled", "general "), _around_first_difference(difference), strict=True):
        lines.append(f"{name}: {found}")
    return "\n".join(lines)


def _around_first_difference(difference: Difference) -> Iterator[str]:
    if not isinstance(difference.compiled, bytes):
        yield from (repr(each) for each in difference)
        return
    at = next(
        (at for at, pair in enumerate(zip(*difference, strict=False)) if pair[0] != pair[1]), min(map(len, difference))
    )
    for each in difference:
        yield f"{len(each)} bytes, from {max(0, at - 100)}: {each[max(0, at - 100) : at + SHOWN_BYTES_MAX]!r}"


class Progress:
    """A bar on a terminal; elsewhere a line after each twentieth."""

    def __init__(self, total: int) -> None:
        self._total, self._began_s, self._next = total, monotonic(), 0

    def show(self, done: int) -> None:
        """Show how many requests were compared."""
        share = min(1.0, done / self._total)
        text = f"{done:,} of {self._total:,} requests, {done / max(1e-9, monotonic() - self._began_s):,.0f} a second"
        if sys.stderr.isatty():
            bar = "#" * int(share * 40)
            print(f"\r\033[K[{bar:40}] {text}", end="\n" * (done >= self._total), file=sys.stderr, flush=True)
        elif done >= self._next:
            self._next += max(1, self._total // 20)
            print(text, file=sys.stderr, flush=True)


@patch("resp_server.serving.epoch_notifier.NOTIFY_SECONDS", 3600)  # no client is notified by the clock
@patch("resp_server.pipeline.loading_waits.LOADING_WAIT_S", 0.0)
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; return 1 if there was a difference."""
    parser = argparse.ArgumentParser("python -m compat.fuzz.paths", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="how many the core answers (1,000,000)")
    parser.add_argument("--seed", type=int, help="of the first case; the others follow (random)")
    options = parser.parse_args(arguments)
    if native.core is None:
        raise SystemExit("the core is not compiled: run `make setup`")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    progress, done, kinds, by_core = Progress(options.requests), 0, Counter[str](), 0
    while by_core < options.requests:
        case = case_of(seed)
        try:
            outcome = compared(case)
        except Exception:
            print(f"the case of seed {seed} fails", flush=True)
            raise
        done += outcome.requests.total()
        by_core += outcome.requests.total() - outcome.left
        kinds += outcome.requests
        if outcome.difference is not None:
            print(f"\nthe case of seed {seed} differs, after {by_core:,} requests; the shortest one:")
            case = shortest(case, lambda shorter: compared(shorter).difference is not None)
            print(shown(case, compared(case).difference or outcome.difference), flush=True)
            return 1
        progress.show(by_core)
        seed += 1
    print(f"{by_core:,} requests that the core answered, and {done - by_core:,} others, without a difference:")
    print(", ".join(f"{name} {count:,}" for name, count in kinds.most_common()))
    return 0


if __name__ == "__main__":
    logging.getLogger("sparkis").setLevel(logging.CRITICAL)
    sys.exit(main())
