"""Comparisons of the upstream's replies with the states', behind clients' reads of keys whose rule is `shadow`.

The client has its reply before anything is compared. A difference is looked at again after a moment: while a job
copies its results into the upstream, one side is often behind, which says nothing against the switch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

import hiredis

from resp_server.forwarding.raw_replies import RawReply, as_bytes, is_error
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import STEPS_NS_MAX, Defer, ReplySink
from resp_server.protocol.errors import internal_error
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import Request
from resp_server.proxy.applications import Applications
from resp_server.proxy.requests import ServerRequest
from resp_server.session.epoch_feed import NO_EPOCHS, Epochs, ReplyEpochs
from resp_server.upstream.command_rules import CommandRule
from resp_server.upstream.routing import Shadowed
from resp_server.upstream.rules import Owner, Rule, Rules
from resp_server.upstream.shadow_compare import Outcome, outcome_of
from resp_server.upstream.upstream import Upstream

# Comparisons that run, or wait to be repeated. A read that would be one more is not compared (guess).
COMPARISONS_MAX = 256
# Longer replies are not compared: to parse one takes a fraction of a millisecond.
COMPARED_BYTES_MAX = 64 * 1024
# After that, a difference counts (guess: some micro-batches of a fast job).
RECHECK_S = 1.0
SAMPLES_MAX = 8
SAMPLE_BYTES_MAX = 256
UPSTREAM, STATE = 0, 1


class Sample(NamedTuple):
    """A difference. epoch: of the key's job, in the state's reply; None: unknown. taken_s: by the monotonic clock."""

    outcome: Outcome
    key: bytes
    upstream: bytes
    state: bytes
    epoch: int | None
    taken_s: float


@dataclass
class ShadowCounts:
    """The comparisons of one rule.

    settled_*: replies that differed, and were equal a moment later, because this side had been behind. skipped: reads
    that were not compared. failed: comparisons that a side answered with an error.
    """

    compared: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    settled_state: int = 0
    settled_upstream: int = 0
    skipped: int = 0
    failed: int = 0
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def fields(self) -> Mapping[str, int]:
        """Return the counts by name."""
        return {
            "compared": self.compared,
            **{outcome.value: count for outcome, count in self.outcomes.items()},
            "state_was_behind": self.settled_state,
            "upstream_was_behind": self.settled_upstream,
            "skipped": self.skipped,
            "failed": self.failed,
        }


class Shadow:
    """Compares reads. job_of: returns the job of a state's key, if it is known. Runs on the event loop's thread."""

    def __init__(
        self,
        applications: Applications,
        target_of: Callable[[bytes], tuple[int, int]],
        job_of: Callable[[bytes], str | None],
        rules: Rules,
        defer: Defer,
    ) -> None:
        self._applications, self.target_of, self.job_of = applications, target_of, job_of
        self._defer = defer
        self._complete: deque[Comparison] = deque()
        self._counts: dict[Rule, ShadowCounts] = {}
        self._running: set[Comparison] = set()
        self.take_rules(rules)

    def take_rules(self, rules: Rules) -> None:
        """Compare by these rules. Rules that stay as they were keep their counts."""
        shadows = [rule for rule in rules if rule.owner is Owner.SHADOW]
        self._counts = {rule: self._counts.get(rule) or ShadowCounts() for rule in shadows}

    def sink(
        self, shadowed: Sequence[Shadowed], rule: CommandRule, protocol: int, upstream: Upstream, sink: ReplySink
    ) -> ReplySink:
        """Return a sink that passes the upstream's reply on, and then compares it."""
        return _TappedSink(sink, lambda reply: self._compare_all(shadowed, rule, protocol, upstream, reply))

    def _compare_all(
        self, shadowed: Sequence[Shadowed], rule: CommandRule, protocol: int, upstream: Upstream, reply: RawReply
    ) -> None:
        text = b"" if len(reply) > COMPARED_BYTES_MAX else as_bytes(reply)
        items = [text] if len(shadowed) == 1 and rule.name != "mget" else _items_of_mget(text)
        for each in shadowed:
            counts = self._counts.get(each.rule)
            if counts is None:
                continue
            item = items[each.at] if each.at < len(items) else b""
            if not item or len(self._running) >= COMPARISONS_MAX:
                counts.skipped += 1
            else:
                comparison = Comparison(self, counts, each, rule, protocol, upstream)
                self._running.add(comparison)
                comparison.start(item)

    def ask_state(self, key: bytes, request: Request, protocol: int, sink: ReplySink) -> None:
        """Send a read to the states."""
        number, slot = self.target_of(key)
        cluster = self._applications.each[number]
        cluster.send(ServerRequest(pack(request), slot, protocol, cluster.deadline_s(), sink, STATE))

    def add_complete(self, comparison: Comparison) -> None:
        """Evaluate a comparison that has both replies, in a later turn: many may be complete at once."""
        self._complete.append(comparison)
        if len(self._complete) == 1:
            self._defer(self._evaluate)

    def _evaluate(self) -> None:
        ends_ns = perf_counter_ns() + STEPS_NS_MAX
        while self._complete and perf_counter_ns() < ends_ns:
            self._complete.popleft().evaluate()
        if self._complete:
            self._defer(self._evaluate)

    def ended(self, comparison: Comparison) -> None:
        """Forget a comparison."""
        self._running.discard(comparison)

    def stop(self) -> None:
        """End all comparisons."""
        for each in list(self._running):
            each.stop()

    def rows(self) -> Reply:
        """Return a map for each rule: its counts and its last differences."""
        now_s = time.monotonic()
        return [
            {
                b"rule": rule.name.encode(),
                b"keys": rule.keys.text.encode(),
                **{name.encode(): count for name, count in counts.fields().items()},
                b"samples": [_sample_row(sample, now_s) for sample in counts.samples],
            }
            for rule, counts in self._counts.items()
        ]

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO, one for each rule."""
        return {
            f"shadow{number}": ",".join(
                [f"rule={rule.name}", *(f"{name}={count}" for name, count in counts.fields().items())]
            )
            for number, (rule, counts) in enumerate(self._counts.items())
        }


class Comparison(ReplySink):
    """The comparison of one read: of the client's reply, and a moment later of both sides once more."""

    def __init__(
        self,
        shadow: Shadow,
        counts: ShadowCounts,
        shadowed: Shadowed,
        rule: CommandRule,
        protocol: int,
        upstream: Upstream,
    ) -> None:
        self._shadow, self._counts, self._shadowed = shadow, counts, shadowed
        self._rule, self._protocol, self._upstream = rule, protocol, upstream
        self._before: tuple[bytes, bytes] | None = None
        self._replies: list[bytes | None] = [None, None]
        self._epochs = NO_EPOCHS
        self._retry: asyncio.TimerHandle | None = None

    def start(self, upstream_reply: bytes) -> None:
        """Compare a reply of the upstream."""
        self._replies[UPSTREAM] = upstream_reply
        try:
            self._ask_state()
        except Exception as error:
            self.fail(STATE, error)

    def stop(self) -> None:
        """End without a result."""
        if self._retry is not None:
            self._retry.cancel()
        self._shadow.ended(self)

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        try:
            if index == STATE:
                convert = self._shadowed.convert
                reply, self._epochs = reply if convert is None else convert(reply), epochs
            self._replies[index] = as_bytes(reply) if len(reply) <= COMPARED_BYTES_MAX else b"-too long\r\n"
            if None not in self._replies:
                self._shadow.add_complete(self)
        except Exception as error:
            self.fail(index, error)

    def evaluate(self) -> None:
        """Compare both replies."""
        try:
            self._compare(self._replies[UPSTREAM] or b"", self._replies[STATE] or b"")
        except Exception as error:
            internal_error(error)
            self.fail(STATE, error)

    def fail(self, index: int, error: Exception) -> None:
        self._counts.failed += 1
        self.stop()

    def _ask_state(self) -> None:
        self._shadow.ask_state(self._shadowed.state_key, self._shadowed.request, self._protocol, self)

    def _compare(self, upstream: bytes, state: bytes) -> None:
        counts, tolerance = self._counts, self._shadowed.rule.tolerance
        if is_error(upstream) or is_error(state):
            counts.failed += 1
            self.stop()
            return
        outcome = outcome_of(self._shadowed.name, upstream, state, tolerance)
        if outcome is not Outcome.EQUAL and self._before is None:
            self._before = upstream, state
            self._retry = asyncio.get_running_loop().call_later(RECHECK_S, self._repeat)
            return
        counts.compared += 1
        counts.outcomes[outcome] += 1
        if outcome is not Outcome.EQUAL:
            cut = [each[:SAMPLE_BYTES_MAX] for each in (upstream, state)]
            counts.samples.append(Sample(outcome, self._shadowed.key, cut[0], cut[1], self._epoch(), time.monotonic()))
        elif self._before is not None:
            # The side that has changed was behind; if both have, the state counts: its epochs come in batches.
            was_state = outcome_of(self._shadowed.name, state, self._before[1], tolerance) is not Outcome.EQUAL
            counts.settled_state += was_state
            counts.settled_upstream += not was_state
        self.stop()

    def _repeat(self) -> None:
        self._retry, self._replies = None, [None, None]
        try:
            self._upstream.send_request(0, self._protocol, self._rule, self._shadowed.upstream_request, self, UPSTREAM)
            self._ask_state()
        except Exception as error:
            self.fail(UPSTREAM, error)

    def _epoch(self) -> int | None:
        job = self._shadow.job_of(self._shadowed.state_key)
        each: Epochs
        for each in self._epochs:
            if job is not None and job in each:
                return each[job][1]
        return None


class _TappedSink(ReplySink):
    """Passes a reply on, and shows it to a function."""

    def __init__(self, sink: ReplySink, show: Callable[[RawReply], None]) -> None:
        self._sink, self._show = sink, show

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._sink.put(index, reply, epochs)
        try:
            self._show(reply)
        except Exception as error:
            internal_error(error)

    def fail(self, index: int, error: Exception) -> None:
        self._sink.fail(index, error)

    def seen_epochs(self, index: int) -> Epochs:
        return self._sink.seen_epochs(index)


def _items_of_mget(reply: bytes) -> Sequence[bytes]:
    """Return the items of an MGET's reply as replies to GET."""
    if reply[:1] != b"*":
        return []
    reader = hiredis.Reader(notEnoughData=None)
    reader.feed(reply)
    return [b"$-1\r\n" if item is None else b"$%d\r\n%b\r\n" % (len(item), item) for item in reader.gets()]


def _sample_row(sample: Sample, now_s: float) -> Reply:
    return {
        b"outcome": sample.outcome.value.encode(),
        b"key": sample.key,
        b"upstream": sample.upstream,
        b"state": sample.state,
        b"epoch": sample.epoch,
        b"age_ms": int((now_s - sample.taken_s) * 1000),
    }
