"""Records slow requests and events for SLOWLOG and LATENCY, above the configured thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resp_server.command.redaction import redacted
from resp_server.command.table import Command
from resp_server.metrics.latency import LatencyEvents
from resp_server.metrics.slow_log import SlowLog
from resp_server.session.session import Session
from resp_server.settings.server import ServerConfig
from state_backend.model.clock import Clock

NEVER_NS = (1 << 63) - 1


class SlowRequests:
    """The slow log and the latency events of one process."""

    def __init__(self, config: Callable[[], ServerConfig], clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self.log, self.latency = SlowLog(), LatencyEvents()

    @property
    def threshold_ns(self) -> int:
        """The duration from which on a request is recorded."""
        config = self._config()
        slow_ns = config.slowlog_log_slower_than * 1000 if config.slowlog_log_slower_than >= 0 else NEVER_NS
        return min(slow_ns, config.latency_monitor_threshold * 1_000_000 or NEVER_NS, NEVER_NS)

    def configure(self) -> None:
        """Apply changed settings."""
        self.log.cut(self._config().slowlog_max_len)

    def record(self, session: Session, command: Command, request: Sequence[bytes], nanoseconds: int) -> None:
        """Record a request, if it was slow."""
        config, flags = self._config(), command.facts.flags
        microseconds = nanoseconds // 1000
        if 0 <= config.slowlog_log_slower_than <= microseconds and "skip_slowlog" not in flags:
            now_ms, entries_max = self._clock(), config.slowlog_max_len
            shown = redacted(command.policy.redaction, request)
            self.log.add(now_ms, microseconds, shown, session.address, session.name, entries_max)
        self.record_event("fast-command" if "fast" in flags else "command", microseconds // 1000)

    def record_event(self, name: str, milliseconds: int) -> None:
        """Record an event for LATENCY, if it took long."""
        if 0 < self._config().latency_monitor_threshold <= milliseconds:
            self.latency.add(name, self._clock(), milliseconds)
