"""redis-py under load: `python redis_py.py PORT PREFIX KEYS`. All tasks share one asyncio client.

Each line of the input is a workload, the number of its tasks, and seconds; the reply to it is a line of JSON.
programs.py describes workloads and keys, which are the same for all clients.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

MANY_KEYS, PIPELINED_KEYS, FIELDS = 20, 100, 20
KEYS_OF_A_MAP = 10  # one map for so many keys


class Workloads:
    """Each workload sends one request, or one pipeline or transaction, and returns whether its reply is right."""

    def __init__(self, client: Redis, prefix: str, keys: int) -> None:
        self._client, self._prefix, self._keys = client, prefix, keys
        self._numbers = count()
        self._counter = f"{prefix}:counter"

    def named(self, name: str) -> Callable[[], Awaitable[bool]]:
        """Return a workload."""
        found: Callable[[], Awaitable[bool]] = getattr(self, name)
        return found

    async def counted(self) -> int:
        """Return the number of optimistic transactions so far."""
        return int(await self._client.get(self._counter) or 0)

    async def get(self) -> bool:
        number = self._next()
        return bool(await self._client.get(self._text(number)) == self._value(number))

    async def mget(self) -> bool:
        number = self._next()
        return self._are_values(await self._client.mget(self._texts(number, MANY_KEYS)), number, MANY_KEYS)

    async def hgetall(self) -> bool:
        number = self._next() // KEYS_OF_A_MAP
        found = await self._client.hgetall(f"{self._prefix}:map:{number}")
        return len(found) == FIELDS and found["field:7"] == f"{number}:7"

    async def pipeline(self) -> bool:
        number = self._next()
        async with self._client.pipeline(transaction=False) as pipeline:
            for key in self._texts(number, PIPELINED_KEYS):
                pipeline.get(key)
            return self._are_values(await pipeline.execute(), number, PIPELINED_KEYS)

    async def transaction(self) -> bool:
        number = self._next()
        async with self._client.pipeline(transaction=True) as pipeline:
            for key in self._texts(number, 2):
                pipeline.get(key)
            found = await pipeline.execute()
        return self._are_values(found, number, 2)

    async def set(self) -> bool:
        number = self._next()
        return bool(await self._client.set(f"{self._prefix}:written:{number}", self._value(number)))

    async def optimistic(self) -> bool:
        while not await self._increment():
            pass
        return True

    async def _increment(self) -> bool:
        """Add one to the counter; False if another client has changed it meanwhile."""
        async with self._client.pipeline() as pipeline:
            await pipeline.watch(self._counter)
            number = int(await pipeline.get(self._counter) or 0)
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.set(self._counter, number + 1)
            try:
                await pipeline.execute()
            except WatchError:
                return False
        return True

    def _next(self) -> int:
        return next(self._numbers) % self._keys

    def _text(self, number: int) -> str:
        return f"{self._prefix}:text:{number % self._keys}"

    def _texts(self, number: int, size: int) -> list[str]:
        return [self._text(each) for each in range(number, number + size)]

    def _value(self, number: int) -> str:
        return f"value:{number % self._keys}"

    def _are_values(self, found: Sequence[Any], number: int, size: int) -> bool:
        return found == [self._value(each) for each in range(number, number + size)]


async def measured(workloads: Workloads, name: str, tasks: int, seconds: float) -> dict[str, object]:
    """Run a workload. The counter of optimistic transactions must have grown by their number."""
    call, outcome = workloads.named(name), {"requests": 0, "errors": 0, "wrong": 0}
    errors: list[str] = []
    before = await workloads.counted() if name == "optimistic" else 0
    began_s = time.perf_counter()

    async def task() -> None:
        while True:
            outcome["requests"] += 1
            try:
                is_right = await call()
                outcome["wrong"] += not is_right
            except (RedisError, OSError) as error:
                outcome["errors"] += 1
                errors.append(f"{type(error).__name__}: {error}")
            if time.perf_counter() - began_s >= seconds:
                return

    await asyncio.gather(*(task() for _ in range(tasks)))
    took_s = time.perf_counter() - began_s
    if name == "optimistic" and await workloads.counted() - before != outcome["requests"] - outcome["errors"]:
        outcome["wrong"] += 1
    return {**outcome, "seconds": took_s, "error": errors[-1] if errors else ""}


async def main(port: str, prefix: str, keys: str) -> None:
    async with Redis(port=int(port), decode_responses=True) as client:
        workloads = Workloads(client, prefix, int(keys))
        for line in iter(sys.stdin.readline, ""):
            name, tasks, seconds = line.split()
            print(json.dumps(await measured(workloads, name, int(tasks), float(seconds))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
