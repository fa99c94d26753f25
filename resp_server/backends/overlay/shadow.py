"""Compares the upstream's replies with the states', for clients' reads of keys whose rule has the owner `shadow`.

The client gets its reply before anything is compared. If the replies differ, both backends are read again, after pauses
that double: while a job copies its results into the upstream, one backend is often behind. A backend was behind if its
later reply equals the other backend's first reply. A difference that lasts for a second counts as one. Sampled
differences are read again for 64 s, to measure how far a backend is behind.

    first replies    until 1 s              after 1 s                ... 64 s
    differ           a backend catches up:  it counts as different;  a backend catches up: the sample gets the
                     it was behind          a sample is taken        backend, and how long it was behind
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

import hiredis

from resp_server.backends.overlay.shadow_counts import Difference, Lag, ShadowCounts
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.route import Shadowed
from resp_server.backends.routing.rules import Owner, Rule, Rules
from resp_server.backends.routing.shadow_compare import Outcome, outcome_of, shown_replies, shown_request
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.policy import SpecialCommand
from resp_server.limits import STEP_NS_MAX
from resp_server.protocol.errors import internal_error
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import CallbackWait, ReplyFuture, in_background
from resp_server.raw_replies.raw_reply import WRONG_TYPE, RawReply, Steps, as_bytes, is_error
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, Defer, ReplySink
from resp_server.raw_replies.reply_splitter import items_of, pack
from resp_server.session.epochs import ReplyEpochs

# Comparisons that run, or wait for a retry. Further reads are not compared (guess).
COMPARISONS_MAX = 256
# Longer replies are not compared: to parse one takes a fraction of a millisecond.
COMPARED_BYTES_MAX = 64 * 1024
# The time from the first replies to the first retry; it doubles with each retry.
FIRST_RETRY_S = 1 / 16
# A difference counts if it lasts for this long (guess: some micro-batches of a fast job).
COUNTS_AFTER_S = 1.0
# The last retry of a difference that counts (guess: a slow job's micro-batches), and how many are followed until then.
LAST_RETRY_S = 64.0
FOLLOWED_MAX = 64


class Shadow:
    """Compares reads.

    Args:
        job_of: Returns the job of a state's key, if it is known. Runs on the event loop's thread.
    """

    def __init__(
        self,
        clusters: StateClusters,
        target_of: Callable[[bytes], tuple[int, int]],
        job_of: Callable[[bytes], str | None],
        rules: Rules,
        defer: Defer,
    ) -> None:
        self._clusters, self.target_of, self.job_of = clusters, target_of, job_of
        self._defer = defer
        self._complete: deque[Callable[[], None]] = deque()
        self.is_stopped = False
        self._counts: dict[Rule, ShadowCounts] = {}
        self._running: set[ComparedRead] = set()
        self._followed: set[ComparedRead] = set()
        self.take_rules(rules)

    def take_rules(self, rules: Rules) -> None:
        """Compare by these rules. Unchanged rules keep their counts."""
        shadows = [rule for rule in rules if rule.owner is Owner.SHADOW]
        self._counts = {rule: self._counts.get(rule) or ShadowCounts() for rule in shadows}

    def compare_later(
        self, shadowed: Sequence[Shadowed], routed: OverlayCommand, protocol: int, upstream: Upstream, reply: RawReply
    ) -> None:
        """Compare the values in a reply of the upstream, after the client got it."""
        self._defer(partial(self._compare, shadowed, routed, protocol, upstream, reply))

    def _compare(
        self, shadowed: Sequence[Shadowed], routed: OverlayCommand, protocol: int, upstream: Upstream, reply: RawReply
    ) -> None:
        try:
            self._compare_all(shadowed, routed, protocol, upstream, reply)
        except Exception as error:
            internal_error(error)

    def compare_queued(self, reads: Sequence[QueuedRead], protocol: int, reply: RawReply) -> None:
        """Compare the reads of a transaction, after its client got the reply.

        Args:
            reply: The upstream's to EXEC.
        """
        self._run(self._compare_queued(reads, protocol, reply))

    def _compare_queued(self, reads: Sequence[QueuedRead], protocol: int, reply: RawReply) -> Steps[None]:
        items = yield from items_of(reply)
        for read in reads:
            self._compare_all(read.shadowed, read.routed, protocol, read.upstream, items[read.at])
            yield

    def _run(self, steps: Steps[None]) -> None:
        """Run steps, some in later turns."""
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        try:
            while perf_counter_ns() < ends_ns:
                next(steps)
        except StopIteration:
            return
        except MALFORMED_REPLY_ERRORS:
            return  # the client has got an error
        except Exception as error:
            internal_error(error)
            return
        self._defer(partial(self._run, steps))

    def skip(self, shadowed: Sequence[Shadowed]) -> None:
        """Count reads that are not compared."""
        for counts in filter(None, [self._counts.get(each.rule) for each in shadowed]):
            counts.skipped += 1

    def _compare_all(
        self, shadowed: Sequence[Shadowed], routed: OverlayCommand, protocol: int, upstream: Upstream, reply: RawReply
    ) -> None:
        text = b"" if len(reply) > COMPARED_BYTES_MAX else as_bytes(reply)
        items = (
            [text] if len(shadowed) == 1 and routed.policy.special is not SpecialCommand.MGET else _items_of_mget(text)
        )
        for each in shadowed:
            counts = self._counts.get(each.rule)
            if counts is None:
                continue
            item = items[each.at] if each.at < len(items) else b""
            if not item or len(self._running) >= COMPARISONS_MAX:
                counts.skipped += 1
            else:
                comparison = ComparedRead(self, counts, each, routed, protocol, upstream)
                self._running.add(comparison)
                in_background(comparison.run(item))

    def send_to_states(self, key: bytes, request: Request, protocol: int, sink: ReplySink, index: int = 0) -> None:
        """Send a read to the states."""
        number, slot = self.target_of(key)
        cluster = self._clusters[number]
        cluster.send(ServerRequest(pack(request), slot, protocol, cluster.deadline_s(), sink, index))

    def in_turn(self, then: Callable[[], None]) -> None:
        """Call back in a later turn, in which some comparisons go on: many may be complete at once."""
        self._complete.append(then)
        if len(self._complete) == 1:
            self._defer(self._go_on)

    def _go_on(self) -> None:
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        while self._complete and perf_counter_ns() < ends_ns:
            self._complete.popleft()()
        if self._complete:
            self._defer(self._go_on)

    def follow(self, comparison: ComparedRead) -> bool:
        """Keep a comparison whose difference counts; False if there are too many."""
        self._running.discard(comparison)
        has_room = len(self._followed) < FOLLOWED_MAX
        if has_room:
            self._followed.add(comparison)
        return has_room

    def ended(self, comparison: ComparedRead) -> None:
        """Forget a comparison."""
        self._running.discard(comparison)
        self._followed.discard(comparison)

    def stop(self) -> None:
        """End all comparisons."""
        self.is_stopped = True

    def rows(self) -> Reply:
        """Return a map for each rule: its counts and its last differences."""
        now_s = time.monotonic()
        return [
            {
                b"rule": rule.name.encode(),
                b"keys": rule.keys.text.encode(),
                **{name.encode(): count for name, count in counts.fields().items()},
                b"samples": [sample.row(now_s) for sample in counts.samples],
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


class QueuedRead(NamedTuple):
    """A read within MULTI that is to be compared.

    Args:
        at: Its position in the upstream's reply to EXEC.
    """

    at: int
    shadowed: Sequence[Shadowed]
    routed: OverlayCommand
    upstream: Upstream


class ComparedRead:
    """The comparison of one read: first with the client's reply, in each retry with new replies of both backends."""

    def __init__(
        self,
        shadow: Shadow,
        counts: ShadowCounts,
        shadowed: Shadowed,
        routed: OverlayCommand,
        protocol: int,
        upstream: Upstream,
    ) -> None:
        self._shadow, self._counts, self._shadowed = shadow, counts, shadowed
        self._routed, self._protocol, self._upstream = routed, protocol, upstream

    async def run(self, upstream_reply: bytes) -> None:
        """Compare a reply of the upstream with the state's."""
        try:
            await self._run(upstream_reply)
        finally:
            self._shadow.ended(self)

    async def _run(self, upstream_reply: bytes) -> None:
        first, counts, sample = await self._both_replies(upstream_reply), self._counts, None
        if first is None:
            counts.failed += 1
            return
        if self._outcome(first.upstream, first.state) is Outcome.EQUAL:
            counts.count(Outcome.EQUAL)
            return
        next_s = FIRST_RETRY_S  # from the first replies
        while next_s <= LAST_RETRY_S:
            pause_s = first.at_s + next_s - time.monotonic()
            await CallbackWait(partial(asyncio.get_running_loop().call_later, pause_s))
            next_s *= 2
            now = None if self._shadow.is_stopped else await self._both_replies()
            if now is None:
                counts.failed += sample is None  # otherwise it was counted as a difference
                return
            outcome = self._outcome(now.upstream, now.state)
            behind = self._behind(first, now, outcome)
            if behind is not None:
                lag = _lag(behind, first, now)
                counts.lags[behind].add(lag)
                if sample is not None:
                    sample.lag = lag
            if behind is not None or outcome is Outcome.EQUAL:
                if sample is None:
                    counts.count(Outcome.EQUAL)
                return
            if next_s > COUNTS_AFTER_S and sample is None:
                counts.count(outcome)
                sample = self._difference(outcome, now)
                counts.samples.append(sample)
                if not self._shadow.follow(self):
                    return

    async def _both_replies(self, upstream_reply: bytes | None = None) -> _ReplyPair | None:
        """Return the replies of both backends; None: a backend has replied an error.

        Args:
            upstream_reply: One that is known.
        """
        read, routed = self._shadowed, self._routed
        try:
            if upstream_reply is None:
                from_upstream = ReplyFuture()
                self._upstream.send_request(0, self._protocol, routed, read.upstream_request, from_upstream, 0)
            from_states = ReplyFuture()
            self._shadow.send_to_states(read.state_key, read.request, self._protocol, from_states)
            answer = await from_states
            state = self._text(answer.reply if read.convert is None else read.convert([answer.reply]))
            upstream = self._text((await from_upstream).reply if upstream_reply is None else upstream_reply)
        except Exception:
            return None
        # Of errors, only WRONGTYPE depends on the value alone, so it is compared like a value.
        if any(is_error(each) and not each.startswith(WRONG_TYPE) for each in (upstream, state)):
            return None
        await CallbackWait(self._shadow.in_turn)
        return _ReplyPair(time.monotonic(), self._epoch(answer.epochs), upstream, state)

    def _text(self, reply: RawReply) -> bytes:
        text = as_bytes(reply) if len(reply) <= COMPARED_BYTES_MAX else b"-too long\r\n"
        is_nil = self._routed.policy.special is SpecialCommand.MGET and text.startswith(WRONG_TYPE)  # it is read by GET
        return b"$-1\r\n" if is_nil else text

    def _outcome(self, upstream: bytes, state: bytes) -> Outcome:
        return outcome_of(self._shadowed.name, upstream, state, self._shadowed.rule.tolerance)

    def _behind(self, first: _ReplyPair, now: _ReplyPair, outcome: Outcome) -> str | None:
        """Return the backend that has caught up since the first replies; None: none has, or none was behind."""
        if now is first:
            return None
        if outcome is Outcome.EQUAL:
            # The backend that has changed was behind; if both have, the state counts: its epochs come in batches.
            return "state" if self._outcome(now.state, first.state) is not Outcome.EQUAL else "upstream"
        # If a key changes all the time, the backends are never equal, so each one is compared with the other's past.
        if self._outcome(now.upstream, first.state) is Outcome.EQUAL:
            return "upstream"
        return "state" if self._outcome(first.upstream, now.state) is Outcome.EQUAL else None

    def _difference(self, outcome: Outcome, now: _ReplyPair) -> Difference:
        read = self._shadowed
        upstream, state = shown_replies(read.name, now.upstream, now.state, read.rule.tolerance)
        command = shown_request(read.upstream_request)
        return Difference(outcome, read.key, command, upstream, state, now.epoch, time.monotonic())

    def _epoch(self, epochs: ReplyEpochs) -> int | None:
        job = self._shadow.job_of(self._shadowed.state_key)
        return next((epoch[job][1] for epoch in epochs if job is not None and job in epoch), None)


class _ReplyPair(NamedTuple):
    """The replies of both backends, taken at one time.

    Args:
        at_s: Monotonic.
        epoch: The epoch of the state's reply; None: unknown.
    """

    at_s: float
    epoch: int | None
    upstream: bytes
    state: bytes


def _lag(backend: str, first: _ReplyPair, now: _ReplyPair) -> Lag:
    is_known = first.epoch is not None and now.epoch is not None
    epochs = max(0, (now.epoch or 0) - (first.epoch or 0)) if is_known else None
    return Lag(backend, int((now.at_s - first.at_s) * 1000), epochs)


def _items_of_mget(reply: bytes) -> Sequence[bytes]:
    """Return the items of an MGET's reply as replies to GET; none of another reply."""
    if reply[:1] != b"*":
        return []
    reader = hiredis.Reader(notEnoughData=None)
    reader.feed(reply)
    try:
        items = reader.gets()
    except (TypeError, hiredis.HiredisError):
        return []
    if not isinstance(items, list) or not all(item is None or isinstance(item, bytes) for item in items):
        return []
    return [b"$-1\r\n" if item is None else b"$%d\r\n%b\r\n" % (len(item), item) for item in items]
