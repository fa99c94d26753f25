"""redis-py of any major version: blocking and asyncio clients, in RESP2 and RESP3, plain and for clusters.

Each feature is written once; results of asyncio clients are awaited.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from itertools import product
from time import monotonic
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, RedisClusterException
from redis.retry import Retry

from compat.conformance.clients.scenario import At, Expected, in_order, main, plain, request
from compat.waiting import eventually

# Longer than any reply takes on a busy machine.
MESSAGE_S_MAX = 20.0
TRY_EVERY_S = 0.05

MANY = [f"many:{number:03d}" for number in range(300)]


async def settle(result: Any) -> Any:
    """Return the result of a call, awaited if needed."""
    return await result if inspect.isawaitable(result) else result


async def collected(iterator: Any) -> list[Any]:
    """Return all items of an iterator of either kind."""
    if hasattr(iterator, "__aiter__"):
        return [each async for each in iterator]
    return list(iterator)


async def failure(call: Callable[[], Any]) -> Any:
    """Return a call's exception, or its result."""
    try:
        return await settle(call())
    except (redis.RedisError, RedisClusterException) as error:
        return error


class Kit:
    """A kind of redis-py's clients, and how to make one."""

    def __init__(self, at: At, is_async: bool, protocol: int) -> None:
        self.at, self.is_async, self.protocol = at, is_async, protocol

    @property
    def no_retry(self) -> Any:
        """The arguments of a client without retries."""
        return (AsyncRetry if self.is_async else Retry)(NoBackoff(), 0)

    def plain(self, **options: Any) -> Any:
        """Return a client of one server."""
        given: dict[str, Any] = {"host": self.at.host, "port": self.at.port, "protocol": self.protocol} | options
        return redis.asyncio.Redis(**given) if self.is_async else redis.Redis(**given)

    def client(self, **options: Any) -> Any:
        """Return a client of the server, or of the cluster that it is a node of."""
        if not self.at.is_cluster:
            return self.plain(**options)
        given: dict[str, Any] = {"host": self.at.host, "port": self.at.port, "protocol": self.protocol} | options
        return redis.asyncio.cluster.RedisCluster(**given) if self.is_async else redis.cluster.RedisCluster(**given)


async def close(client: Any) -> None:
    """Close a client of either kind, of any version."""
    await settle(client.aclose() if hasattr(client, "aclose") else client.close())


Feature = Callable[[Kit, Any], Awaitable[Any]]


async def connect(kit: Kit, client: Any) -> Any:
    if kit.at.is_cluster:
        return [await settle(client.ping(target_nodes=redis.cluster.RedisCluster.PRIMARIES))]
    named = kit.plain(client_name="a-name", db=1, health_check_interval=30)
    try:
        return [
            await settle(named.ping()),
            await settle(named.client_getname()),
            await settle(named.dbsize()),
            await settle(client.echo("x")),
            (await settle(client.info("server")))["redis_mode"],
        ]
    finally:
        await close(named)


async def reads(kit: Kit, client: Any) -> Any:
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: client.get("plain"),
        "missing": lambda: client.get("missing"),
        "bytes": lambda: client.get(b"\x00\xff\r\n\x80"),
        "mget": lambda: client.mget("{tag}a", "{tag}b", "{tag}hash", "{tag}missing"),
        "getrange": lambda: client.getrange("plain", 1, 3),
        "strlen": lambda: client.strlen("big"),
        "hget": lambda: client.hget("hash:one", "field"),
        "hgetall": lambda: client.hgetall("hash:small"),
        "hgetall missing": lambda: client.hgetall("missing"),
        "hmget": lambda: client.hmget("hash:one", ["field", "missing"]),
        "hlen": lambda: client.hlen("hash:large"),
        "hexists": lambda: client.hexists("hash:one", "field"),
        "hstrlen": lambda: client.hstrlen("hash:one", "field"),
        "lrange": lambda: client.lrange("list:short", 0, -1),
        "lindex": lambda: client.lindex("list:odd", -1),
        "llen": lambda: client.llen("list:long"),
        "lpos": lambda: client.lpos("list:short", "a", count=0),
        "ttl": lambda: client.ttl("plain"),
        "pttl": lambda: client.pttl("missing"),
        "pexpiretime": lambda: client.pexpiretime("later"),
        "type": lambda: client.type("hash:one"),
        "exists": lambda: client.exists("{tag}a", "{tag}missing"),
    }
    found = {name: await settle(call()) for name, call in calls.items()}
    for name in ("hkeys", "hvals"):
        found[name] = in_order(await settle(getattr(client, name)("hash:small")))
    return found


async def sets(kit: Kit, client: Any) -> Any:
    calls: dict[str, Callable[[], Any]] = {
        "scard": lambda: client.scard("set:large"),
        "sismember": lambda: client.sismember("set:small", "a"),
        "smismember": lambda: client.smismember("set:small", ["a", "missing"]),
        "zcard": lambda: client.zcard("zset:large"),
        "zscore": lambda: client.zscore("zset:small", "d"),
        "zmscore": lambda: client.zmscore("zset:small", ["f", "missing"]),
        "zrank": lambda: client.zrank("zset:large", "member:00042"),
        "zrange": lambda: client.zrange("zset:small", 0, -1, withscores=True),
        "zrevrange": lambda: client.zrevrange("zset:large", 0, 9, withscores=True),
        "zrangebyscore": lambda: client.zrangebyscore("zset:small", "-inf", "(3", start=1, num=2),
        "zrangebylex": lambda: client.zrangebylex("zset:same", "[a", "(c"),
        "zcount": lambda: client.zcount("zset:large", 10, 20),
        "type": lambda: client.type("zset:one"),
    }
    found = {name: await settle(call()) for name, call in calls.items()}
    found["smembers"] = in_order(await settle(client.smembers("set:odd")))
    found["sinter"] = in_order(await settle(client.sinter("{tag}set", "{tag}set2")))
    found["sscan"] = in_order(await collected(client.sscan_iter("set:large")))
    found["zscan"] = in_order(await collected(client.zscan_iter("zset:small")))
    return found


async def pipelines(kit: Kit, client: Any) -> Any:
    pipeline = client.pipeline() if kit.at.is_cluster else client.pipeline(transaction=False)
    for key in MANY:
        pipeline.get(key)
    pipeline.hgetall("hash:one")
    pipeline.get("hash:one")
    pipeline.lrange("list:short", 0, 1)
    return await settle(pipeline.execute(raise_on_error=False))


async def transactions(kit: Kit, client: Any) -> Any:
    """In a cluster a transaction belongs to one node; cluster clients of older redis-py versions have none."""
    plain_client = kit.plain()
    try:
        one = plain_client.pipeline()
        one.get(kit.at.live)
        one.exists(kit.at.live)
        found = [await settle(one.execute())]
        for changes in (False, True):
            two = plain_client.pipeline()
            await settle(two.watch(kit.at.live))
            found.append(await settle(two.get(kit.at.live)))
            if changes:
                request("put", key=kit.at.live, value=f"changed by {kit.is_async} {kit.protocol}")
            two.multi()
            two.type(kit.at.live)
            try:
                found.append(await settle(two.execute()))
            except redis.WatchError:
                found.append("aborted")
            await settle(two.reset())
        request("delete", key=kit.at.live)
        return found
    finally:
        await close(plain_client)


async def scans(kit: Kit, client: Any) -> Any:
    return {
        "all": in_order(await collected(client.scan_iter(count=100))),
        "match": in_order(await collected(client.scan_iter(match="user:*", count=1000))),
        "type": in_order(await collected(client.scan_iter(_type="HASH"))),
        "hscan": in_order(await collected(client.hscan_iter("hash:large"))),
    }


async def long_values(kit: Kit, client: Any) -> Any:
    return [
        await settle(client.get("big")),
        in_order((await settle(client.hgetall("hash:large"))).items()),
        await settle(client.lrange("list:long", 0, -1)),
        await settle(client.hget("hash:wide", "long")),
        await settle(client.mget(*["{tag}a"] * 5000)),
    ]


async def errors(kit: Kit, client: Any) -> Any:
    calls = {
        "type": lambda: client.get("hash:one"),
        "number": lambda: client.execute_command("LRANGE", "list:one", "x", "1"),
        "arity": lambda: client.execute_command("HGET", "hash:one"),
        "syntax": lambda: client.execute_command("LPOS", "list:one", "only", "NOPE", "1"),
    }
    if not kit.at.is_cluster:  # a cluster client has to know where a command goes
        calls["unknown"] = lambda: client.execute_command("NOPE", "a", "b")
    return {name: await failure(call) for name, call in calls.items()} | {"after": await settle(client.get("plain"))}


async def refusals(kit: Kit, client: Any) -> Any:
    calls = [
        lambda: client.set("plain", "x"),
        lambda: client.lpop("list:one"),
        lambda: client.hset("hash:one", "field", "x"),
        lambda: client.rpush("list:one", "x"),
        lambda: client.expire("plain", 10),
        lambda: client.getdel("plain"),
        lambda: client.incr("number"),
    ]
    return [await failure(call) for call in calls] + [await settle(client.get("plain"))]


async def message_of(listener: Any) -> Any:
    """Return the next message."""
    ends = monotonic() + MESSAGE_S_MAX
    while monotonic() < ends:
        message = await settle(listener.get_message(timeout=1.0))
        if message is not None:
            return message
    raise TimeoutError("no message came")


async def pubsub(kit: Kit, client: Any) -> Any:
    publisher, subscriber = kit.plain(), kit.plain()
    try:
        listener = subscriber.pubsub()
        await settle(listener.subscribe("news", "more"))
        await settle(listener.psubscribe("n?ws"))
        found = [await message_of(listener) for _ in range(3)]
        found.append(await settle(publisher.publish("news", b"\x00first")))
        found += sorted([await message_of(listener) for _ in range(2)], key=str)
        found.append(in_order(await settle(publisher.pubsub_channels("n*"))))
        found.append(await settle(publisher.pubsub_numsub("news", "nobody")))
        found.append(await settle(publisher.pubsub_numpat()))
        await settle(listener.unsubscribe("news"))
        found.append(await message_of(listener))
        found.append(await settle(publisher.publish("more", "second")))
        found.append(await message_of(listener))
        await settle(listener.aclose() if kit.is_async else listener.close())
        return found
    finally:
        await close(publisher)
        await close(subscriber)


async def notifications(kit: Kit, client: Any) -> Any:
    subscriber = kit.plain()
    try:
        await settle(subscriber.config_set("notify-keyspace-events", "KEA"))
        listener = subscriber.pubsub()
        await settle(listener.psubscribe(f"__keyspace@0__:{kit.at.live}", "__keyevent@0__:del"))
        found = [await message_of(listener) for _ in range(2)]
        request("put", key=kit.at.live, value=f"notified {kit.is_async} {kit.protocol}")
        found.append(await message_of(listener))
        request("delete", key=kit.at.live)
        found += [await message_of(listener) for _ in range(2)]
        found.append((await settle(subscriber.config_get("notify-keyspace-events")))["notify-keyspace-events"])
        await settle(subscriber.config_set("notify-keyspace-events", ""))
        await settle(listener.aclose() if kit.is_async else listener.close())
        return found
    finally:
        await close(subscriber)


async def tracking(kit: Kit, client: Any) -> Any:
    """With REDIRECT: a subscriber gets the invalidations of another client. redis-py does not expose RESP3's."""
    reader, subscriber = kit.plain(single_connection_client=True), kit.plain(protocol=2)
    try:
        request("put", key=kit.at.live, value=f"before {kit.is_async} {kit.protocol}")
        listener = subscriber.pubsub()
        await settle(listener.subscribe("__redis__:invalidate"))
        found = [await message_of(listener)]
        clients = await settle(reader.client_list(_type="pubsub"))
        redirect = max(int(each["id"]) for each in clients)
        found.append(await settle(reader.execute_command("CLIENT", "TRACKING", "ON", "REDIRECT", redirect)))
        await settle(reader.get(kit.at.live))
        request("put", key=kit.at.live, value=f"after {kit.is_async} {kit.protocol}")
        found.append(await message_of(listener))
        found.append(await settle(reader.get(kit.at.live)))
        found.append(await settle(reader.client_getredir()) == redirect)
        found.append(await settle(reader.execute_command("CLIENT", "TRACKING", "OFF")))
        request("delete", key=kit.at.live)
        await settle(listener.aclose() if kit.is_async else listener.close())
        return found
    finally:
        await close(reader)
        await close(subscriber)


async def cache(kit: Kit, client: Any) -> Any:
    """redis-py's own client-side cache, which only blocking RESP3 clients have."""
    if kit.is_async or kit.protocol == 2:
        return "not supported"
    from redis.cache import CacheConfig

    request("put", key=kit.at.live, value="1")
    cached = kit.client(cache_config=CacheConfig())
    try:
        found = [cached.get(kit.at.live), cached.get(kit.at.live)]
        request("put", key=kit.at.live, value="2")
        found.append(
            eventually(
                lambda: cached.get(kit.at.live),
                lambda value: value == b"2",
                awaited="the changed value",
                timeout_s=MESSAGE_S_MAX,
            )
        )
        found.append(
            (cached.get_node_from_key(kit.at.live).redis_connection if kit.at.is_cluster else cached).get_cache().size
        )
        request("delete", key=kit.at.live)
        return found
    finally:
        cached.close()


async def acl(kit: Kit, client: Any) -> Any:
    """The texts of refusals are those of another version of Redis, so the classes of the errors are compared."""
    tenant = kit.client(username=kit.at.user, password=kit.at.password)
    try:
        found: list[Any] = [await settle(tenant.get("user:1:name"))]
        found += [type(await failure(lambda: tenant.get("plain"))).__name__]
        found += [type(await failure(lambda: tenant.config_get("maxmemory"))).__name__]
        found += [type(await failure(lambda: tenant.hgetall("hash:one"))).__name__]
    finally:
        await close(tenant)
    rejected = kit.plain(username=kit.at.user, password="wrong", retry=kit.no_retry)
    try:
        found.append(type(await failure(lambda: rejected.get("user:1:name"))).__name__)
    finally:
        await close(rejected)
    return found


async def tls(kit: Kit, client: Any) -> Any:
    with_ca = kit.client(port=kit.at.tls_port, ssl=True, ssl_ca_certs=kit.at.ca)
    try:
        found: list[Any] = [await settle(with_ca.get("plain")), await settle(with_ca.hgetall("hash:one"))]
        found.append(len(await settle(with_ca.get("big"))))
    finally:
        await close(with_ca)
    without_ca = kit.plain(port=kit.at.tls_port, ssl=True, retry=kit.no_retry)
    try:
        found.append(type(await failure(lambda: without_ca.get("plain"))).__name__)
    finally:
        await close(without_ca)
    return found


async def reconnect(kit: Kit, client: Any) -> Any:
    found = [await settle(client.get("plain"))]
    request("restart")
    ends = monotonic() + MESSAGE_S_MAX
    while True:  # retry, as an application would
        try:
            return [*found, await settle(client.get("plain"))]
        except (redis.ConnectionError, ClusterDownError):
            if monotonic() > ends:
                raise
            await asyncio.sleep(TRY_EVERY_S)


async def redirects(kit: Kit, client: Any) -> Any:
    """The cluster client finds every owner; a plain one gets MOVED."""
    if not kit.at.is_cluster:
        return "not supported"
    plain = kit.plain(port=kit.at.other_port)
    try:
        return [
            [await settle(client.get(key)) for key in MANY],
            await settle(client.cluster_keyslot("foo")),
            await failure(lambda: client.mget("plain", "number")),
            await failure(lambda: plain.get(kit.at.live)),
            len(client.get_primaries()),
        ]
    finally:
        await close(plain)


FEATURES: dict[str, Feature] = {
    "connect": connect,
    "strings, hashes, lists": reads,
    "sets, sorted sets": sets,
    "pipelines": pipelines,
    "transactions": transactions,
    "scan": scans,
    "long values": long_values,
    "errors": errors,
    "write refused": refusals,
    "pub/sub": pubsub,
    "notifications": notifications,
    "tracking": tracking,
    "client-side cache": cache,
    "ACL user": acl,
    "TLS": tls,
    "reconnect after a restart": reconnect,
    "cluster redirect": redirects,
}


# Blocking and asyncio, in both versions of the protocol; only two variants if the server has to be restarted each time.
VARIANTS = tuple(product((False, True), (2, 3)))
FEW_VARIANTS = {"reconnect after a restart": ((False, 2), (True, 3))}


def in_variants(feature: Feature, variants: Sequence[tuple[bool, int]]) -> Callable[[At], Any]:
    """Run a feature with several of redis-py's clients."""

    async def run(at: At, is_async: bool, protocol: int) -> Any:
        kit = Kit(at, is_async, protocol)
        client = kit.client()
        try:
            return plain(await feature(kit, client))
        finally:
            await close(client)

    def run_all(at: At) -> dict[str, Any]:
        return {
            f"{'asyncio' if is_async else 'blocking'}, RESP{protocol}": asyncio.run(run(at, is_async, protocol))
            for is_async, protocol in variants
        }

    return run_all


HAS_NO_CACHE = dict.fromkeys(("asyncio, RESP2", "asyncio, RESP3", "blocking, RESP2"), "not supported")
EXPECTED = {
    "client-side cache": Expected(
        "redis-py's cache asks for Redis 7.4 or later", HAS_NO_CACHE | {"blocking, RESP3": [b"1", b"1", b"2", 1]}
    )
}

if __name__ == "__main__":
    main(
        redis.__version__,
        {name: in_variants(feature, FEW_VARIANTS.get(name, VARIANTS)) for name, feature in FEATURES.items()},
        EXPECTED,
    )
