"""A real server and one under test that get the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compat.conformance.judge import Judge
from compat.conformance.servers import Running
from compat.conformance.wire import Reply, Words, exchange, replies_to


@dataclass
class Pair:
    """Two servers with the same data."""

    redis: Running = field(repr=False)
    sparkis: Running = field(repr=False)
    judge: Judge = field(repr=False)

    def replies_to(self, pipeline: Sequence[Words]) -> tuple[list[Reply], list[Reply]]:
        """Send a pipeline to both, each on a new connection; return Redis' replies, and ours."""
        return replies_to(self.redis.port, pipeline), replies_to(self.sparkis.port, pipeline)

    def check(self, pipeline: Sequence[Words]) -> None:
        """Raise AssertionError unless both send the same replies to a pipeline."""
        __tracebackhide__ = True
        theirs, ours = self.replies_to(pipeline)
        differences = self.judge.differences(pipeline, theirs, ours)
        assert not differences, "\n".join(differences)

    def check_line(self, line: str) -> None:
        """Check one request, given as words with spaces between them, in RESP2 and RESP3."""
        __tracebackhide__ = True
        words = [word.encode() for word in line.split(" ")]
        self.check([words])
        self.check([[b"HELLO", b"3"], words])

    def check_bytes(self, data: bytes, cuts: Sequence[int] = (), pause_s: float = 0.0) -> bytes:
        """Raise AssertionError unless both reply to these bytes with the same bytes; return the reply."""
        __tracebackhide__ = True
        theirs, ours = (exchange(server.port, data, cuts, pause_s) for server in (self.redis, self.sparkis))
        assert ours == theirs, f"{data[:300]!r}: Redis replies {theirs[:400]!r}, sparkis {ours[:400]!r}"
        return theirs
