"""A standby registry: it waits until the registry of its log no longer replies, then takes over."""

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
from state_backend.model.errors import NewerFormatError, SparkisError

logger = logging.getLogger("sparkis.registry")

CHECK_EVERY_S = 0.25
ANSWER_S_MAX = 1.0
# A driver restarts a lost registry faster than this (measured: half a second, on a loaded machine 1.5 s).
ABSENT_S = 2.0

# Connects to an address; ClientError. The caller closes the client.
Connect = Callable[[str, int], Client]


async def wait_for_absence(filesystem: Filesystem, connect: Connect) -> None:
    """Wait until the registry that the log's record names has not answered for `ABSENT_S`."""
    clock = AwakeClock(ANSWER_S_MAX + CHECK_EVERY_S)
    answered_s = clock()
    while clock.tick() - answered_s < ABSENT_S:
        if await asyncio.to_thread(_answers, filesystem, connect):
            answered_s = clock.tick()
        await asyncio.sleep(CHECK_EVERY_S)


def _answers(filesystem: Filesystem, connect: Connect) -> bool:
    """Tell whether the log's registry replies. True if the log cannot be read, which makes a takeover impossible.

    NewerFormatError if a newer version's registry wrote the record.
    """
    try:
        record = read_record(filesystem)
    except NewerFormatError:
        raise
    except SparkisError as error:
        logger.debug("%s", error)
        return True
    if record is None:
        return False
    with suppress(ClientError), connect(*host_and_port(record.address)):
        return True  # the registry accepted the token
    return False
