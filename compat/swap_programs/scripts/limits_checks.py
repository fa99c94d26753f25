"""limits, and Flask-Limiter on it: all strategies of the Redis storage, which are scripts, and a Flask application."""

from __future__ import annotations

from typing import Any

from flask import Flask
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address
from limits import parse
from limits.storage import storage_from_string
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, SlidingWindowCounterRateLimiter

from compat.swap_programs.scripts.checks import main

LIMIT = parse("3/hour")


def strategy(kind: Any) -> Any:
    """Return a check of a strategy: hits, tests, what remains, a hit of several, and a clear."""

    def check(url: str) -> Any:
        storage = storage_from_string(url)
        limiter = kind(storage)
        found = [limiter.hit(LIMIT, kind.__name__, "ada") for _ in range(5)]
        found += [limiter.test(LIMIT, kind.__name__, "ada"), limiter.test(LIMIT, kind.__name__, "grace")]
        window = limiter.get_window_stats(LIMIT, kind.__name__, "ada")
        found += [window.remaining, limiter.hit(LIMIT, kind.__name__, "grace", cost=3)]
        limiter.clear(LIMIT, kind.__name__, "ada")
        return [*found, limiter.hit(LIMIT, kind.__name__, "ada"), storage.check()]

    return check


def application(url: str) -> Any:
    app = Flask(__name__)
    limiter = Limiter(get_remote_address, app=app, storage_uri=url, headers_enabled=True, default_limits=["100/hour"])

    def page() -> str:
        return "a page"

    app.route("/limited")(limiter.limit("2/hour")(page))
    with app.test_client() as client:
        responses = [client.get("/limited") for _ in range(4)]
    return [[each.status_code, each.headers.get("X-RateLimit-Remaining")] for each in responses]


def reset(url: str) -> Any:
    storage = storage_from_string(url)
    limiter = FixedWindowRateLimiter(storage)
    limiter.hit(LIMIT, "reset")
    removed = storage.reset()
    return [removed is not None and removed >= 1, limiter.test(LIMIT, "reset")]


CHECKS = {
    "fixed window": strategy(FixedWindowRateLimiter),
    "moving window": strategy(MovingWindowRateLimiter),
    "sliding window": strategy(SlidingWindowCounterRateLimiter),
    "a Flask application": application,
    "reset": reset,
}

if __name__ == "__main__":
    main(CHECKS)
