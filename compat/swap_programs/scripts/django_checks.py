"""django-redis: Django's cache and Django's sessions in it."""

from __future__ import annotations

from typing import Any

from django.contrib.sessions.backends.cache import SessionStore
from django.core.cache import cache

from compat.swap_programs.scripts.checks import main


def values(url: str) -> Any:
    found = [cache.set("a", {"b": [1, 2.5, None, "ž"]}), cache.get("a"), cache.get("missing", "a default")]
    found += [cache.add("a", 1), cache.add("new", 1, timeout=100), cache.has_key("new"), "new" in cache]
    found += [cache.get_or_set("made", lambda: 7), cache.get("made", version=2), cache.incr_version("made")]
    return [*found, cache.get("made", version=2), cache.delete("a"), cache.delete("a"), cache.get("a")]


def counters(url: str) -> Any:
    cache.set("count", 5)
    found = [cache.incr("count"), cache.incr("count", 10), cache.decr("count", 3), cache.get("count")]
    try:
        cache.incr("missing")
    except ValueError as error:
        found.append(str(error))
    return found


def many(url: str) -> Any:
    cache.set_many({f"many:{number}": number for number in range(50)}, timeout=60)
    found = [cache.get_many([f"many:{number}" for number in range(40, 60)]), cache.delete_many(["many:1", "many:2"])]
    return [*found, len(cache.keys("many:*")), cache.delete_pattern("many:*"), cache.keys("many:*")]


def expiry(url: str) -> Any:
    cache.set("brief", 1, timeout=50)
    found = [cache.ttl("brief") in (49, 50), cache.persist("brief"), cache.ttl("brief"), cache.touch("brief", 10)]
    found += [cache.expire("brief", 20), cache.pttl("brief") > 10_000, cache.ttl("missing")]
    cache.set("gone", 1, timeout=0)
    return [*found, cache.get("gone"), cache.set("only new", 1, nx=True), cache.set("only new", 1, nx=True)]


def locks(url: str) -> Any:
    with cache.lock("lock", timeout=20) as lock:
        found = [lock.owned(), cache.lock("lock", timeout=20).acquire(blocking=False), lock.extend(10)]
    return [*found, cache.lock("lock").locked()]


def compound(url: str) -> Any:
    """Sets and hashes, which django-redis offers beside Django's interface."""
    found = [cache.sadd("set", 1, 2, 3), sorted(cache.smembers("set")), cache.sismember("set", 2), cache.srem("set", 2)]
    return [*found, cache.hset("hash", "f", "v"), cache.hexists("hash", "f"), cache.hlen("hash"), cache.hkeys("hash")]


def sessions(url: str) -> Any:
    session = SessionStore()
    session["user"] = "ada"
    session.set_expiry(300)
    session.save()
    first = str(session.session_key)
    found = [SessionStore(first)["user"], SessionStore(first).exists(first)]
    session.cycle_key()
    found += [session.session_key != first, session.exists(first), SessionStore(session.session_key)["user"]]
    session.flush()
    return [*found, session.session_key, SessionStore(first).get("user", "nobody")]


def clear(url: str) -> Any:
    cache.set("a", 1)
    return [cache.clear(), cache.get("a")]


CHECKS = {
    "values": values,
    "counters": counters,
    "many keys and patterns": many,
    "expiry": expiry,
    "locks": locks,
    "sets and hashes": compound,
    "sessions": sessions,
    "clear": clear,
}

if __name__ == "__main__":
    main(CHECKS)
