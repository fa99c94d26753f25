"""Defects that were found on hosts of their own, each as its smallest case: what failed there, and must not again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from benchmarks.chaos.judge import GROUPS, JOB, key, text
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.slots import slot_of
from tests.hosts.network import Network
from tests.hosts.world import REGISTRY_PORT, World
from tests.hosts.writer import STATES, changes

# Requests that wait for it fail at its end; a busy machine takes less for all else.
PATIENT = ("--server-timeout", "60000")
NAMES = sorted((key(group, "a") for group in range(GROUPS)), key=slot_of)
# In the first half of the slots, and in the second one.
LOW, HIGH = NAMES[0], NAMES[-1]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A registry, a writer that waits, and two servers with half of the slots each."""
    with made(tmp_path, replicas=0) as world:
        yield world


@contextmanager
def made(folder: Path, *, replicas: int) -> Iterator[World]:
    with Network(folder) as network:
        world = World(folder, network, servers=2, replicas=replicas)
        world.start_registry()
        world.start_writer()
        world.tell_writer("one")
        for number in range(world.servers):
            world.start_server(number)
        world.wait_until_complete()
        with world.client.network():
            yield world


def epoch_of(reply: object, name: bytes) -> int:
    """Return the epoch of a value, which must be the key's."""
    assert isinstance(reply, bytes), reply
    epoch = int(reply.split(b" ")[0])
    assert reply == text(epoch, name)
    return epoch


def epochs_in_transaction(client: redis.Redis) -> list[int]:
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
    """Return the host of a key's server."""
    slot = slot_of(name)
    hosts = {host.address: host.name for host in world.network.hosts.values()}
    for address, slots in world.record.owners().items():
        for part in slots.split(","):
            first, _, last = part.partition("-")
            if int(first) <= slot <= int(last or first):
                return hosts[address.partition(":")[0]]
    raise AssertionError(f"nobody owns {name!r}")


def test_a_host_that_mounts_another_log_gets_no_slots_and_no_read_is_of_that_log(world: World) -> None:
    other = world.folder / "other"
    with LogWriter(other, JOB, STATES) as writer:
        writer.publish(changes(1000))
    world.start_proxy(0)
    with world.connect() as client:
        wait_for_epoch(client, world.tell_writer("one")["epoch"])
        world.host("server2").mount(world.log, shared=other)
        registry = world.network.hosts["registry"].address
        world.start_server(2, "--registry", f"{registry}:{REGISTRY_PORT}")
        eventually(lambda: "refuses this server" in world.running["server2"].said, awaited=world.said)
        newest = world.tell_writer("one")["epoch"]
        wait_for_epoch(client, newest)
        assert {epoch_of(client.get(name), name) for name in NAMES} == {newest}
        assert "server2" not in world.masters()


def test_stale_keys_of_two_shards_are_read_when_the_storage_is_away_and_they_stopped_an_epoch_apart(
    world: World,
) -> None:
    world.start_proxy(0)
    names = ["registry", "proxy0", "server0", "server1"]
    with world.connect() as client, world.connect() as other:
        before = world.tell_writer("one")["epoch"]
        wait_for_epoch(client, before)
        behind, ahead = owner_of(world, LOW), owner_of(world, HIGH)
        world.lose_log(behind)
        after = world.tell_writer("one")["epoch"]
        # This client has seen the newer epoch, which one shard has alone.
        eventually(lambda: epoch_of(other.get(HIGH), HIGH), lambda epoch: epoch == after, world.said)
        world.lose_log(*{*names} - {behind})
        for each in (other, client):
            wait_for_epoch(each, before)
            assert epochs_in_transaction(each) == [before, before]
            assert [epoch_of(each.get(name), name) for name in (LOW, HIGH)] == [before, before]
            found = each.mget([LOW, HIGH])
            assert [epoch_of(reply, name) for reply, name in zip(found, (LOW, HIGH), strict=True)] == [before, before]
        world.find_log(*names)
        wait_for_epoch(client, after)
        assert {behind, ahead} == {"server0", "server1"}


def test_reads_in_flight_at_a_master_that_is_cut_off_are_answered_by_the_replica(tmp_path: Path) -> None:
    with made(tmp_path, replicas=1) as world:
        world.start_proxy(0, "--log", str(world.log), *PATIENT)
        world.tell_writer("go")
        with world.connect(timeout_s=300) as client:
            wait_for_epoch(client, 2)
            for _ in range(3):
                world.network.isolate(world.network.hosts[world.masters()[0]])
                seen = epoch_of(client.get(LOW), LOW)
                assert min(epochs_in_transaction(client)) >= seen
                world.network.heal()
                world.wait_until_complete()
                wait_for_epoch(client, world.record.committed())


def test_a_proxy_that_knows_only_a_registry_comes_back_after_a_half_open_connection_to_it(world: World) -> None:
    registry = world.network.hosts["registry"]
    world.start_proxy(0, "--registry", f"{registry.address}:{REGISTRY_PORT}")
    with world.connect() as client:
        wait_for_epoch(client, 0)
        # The proxy never hears that its connection has ended; meanwhile all servers are replaced.
        world.network.cut(registry, world.network.hosts["proxy0"])
        world.end("registry")
        world.start_registry()
        for name in ("server0", "server1"):
            world.network.hosts[name].stop()
        for number in (2, 3):
            world.start_server(number)
        eventually(lambda: {*world.masters()} == {"server2", "server3"}, awaited=world.said)
        newest = world.tell_writer("one")["epoch"]
        world.network.heal()
        wait_for_epoch(client, newest)


def test_a_host_that_drops_packets_costs_keys_of_other_hosts_nothing(world: World) -> None:
    away, here = owner_of(world, HIGH), owner_of(world, LOW)
    assert away != here
    # Nothing moves to the other host: the registry does not see that this one is away from the proxy.
    world.start_proxy(0, "--log", str(world.log), "--server-timeout", "1000")
    with world.connect() as client:
        wait_for_epoch(client, 0)
        world.network.cut(world.host("proxy0"), world.network.hosts[away])
        eventually(lambda: is_error(client, HIGH), awaited="its time-out")
        failed = answered = 0
        while failed < 20:
            assert epoch_of(client.get(LOW), LOW) >= 0
            answered += 1
            failed += is_error(client, HIGH)
        assert answered == failed
        world.network.heal()
        wait_for_epoch(client, 0)


def is_error(client: redis.Redis, name: bytes) -> bool:
    try:
        epoch_of(client.get(name), name)
    except redis.ResponseError:
        return True
    return False


def test_transactions_over_two_shards_do_not_fail_while_the_registry_is_away_and_nothing_is_announced(
    world: World,
) -> None:
    world.start_proxy(0, "--log", str(world.log), *PATIENT)
    with world.connect(timeout_s=300) as client:
        wait_for_epoch(client, 0)
        world.network.isolate(world.network.hosts["registry"])
        world.tell_writer("go")
        newest, after = -1, world.record.committed() + 20
        while newest < after:
            epochs = epochs_in_transaction(client)  # an error is a failure of the test
            assert len({*epochs}) == 1
            assert epochs[0] >= newest
            newest = epochs[0]
