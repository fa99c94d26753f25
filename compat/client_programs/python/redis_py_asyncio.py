"""redis-py's asyncio clients: tasks over a pool, pipelines, transactions, scripts, messages; the cluster client."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from compat.client_programs.python.steps import (
    PLACE,
    SCRIPT,
    WAIT_S_MAX,
    address,
    all_texts,
    ask,
    async_step,
    async_until_equal,
    text,
)

# Each opens a connection.
TASKS = 50


async def main() -> None:
    if PLACE == "cluster":
        await cluster()
        return
    for protocol in (2, 3):
        async with Redis(**address(), protocol=protocol) as client:
            await texts(client, f"RESP{protocol}")
            if PLACE == "tls":
                continue
            await changes(client, f"RESP{protocol}")
            if PLACE == "upstream":
                await writes(client, f"RESP{protocol}")


async def texts(client: Any, protocol: str) -> None:
    await async_step(f"{protocol} many tasks", lambda: tasks(client))
    await async_step(f"{protocol} MGET", lambda: client.mget(text(1), "job:text:none", text(299)))
    await async_step(f"{protocol} a pipeline", lambda: pipeline(client))
    await async_step(f"{protocol} WRONGTYPE", lambda: client.hgetall(text(7)))
    await async_step(f"{protocol} a key of others", lambda: client.hlen("job:map:flight"))
    if PLACE != "upstream":
        await async_step(f"{protocol} a refused write", lambda: client.set(text(7), "x"))
        await async_step(f"{protocol} a read after it", lambda: client.get(text(7)))


async def tasks(client: Any) -> list[Any]:
    return await asyncio.gather(*(client.get(text(number)) for number in range(TASKS)))


async def pipeline(client: Any) -> Any:
    """Read all texts in one pipeline."""
    async with client.pipeline(transaction=False) as pipe:
        for key in all_texts():
            pipe.get(key)
        return await pipe.execute()


async def changes(client: Any, protocol: str) -> None:
    """What a client notices when a state changes: a watched key, a notification."""
    await async_step(f"{protocol} HSCAN", lambda: fields(client))
    await async_step(f"{protocol} MULTI", lambda: client.pipeline().get(text(7)).hget("job:map:flight", "to").execute())
    await async_step(f"{protocol} WATCH", lambda: watched(client))
    await async_step(f"{protocol} keyspace notifications", lambda: notifications(client))
    await async_step(f"{protocol} after its connection was killed", lambda: reconnected(client))


async def fields(client: Any) -> int:
    return len({field async for field, _ in client.hscan_iter("job:map:large")})


async def watched(client: Any) -> list[Any]:
    tries: list[int] = []

    async def read(pipe: Any) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            ask("put", "job:text:watched", "2")
        pipe.multi()
        pipe.get("job:text:watched")

    ask("put", "job:text:watched", "1")
    return [await client.transaction(read, "job:text:watched"), tries]


async def notifications(client: Any) -> list[Any]:
    async with client.pubsub() as subscription:
        await listen(subscription, "__keyspace@0__:job:text:live")
        ask("put", "job:text:live", "1")
        found = [await message(subscription)]
        ask("delete", "job:text:live")
        return [*found, await message(subscription)]


async def listen(subscription: Any, channel: str) -> None:
    await subscription.subscribe(channel)
    assert (await subscription.get_message(timeout=WAIT_S_MAX))["type"] == "subscribe"


async def message(subscription: Any) -> Any:
    return (await subscription.get_message(timeout=WAIT_S_MAX))["data"]


async def reconnected(client: Any) -> list[Any]:
    async with Redis(**address()) as other, client.client() as own:
        return [await other.client_kill_filter(_id=await own.client_id()), await own.get(text(7))]


async def writes(client: Any, protocol: str) -> None:
    await async_step(f"{protocol} SET NX PX", lambda: client.set("own:text", "a", nx=True, px=60_000))
    await async_step(f"{protocol} BLPOP, which waits", lambda: queue(client))
    await async_step(f"{protocol} keys of both", lambda: client.mget("own:text", text(7), "none"))
    await async_step(f"{protocol} MULTI of both", lambda: client.pipeline().incr("own:counter").get(text(7)).execute())
    await async_step(f"{protocol} a script", lambda: client.register_script(SCRIPT)(keys=["own:text"], args=["d"]))
    await async_step(f"{protocol} messages", lambda: messages(client))
    await async_step(f"{protocol} DEL", lambda: client.delete("own:text", "own:counter"))


async def queue(client: Any) -> Any:
    """Wait for a key of a list that another task writes."""
    waiting = asyncio.create_task(client.blpop(["own:queue"], timeout=60))
    while not (await client.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0.01)
    return [await client.rpush("own:queue", "job"), await waiting]


async def messages(client: Any) -> list[Any]:
    async with client.pubsub() as subscription:
        await listen(subscription, "own:channel")
        return [await client.publish("own:channel", "hello"), await message(subscription)]


async def cluster() -> None:
    async with RedisCluster(**address()) as client:
        expected = await client.mget_nonatomic(all_texts())
        await async_step("MGET of all slots", lambda: client.mget_nonatomic(all_texts()))
        await async_step("many tasks", lambda: tasks(client))
        await async_step("a pipeline", lambda: pipeline(client))
        await async_step("a map", lambda: client.hgetall("job:map:flight"))
        ask("kill", text(7))
        await async_step(
            "after a server's end", lambda: async_until_equal(lambda: client.mget_nonatomic(all_texts()), expected)
        )
        ask("put", "job:text:live", "2")
        await async_step("a new value after it", lambda: async_until_equal(lambda: client.get("job:text:live"), "2"))


asyncio.run(main())
