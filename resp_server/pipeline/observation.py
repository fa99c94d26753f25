"""Whatever needs requests to be handled one by one: MONITOR, SLOWLOG, LATENCY, CLIENT PAUSE."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resp_server.pipeline.client_pause import ClientPause
from resp_server.pipeline.slow_requests import SlowRequests
from resp_server.push.clients import Clients, OtherWorkers
from resp_server.push.monitor import Monitors
from resp_server.session.session import Session
from resp_server.settings.server import ServerConfig
from state_backend.model.clock import Clock

# The fast path times a buffer of requests as a whole. With a lower threshold than this, a buffer may exceed the
# threshold although no request does. So requests are timed one by one (guess: a buffer of 16 KiB takes at most half a
# millisecond).
ONE_BY_ONE_US = 1_000


class Observation:
    """The monitors, the slow requests and the pause of one process.

    Attributes:
        slow_ns: The duration from which on a request is recorded as slow.
    """

    def __init__(
        self,
        config: Callable[[], ServerConfig],
        clock: Clock,
        clients: Clients,
        workers: Callable[[], OtherWorkers | None],
        sessions: Mapping[int, Session],
        attempt: Callable[..., bool],
    ) -> None:
        self._config, self._sessions = config, sessions
        self.slow_requests = SlowRequests(config, clock)
        self.monitors = Monitors(clients, workers, clock, self.update, attempt)
        self.pause = ClientPause(clock, self.update, lambda: clients.resume())
        self._was_on = False  # as a new session is
        self.update()

    @property
    def is_on(self) -> bool:
        """Whether requests are monitored, timed or paused individually; then the fast path is off."""
        is_measured = 0 <= self._config().slowlog_log_slower_than < ONE_BY_ONE_US
        return is_measured or bool(self.monitors) or self.pause.until_ms > 0

    def configure(self) -> None:
        """Apply changed settings."""
        self.slow_requests.configure()
        self.update()

    def update(self) -> None:
        """Apply `is_on` to all sessions, and the threshold of slow requests."""
        self.slow_ns = self.slow_requests.threshold_ns
        is_on = self.is_on
        if is_on is not self._was_on:
            self._was_on = is_on
            for session in self._sessions.values():
                session.set_observed(is_on)
