"""redis-py: the blocking client in both protocols, pipelines, transactions, scripts, messages; the cluster client."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

import redis
from redis.client import Pipeline
from redis.cluster import RedisCluster

from compat.client_programs.python.steps import (
    PLACE,
    SCRIPT,
    WAIT_S_MAX,
    address,
    all_texts,
    ask,
    step,
    text,
    until_equal,
)


def main() -> None:
    if PLACE == "cluster":
        cluster()
        return
    for protocol in (2, 3):
        with redis.Redis(**address(), protocol=protocol, client_name="program") as client:
            texts(client, f"RESP{protocol}")
            if PLACE == "tls":
                continue
            reads(client, f"RESP{protocol}")
            changes(client, f"RESP{protocol}")
            if PLACE == "upstream":
                writes(client, f"RESP{protocol}")
    if PLACE == "server":
        step("a server that never replies", lambda: at_silent_server(5.0))
        limits = {"socket_connect_timeout": 0.5, "socket_timeout": 0.5}
        step("a server that never replies, with limits of 0.5 s", lambda: at_silent_server(0.5, **limits))


def at_silent_server(expected_s: float, **options: Any) -> list[Any]:
    """Return the error of a read at a server that never replies, and whether it came after the expected time."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        redis.Redis(port=server.getsockname()[1], **options) as client,
    ):
        start_s = monotonic()
        try:
            return [client.get(text(7))]
        except redis.RedisError as error:
            waited_s = monotonic() - start_s
            return [type(error).__name__, expected_s <= waited_s < expected_s + 4.5]


def texts(client: Any, protocol: str) -> None:
    step(f"{protocol} GET", lambda: client.get(text(7)))
    step(f"{protocol} a missing key", lambda: client.get("job:text:none"))
    step(f"{protocol} MGET", lambda: client.mget(text(1), "job:text:none", text(299)))
    step(f"{protocol} STRLEN", lambda: client.strlen("job:text:long"))
    step(f"{protocol} a pipeline", lambda: pipeline(client))
    step(f"{protocol} EXISTS, TYPE, TTL", lambda: [client.exists(text(7)), client.type(text(7)), client.ttl(text(7))])
    step(f"{protocol} WRONGTYPE", lambda: client.hgetall(text(7)))
    step(f"{protocol} a key of others", lambda: client.hlen("job:map:flight"))
    if PLACE != "upstream":
        step(f"{protocol} a refused write", lambda: client.set(text(7), "x"))
        step(f"{protocol} a read after it", lambda: client.get(text(7)))
        step(f"{protocol} a refused transaction", lambda: client.pipeline().set(text(7), "x").execute())
        step(f"{protocol} a pipeline with a refused write", lambda: partly_refused(client))


def partly_refused(client: Any) -> Any:
    """Write and read in one pipeline; errors are in the place of results."""
    with client.pipeline(transaction=False) as pipe:
        return pipe.set(text(7), "x").get(text(7)).execute(raise_on_error=False)


def pipeline(client: Any) -> Any:
    """Read all texts in one pipeline."""
    with client.pipeline(transaction=False) as pipe:
        for key in all_texts():
            pipe.get(key)
        return pipe.execute()


def reads(client: Any, protocol: str) -> None:
    step(f"{protocol} HGETALL", lambda: client.hgetall("job:map:flight"))
    step(f"{protocol} HSCAN", lambda: len(dict(client.hscan_iter("job:map:large"))))
    step(f"{protocol} LRANGE", lambda: client.lrange("job:list:alerts", 0, -1))
    step(f"{protocol} SMEMBERS", lambda: sorted(client.smembers("job:set:airports")))
    step(f"{protocol} ZRANGE", lambda: client.zrange("job:ranks:delays", 0, -1, withscores=True))
    step(f"{protocol} SCAN", lambda: sorted(set(client.scan_iter("job:text:1*", count=1_000))))
    step(f"{protocol} MULTI", lambda: client.pipeline().get(text(7)).hget("job:map:flight", "to").execute())


def changes(client: Any, protocol: str) -> None:
    """What a client notices when a state changes: a watched key, a notification."""
    tries: list[int] = []

    def read(pipe: Pipeline) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            ask("put", "job:text:watched", "2")
        pipe.multi()
        pipe.get("job:text:watched")

    ask("put", "job:text:watched", "1")
    step(f"{protocol} WATCH", lambda: [client.transaction(read, "job:text:watched"), tries])

    def notifications() -> list[Any]:
        messages = listen(client, "__keyspace@0__:job:text:live")
        ask("put", "job:text:live", "1")
        found = [next(messages)]
        ask("delete", "job:text:live")
        return [*found, next(messages)]

    step(f"{protocol} keyspace notifications", notifications)

    def reconnected() -> list[Any]:
        with redis.Redis(**address()) as other:
            return [other.client_kill_filter(_id=client.client_id()), client.get(text(7))]

    step(f"{protocol} after its connection was killed", reconnected)


def listen(client: Any, channel: str) -> Iterator[Any]:
    """Return the messages of a channel after the subscription is confirmed."""
    subscription = client.pubsub()
    subscription.subscribe(channel)
    assert subscription.get_message(timeout=WAIT_S_MAX)["type"] == "subscribe"
    return (each["data"] for each in subscription.listen())


def writes(client: Any, protocol: str) -> None:
    step(f"{protocol} SET, GET", lambda: [client.set("own:text", "a"), client.get("own:text")])
    step(
        f"{protocol} SET NX PX",
        lambda: (
            [client.set("own:lock", each, nx=True, px=60_000) for each in ("me", "you")] + [client.delete("own:lock")]
        ),
    )
    step(
        f"{protocol} hashes, lists, sets",
        lambda: [
            client.hset("own:map", mapping={"f": "v"}),
            client.hincrby("own:map", "n", 5),
            client.rpush("own:list", "a", "b"),
            client.blpop(["own:list"], timeout=1),
            client.sadd("own:set", "x", "y"),
            client.zadd("own:ranks", {"a": 1.5}),
        ],
    )
    step(f"{protocol} keys of both", lambda: client.mget("own:text", text(7), "none"))
    step(f"{protocol} MULTI of both", lambda: client.pipeline().incr("own:counter").get(text(7)).execute())
    step(f"{protocol} a lock", lambda: lock(client))
    step(f"{protocol} a script", lambda: client.register_script(SCRIPT)(keys=["own:text"], args=["d"]))
    step(f"{protocol} a stream", lambda: stream(client))

    def messages() -> list[Any]:
        found = listen(client, "own:channel")
        return [client.publish("own:channel", "hello"), next(found)]

    step(f"{protocol} messages", messages)
    keys = ("text", "map", "list", "set", "ranks", "counter", "stream")
    step(f"{protocol} DEL", lambda: client.delete(*(f"own:{each}" for each in keys)))


def lock(client: Any) -> list[Any]:
    """Hold redis-py's lock, which is scripts and SET NX, and try to get it a second time."""
    with client.lock("own:lock", timeout=60) as held:
        second = client.lock("own:lock", timeout=60, blocking_timeout=0)
        return [held.owned(), second.acquire(), held.extend(1)]


def stream(client: Any) -> list[Any]:
    return [
        client.xgroup_create("own:stream", "group", "0", mkstream=True),
        client.xadd("own:stream", {"f": "v"}, id="1-1"),
        client.xreadgroup("group", "me", {"own:stream": ">"}),
        client.xack("own:stream", "group", "1-1"),
    ]


def cluster() -> None:
    with RedisCluster(**address()) as client:
        expected = client.mget_nonatomic(all_texts())
        step("MGET of all slots", lambda: expected)
        step("a pipeline", lambda: pipeline(client))
        step("a map", lambda: client.hgetall("job:map:flight"))

        def after_the_end() -> Any:
            ask("kill", text(7))
            return until_equal(lambda: client.mget_nonatomic(all_texts()), expected)

        step("after a server's end", after_the_end)
        ask("put", "job:text:live", "2")
        step("a new value after it", lambda: until_equal(lambda: client.get("job:text:live"), "2"))


main()
