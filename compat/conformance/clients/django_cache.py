"""Django's cache with django-redis: JSON values and Django's keys, which a job can write, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import django
import django_redis
from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache
from django_redis.cache import RedisCache

from compat.conformance.clients.scenario import At, error_text, in_order, main, request
from compat.waiting import eventually

WAIT_S_MAX = 20.0


settings.configure(CACHES={"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}})
django.setup()


def cache_at(at: At, url: str | None = None, **options: Any) -> Any:
    """Return a cache of django-redis."""
    given = {"CLIENT_CLASS": "django_redis.client.DefaultClient", **options}
    given["SERIALIZER"] = "django_redis.serializers.json.JSONSerializer"
    location = url or f"redis://{at.host}:{at.port}/0"
    return RedisCache(location, {"OPTIONS": given})


def put(at: At, value: Any) -> None:
    """Set the live key, which is version 1 of the empty prefix."""
    request("put", key=at.live, value=json.dumps(value))


def failure(call: Callable[[], Any]) -> Any:
    """Return what a call raises, or what it returns instead."""
    try:
        return call()
    except Exception as error:
        return error_text(error)


def django_key(at: At) -> str:
    """Return the live key's name in Django."""
    return at.live.removeprefix(":1:")


def connect(at: At) -> Any:
    return [cache_at(at).get("missing", "a default"), isinstance(caches["default"], BaseCache)]


def reads(at: At) -> Any:
    cache, name = cache_at(at), django_key(at)
    put(at, {"temperature": 21.5, "names": ["a", "ž"]})
    found = [
        cache.get(name),
        cache.get_many([name]),
        cache.has_key(name),
        cache.ttl(name),
        cache.ttl("missing"),
        name in cache,
        cache.get(name, version=2),
        cache.get_or_set(name, "unused"),
    ]
    request("delete", key=at.live)
    return found


def scans(at: At) -> Any:
    cache, name = cache_at(at), django_key(at)
    put(at, 1)
    found = [in_order(cache.keys("*ve*")), in_order(cache.iter_keys("*", itersize=10)), name in cache.keys("*")]
    request("delete", key=at.live)
    return found


def errors(at: At) -> Any:
    raw = cache_at(at).client.get_client()
    return [failure(lambda: raw.get("hash:one")), failure(lambda: raw.execute_command("NOPE"))]


def refusals(at: At) -> Any:
    cache = cache_at(at)
    quiet = cache_at(at, IGNORE_EXCEPTIONS=True)
    return [
        failure(lambda: cache.set("a", 1)),
        failure(lambda: cache.add("a", 1)),
        failure(lambda: cache.set_many({"a": 1})),
        failure(lambda: cache.delete("a")),
        failure(lambda: cache.get_or_set("missing", 1)),
        failure(lambda: quiet.get("missing")),
    ]


def tls(at: At) -> Any:
    trusting = cache_at(at, f"rediss://{at.host}:{at.tls_port}/0", CONNECTION_POOL_KWARGS={"ssl_ca_certs": at.ca})
    return [trusting.get("missing", "a default"), trusting.client.get_client().get("plain")]


def acl(at: At) -> Any:
    """The tenant may read `user:*`. Django's keys do not match it."""
    cache = cache_at(at, f"redis://{at.user}:{at.password}@{at.host}:{at.port}/0")
    raw = cache.client.get_client()
    return [raw.get("user:1:name"), failure(lambda: cache.get("x")).partition(":")[0]]


def reconnect(at: At) -> Any:
    cache, name = cache_at(at), django_key(at)
    put(at, "kept")
    found = [cache.get(name)]
    request("restart")
    put(at, "kept still")

    def read() -> list[Any]:
        with suppress(Exception):  # Django and its backends raise errors of their own
            return [cache.get(name)]
        return []

    found += eventually(read, awaited="a new connection", timeout_s=WAIT_S_MAX)
    request("delete", key=at.live)
    return found


FEATURES = {
    "connect": connect,
    "strings, hashes, lists": reads,
    "scan": scans,
    "errors": errors,
    "write refused": refusals,
    "ACL user": acl,
    "TLS": tls,
    "reconnect after a restart": reconnect,
}


def outside_clusters(feature: Callable[[At], Any]) -> Callable[[At], Any]:
    """Run a feature outside a cluster only, because django-redis does not follow redirections."""
    return lambda at: "not supported" if at.is_cluster else feature(at)


if __name__ == "__main__":
    version = f"{django_redis.__version__}, Django {django.__version__}"
    main(version, {name: outside_clusters(feature) for name, feature in FEATURES.items()})
