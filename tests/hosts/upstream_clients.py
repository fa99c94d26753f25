"""A client of the proxies that writes and reads its own key at the upstream, and checks each reply."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from threading import Event, Thread

import redis

from tests.hosts.world import World

PROXIES = ("proxy0", "proxy1")
KEY = "upstream:number"
# Longer than the upstream's own limit, after which the proxy replies with an error.
TIMEOUT_S = 20.0


class UpstreamClient:
    """Writes ever larger numbers. A reply is wrong if it is none of those since the last write that was confirmed.

    pause_s: how long it pauses after each read.
    """

    def __init__(self, world: World, pause_s: float) -> None:
        self.reads, self.wrongs, self.errors = 0, list[str](), Counter[str]()
        self._world, self._pause_s = world, pause_s
        self._is_over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        confirmed = sent = at = 0
        with self._world.client.network():
            while not self._is_over.is_set():
                at += 1
                with suppress(OSError, redis.RedisError), self._world.connect(PROXIES[at % 2], TIMEOUT_S) as client:
                    try:
                        while not self._is_over.wait(self._pause_s):
                            sent += 1
                            client.set(KEY, sent)
                            confirmed = sent
                            self._check(client.get(KEY), confirmed, sent)
                    except redis.RedisError as error:
                        self.errors[str(error)[:60]] += 1
                        self._check_after_error(client, confirmed, sent)
                self._is_over.wait(self._pause_s)

    def _check_after_error(self, client: redis.Redis, confirmed: int, sent: int) -> None:
        found = client.get(KEY)
        self._check(found, confirmed, sent)

    def _check(self, found: object, confirmed: int, sent: int) -> None:
        self.reads += 1
        number = int(found) if isinstance(found, bytes) and found.isdigit() else -1
        if not confirmed <= number <= sent and not (found is None and confirmed == 0):
            self.wrongs.append(f"{found!r} after {confirmed} was confirmed and {sent} was sent")

    def stop(self) -> None:
        """Stop."""
        self._is_over.set()
        self._thread.join()
