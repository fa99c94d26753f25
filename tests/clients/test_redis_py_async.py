"""redis-py's asyncio client, with its default settings unless a test says otherwise, in RESP2 and RESP3."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ReadOnlyError

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running

Settings = dict[str, Any]


@pytest.fixture(params=[None, 2, 3], ids=["default", "RESP2", "RESP3"])
def settings(request: pytest.FixtureRequest) -> Settings:
    """The protocol version: as redis-py chooses it, or given."""
    return {} if request.param is None else {"protocol": request.param}


def run(port: int, settings: Settings, body: Callable[[redis.asyncio.Redis], Awaitable[None]]) -> None:
    """Run a coroutine function with a client."""

    async def with_client() -> None:
        async with redis.asyncio.Redis(port=port, **settings) as client:
            await body(client)

    asyncio.run(with_client())


def test_javascript_client_reads_every_kind(sparkis: Running, settings: Settings, dataset: Dataset) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        assert await client.mget(list(dataset.strings)) == list(dataset.strings.values())
        assert [await client.hgetall(key) for key in dataset.hashes] == list(dataset.hashes.values())
        assert [await client.lrange(key, 0, -1) for key in dataset.lists] == list(dataset.lists.values())
        assert (await client.get("missing"), await client.ttl("plain")) == (None, -1)

    run(sparkis.port, settings, body)


def test_scans_find_everything(sparkis: Running, settings: Settings, dataset: Dataset) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        assert sorted([key async for key in client.scan_iter()]) == sorted(dataset.keys)
        pairs = {field: value async for field, value in client.hscan_iter("hash:large")}
        assert pairs == dataset.hashes[b"hash:large"]

    run(sparkis.port, settings, body)


def test_pipeline_answers_in_order(sparkis: Running, settings: Settings) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        pipeline = client.pipeline(transaction=False)
        pipeline.get("plain").hgetall("hash:one").set("a", "b").get("empty")
        first, second, third, last = await pipeline.execute(raise_on_error=False)
        assert (first, second, last) == (b"value", {b"field": b"value"}, b"")
        assert isinstance(third, ReadOnlyError)

    run(sparkis.port, settings, body)


def test_many_tasks_share_pool(sparkis: Running, settings: Settings) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        values = await asyncio.gather(*(client.get(b"many:%03d" % number) for number in range(100)))
        assert values == [b"%d" % number for number in range(100)]

    run(sparkis.port, settings, body)


def test_names_health_checks_and_decoding_work_together(sparkis: Running, settings: Settings) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        assert await client.client_getname() == "a-name"
        await asyncio.sleep(0.02)  # longer than the health check's interval
        assert await client.get("utf8:schlüssel") == "žluťoučký kůň 🐎"
        assert (await client.info("server"))["redis_version"] == "7.4.0"

    given = {"client_name": "a-name", "health_check_interval": 0.01, "decode_responses": True}
    run(sparkis.port, settings | given, body)


def test_right_password_is_accepted(locked_sparkis: Running, settings: Settings) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        assert await client.get("plain") == b"value"

    run(locked_sparkis.port, settings | {"password": locked_sparkis.password}, body)
    with pytest.raises(AuthenticationError):
        run(locked_sparkis.port, settings | {"password": "wrong", "retry": Retry(NoBackoff(), 0)}, body)


def test_pool_connects_again_after_restart(restartable: Any, settings: Settings) -> None:
    async def body(client: redis.asyncio.Redis) -> None:
        assert await client.get("plain") == b"value"
        restartable.restart()
        assert await client.get("plain") == b"value"

    run(restartable.port, settings, body)
