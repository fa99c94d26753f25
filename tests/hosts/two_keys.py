"""Reads of two keys of different shards, whose values name their epochs."""

from __future__ import annotations

from contextlib import suppress

import redis

from benchmarks.chaos.judge import GROUPS, key, text
from compat.waiting import eventually
from state_backend.model.slots import slot_of
from tests.hosts.world import World

# Requests that wait for it fail at its end; a busy machine takes less for all else.
PATIENT = ("--server-timeout", "60000")
PATIENT_CLIENT_S = 300.0
NAMES = sorted((key(group, "a") for group in range(GROUPS)), key=slot_of)
# In the first part of the slots, and in the last one.
LOW, HIGH = NAMES[0], NAMES[-1]


def epoch_of(reply: object, name: bytes) -> int:
    """Return the epoch of a value, which must be the key's."""
    assert isinstance(reply, bytes), reply
    epoch = int(reply.split(b" ")[0])
    assert reply == text(epoch, name)
    return epoch


def epochs_in_transaction(client: redis.Redis) -> list[int]:
    """Read both keys in a transaction; return their epochs."""
    pipe = client.pipeline(transaction=True)
    pipe.get(LOW)
    pipe.get(HIGH)
    return [epoch_of(reply, name) for reply, name in zip(pipe.execute(), (LOW, HIGH), strict=True)]


def wait_for_epoch(client: redis.Redis, epoch: int) -> None:
    """Wait until both keys are read at an epoch or a later one."""

    def is_there() -> bool:
        with suppress(redis.RedisError):
            return min(epochs_in_transaction(client)) >= epoch
        return False

    eventually(is_there, awaited=f"epoch {epoch}")


def owner_of(world: World, name: bytes) -> str:
    """Return the host of a key's master."""
    slot = slot_of(name)
    hosts = {host.address: host.name for host in world.network.hosts.values()}
    for address, slots in world.record.owners().items():
        for part in slots.split(","):
            first, _, last = part.partition("-")
            if int(first) <= slot <= int(last or first):
                return hosts[address.partition(":")[0]]
    raise AssertionError(f"nobody owns {name!r}")


def is_error(client: redis.Redis, name: bytes) -> bool:
    """Return whether the reply to a read of a key is an error."""
    try:
        epoch_of(client.get(name), name)
    except redis.ResponseError:
        return True
    return False
