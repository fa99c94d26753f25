"""A registry that stands by: when the one of its log answers no more, it takes that one's place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from resp_server.net.addresses import host_and_port
from resp_server.net.awake import AwakeClock
from resp_server.net.client import Client, ClientError
from resp_server.registry.record import read_record
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.registry")

LOOK_EVERY_S = 0.25
ANSWER_S_MAX = 1.0
# A driver that starts its registry again has it back by then (measured: half a second, a loaded machine 1.5 s).
AWAY_S = 2.0

# Connects to an address; ClientError. What is connected is closed by its user.
Connect = Callable[[str, int], Client]


async def until_away(filesystem: Filesystem, connect: Connect) -> None:
    """Wait until no registry has answered for `AWAY_S`, where the log says that it is."""
    clock = AwakeClock(ANSWER_S_MAX + LOOK_EVERY_S)
    heard_s = clock()
    while clock.tick() - heard_s < AWAY_S:
        if await asyncio.to_thread(_is_there, filesystem, connect):
            heard_s = clock.tick()
        await asyncio.sleep(LOOK_EVERY_S)


def _is_there(filesystem: Filesystem, connect: Connect) -> bool:
    """Tell whether the log's registry answers; where the log cannot be read nobody's place can be taken."""
    try:
        record = read_record(filesystem)
    except SparkisError as error:
        logger.debug("%s", error)
        return True
    if record is None:
        return False
    with suppress(ClientError), connect(*host_and_port(record.address)):
        return True  # it has taken the token
    return False
