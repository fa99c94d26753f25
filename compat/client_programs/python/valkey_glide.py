"""valkey-glide: one connection for many tasks in both protocols, batches, scripts, messages; the cluster client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import glide

from compat.client_programs.python.steps import (
    PLACE,
    SCRIPT,
    address,
    all_texts,
    ask,
    async_step,
    async_until_equal,
    text,
)

# Longer than any wait on a busy machine; it ends a hang. The client's own default is 250 ms.
REQUEST_MS_MAX = 120_000


async def main() -> None:
    glide.Logger.set_logger_config(glide.LogLevel.OFF)
    if PLACE == "cluster":
        await cluster()
        return
    for protocol in (glide.ProtocolVersion.RESP2, glide.ProtocolVersion.RESP3):
        client = await glide.GlideClient.create(settings(glide.GlideClientConfiguration, protocol=protocol))
        await texts(client, protocol.name)
        if PLACE != "tls":
            await reads(client, protocol.name)
        if PLACE == "upstream":
            await writes(client, protocol.name)
        await client.close()
    if PLACE != "tls":
        await notifications()
    if PLACE == "upstream":
        await messages()
        await step("the cluster client, where there is no cluster", cluster_client)
    client = await glide.GlideClient.create(settings(glide.GlideClientConfiguration))
    name = "a write of a state's key" if PLACE == "upstream" else "a refused write"
    await step(name, lambda: client.set(text(7), "x"))
    await step("a read after it", lambda: client.get(text(7)))
    await client.close()


def settings(kind: Callable[..., Any], **others: Any) -> Any:
    """Return the configuration of a client of the address."""
    at = address()
    given: dict[str, Any] = {"request_timeout": REQUEST_MS_MAX}
    if PLACE in ("server", "tls"):
        given["read_only"] = True  # without it the client refuses a server that is a replica, as the real one is
    if PLACE == "tls":
        authority = glide.TlsAdvancedConfiguration(root_pem_cacerts=Path(at["ssl_ca_certs"]).read_bytes())
        given["use_tls"] = True
        given["credentials"] = glide.ServerCredentials(username=at["username"], password=at["password"])
        given["advanced_config"] = glide.AdvancedGlideClientConfiguration(tls_config=authority)
    return kind([glide.NodeAddress(at["host"], at["port"])], **{**given, **others})


async def cluster_client(**others: Any) -> Any:
    given = {
        "advanced_config": glide.AdvancedGlideClusterClientConfiguration(connection_timeout=REQUEST_MS_MAX),
        **others,
    }
    return await glide.GlideClusterClient.create(settings(glide.GlideClusterClientConfiguration, **given))


async def step(name: str, body: Callable[[], Any]) -> None:
    await async_step(name, body, glide.GlideError)


async def texts(client: Any, protocol: str) -> None:
    await step(f"{protocol} many tasks", lambda: tasks(client))
    await step(f"{protocol} a missing key", lambda: client.get("job:text:none"))
    await step(f"{protocol} MGET", lambda: client.mget([text(1), "job:text:none", text(299)]))
    await step(f"{protocol} a batch", lambda: batch(client, glide.Batch(is_atomic=False)))
    await step(f"{protocol} WRONGTYPE", lambda: client.hgetall(text(7)))
    await step(f"{protocol} a key of others", lambda: client.hlen("job:map:flight"))
    await step(f"{protocol} MULTI", lambda: batch(client, glide.Batch(is_atomic=True)))


async def reads(client: Any, protocol: str) -> None:
    await step(f"{protocol} HGETALL", lambda: client.hgetall("job:map:flight"))
    await step(f"{protocol} LRANGE", lambda: client.lrange("job:list:alerts", 0, -1))
    ranks = glide.RangeByIndex(0, -1)
    await step(f"{protocol} ZRANGE", lambda: client.zrange_withscores("job:ranks:delays", ranks))


async def tasks(client: Any) -> list[Any]:
    return await asyncio.gather(*map(client.get, all_texts()))


async def batch(client: Any, requests: Any) -> Any:
    """Read all texts in one pipeline or transaction."""
    for key in all_texts():
        requests.get(key)
    return await client.exec(requests, raise_on_error=True)


async def writes(client: Any, protocol: str) -> None:
    new = glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
    await step(f"{protocol} SET NX", lambda: client.set("own:lock", "me", new))
    await step(f"{protocol} SET NX again", lambda: client.set("own:lock", "you", new))
    await step(f"{protocol} RPUSH", lambda: client.rpush("own:list", ["a", "b"]))
    await step(f"{protocol} BLPOP", lambda: client.blpop(["own:list"], 1.0))
    await step(f"{protocol} keys of both", lambda: client.mget(["own:lock", text(7), "none"]))
    both = glide.Batch(is_atomic=True).incr("own:counter").get(text(7))
    await step(f"{protocol} MULTI of both", lambda: client.exec(both, raise_on_error=True))
    script = glide.Script(SCRIPT)
    await step(f"{protocol} a script", lambda: client.invoke_script(script, keys=["own:text"], args=["d"]))
    await step(f"{protocol} DEL", lambda: client.delete(["own:lock", "own:list", "own:counter", "own:text"]))


async def notifications() -> None:
    listening = await subscriber("__keyspace@0__:job:text:live")
    ask("put", "job:text:live", "1")
    await step("a notification", listening.get_pubsub_message)
    ask("delete", "job:text:live")
    await step("another", listening.get_pubsub_message)
    await listening.close()


async def messages() -> None:
    listening = await subscriber("own:channel")
    client = await glide.GlideClient.create(settings(glide.GlideClientConfiguration))
    await step("PUBLISH", lambda: client.publish("hello", "own:channel"))
    await step("a message", listening.get_pubsub_message)
    await client.close()
    await listening.close()


async def subscriber(channel: str) -> Any:
    """Return a client that has subscribed; subscriptions need RESP3."""
    kind = glide.GlideClientConfiguration
    exact = {kind.PubSubChannelModes.Exact: {channel}}
    subscriptions = kind.PubSubSubscriptions(exact, callback=None, context=None)
    return await glide.GlideClient.create(settings(kind, pubsub_subscriptions=subscriptions))


async def cluster() -> None:
    client = await cluster_client()
    expected = await tasks(client)
    await step("all texts", lambda: tasks(client))
    await step("MGET of all slots", lambda: client.mget(all_texts()))
    await step("a batch", lambda: batch(client, glide.ClusterBatch(is_atomic=False)))
    await step("a map", lambda: client.hgetall("job:map:flight"))
    # The default of 250 ms: after READONLY the client tries again until it has passed.
    hasty = await cluster_client(request_timeout=None)
    await step("a write", lambda: hasty.set("own:text", "x"))
    await step("a read after it", lambda: hasty.get(text(7)))

    def until(find: Callable[[], Any], expected: Any) -> Any:
        return async_until_equal(find, expected, glide.GlideError)

    ask("kill", text(7))
    await step("after a server's end", lambda: until(lambda: client.mget(all_texts()), expected))
    ask("put", "job:text:live", "2")
    await step("a new value after it", lambda: until(lambda: client.get("job:text:live"), b"2"))


asyncio.run(main())
