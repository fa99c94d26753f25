from __future__ import annotations

import asyncio

from resp_server.backends.retries import RetryPauses
from resp_server.raw_replies.answers import in_background


def test_pause_ends_early_when_proxy_stops_and_is_none_afterwards() -> None:
    async def found() -> list[bool]:
        pauses, found = RetryPauses(), []

        async def pause() -> None:
            found.append(await pauses.pause(3600))

        in_background(pause())
        assert not found
        pauses.stop()
        in_background(pause())
        return found

    assert asyncio.run(found()) == [False, False]


def test_pause_lasts_its_time() -> None:
    async def found() -> bool:
        done = asyncio.Event()

        async def pause() -> None:
            assert await RetryPauses().pause(0.001)
            done.set()

        in_background(pause())
        await done.wait()
        return done.is_set()

    assert asyncio.run(found())
