"""A standby registry: it waits until the registry of its log no longer replies, then takes over.

The record `registry.json` of another log, such as a leftover, may have the address of a registry that runs now. The
standby would take over with that log. So it compares the identity of its log with that of the registry's log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from resp_server.net.addresses import host_and_port
from resp_server.net.client import Client, ClientError
from resp_server.net.transports import AwakeClock
from resp_server.registry.registry_file import RegistryFile, read_registry_file
from state_backend.log.filesystems import Filesystem
from state_backend.log.identity import identity_of
from state_backend.model.errors import NewerFormatError, SparkisError

logger = logging.getLogger("sparkis.registry")

CHECK_EVERY_S = 0.25
ANSWER_S_MAX = 1.0
# A driver restarts a lost registry faster than this (measured: half a second, on a loaded machine 1.5 s).
ABSENT_S = 2.0


class OtherLogError(SparkisError):
    """The registry that the record of a standby's log names has another log."""


# Connects to an address; ClientError. The caller closes the client.
Connect = Callable[[str, int], Client]


async def wait_for_absence(filesystem: Filesystem, connect: Connect) -> None:
    """Wait until the registry that the log's record names has not answered for `ABSENT_S`.

    OtherLogError if it answers, and is the registry of another log.
    """
    clock = AwakeClock(ANSWER_S_MAX + CHECK_EVERY_S)
    answered_s = clock()
    compared: set[tuple[str, int]] = set()
    while clock.tick() - answered_s < ABSENT_S:
        if await asyncio.to_thread(_answers, filesystem, connect, compared):
            answered_s = clock.tick()
        await asyncio.sleep(CHECK_EVERY_S)


def _answers(filesystem: Filesystem, connect: Connect, compared: set[tuple[str, int]]) -> bool:
    """Return whether the log's registry replies. True if the log cannot be read, which makes a takeover impossible.

    NewerFormatError if a newer version's registry wrote the record, OtherLogError.

    Args:
        compared: The addresses and terms of the registries whose logs were compared.
    """
    try:
        record = read_registry_file(filesystem)
    except NewerFormatError:
        raise
    except SparkisError as error:
        logger.debug("%s", error)
        return True
    if record is None:
        return False
    with suppress(ClientError), connect(*host_and_port(record.address)) as registry:  # it accepted the token
        if (record.address, record.term) not in compared:
            _compare_logs(filesystem, record, registry)
            compared.add((record.address, record.term))
        return True
    return False


def _compare_logs(filesystem: Filesystem, record: RegistryFile, registry: Client) -> None:
    """Raise OtherLogError if a registry has a log of another identity. A registry of an older version does not tell."""
    own = theirs = root = ""
    with suppress(SparkisError):
        own = identity_of(filesystem) or ""
        root, theirs = registry.call("LOG")
    if own and theirs and own != theirs:
        raise OtherLogError(
            f"the registry at {record.address}, which {filesystem.root}/registry.json names, has the log {root} with "
            f"the identity {theirs}; this standby's log {filesystem.root} has {own}: give the standby the registry's "
            f"log with --log, or end it"
        )
