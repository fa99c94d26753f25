"""Defects that were found on hosts of their own, each as its smallest case: what failed there, and must not again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos.judge import JOB
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from tests.hosts.network import Network
from tests.hosts.two_keys import (
    HIGH,
    LOW,
    NAMES,
    PATIENT,
    PATIENT_CLIENT_S,
    epoch_of,
    epochs_in_transaction,
    is_error,
    owner_of,
    wait_for_epoch,
)
from tests.hosts.world import REGISTRY_PORT, World
from tests.hosts.writer import STATES, changes

# A host that does not belong to the cluster.
FOREIGN = 9


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A registry, a writer that waits, and two servers with half of the slots each."""
    folder = tmp_path_factory.mktemp("world")
    with Network(folder) as network:
        made = World(folder, network, servers=2)
        made.start_registry()
        made.start_writer()
        made.tell_writer("one")
        for number in range(made.servers):
            made.start_server(number)
        made.wait_until_complete()
        with made.client.network():
            yield made


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The world that all tests share, complete; each test has a proxy of its own."""
    shared.wait_until_complete()
    yield shared
    shared.network.heal()
    shared.end("proxy0")


def test_host_with_another_log_gets_no_slots_and_answers_no_read(world: World) -> None:
    other = world.folder / "other"
    with LogWriter(other, JOB, STATES) as writer:
        writer.publish(changes(1000))
    world.start_proxy(0)
    with world.connect() as client:
        wait_for_epoch(client, world.tell_writer("one")["epoch"])
        foreign = f"server{FOREIGN}"
        world.host(foreign).mount(world.log, shared=other)
        registry = world.network.hosts["registry"].address
        world.start_server(FOREIGN, "--registry", f"{registry}:{REGISTRY_PORT}")
        eventually(lambda: "refuses this server" in world.running[foreign].output, awaited=world.output)
        newest = world.tell_writer("one")["epoch"]
        wait_for_epoch(client, newest)
        assert {epoch_of(client.get(name), name) for name in NAMES} == {newest}
        assert foreign not in world.masters()
    world.end(foreign)


def test_shards_at_different_epochs_answer_while_storage_is_unreachable(
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
        eventually(lambda: epoch_of(other.get(HIGH), HIGH), lambda epoch: epoch == after, world.output)
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


def test_host_that_drops_packets_leaves_keys_of_other_hosts_readable(world: World) -> None:
    away, here = owner_of(world, HIGH), owner_of(world, LOW)
    assert away != here
    # Nothing moves to the other host: the registry does not see that this one is away from the proxy.
    world.start_proxy(0, "--log", world.root, "--server-timeout", "1000")
    with world.connect() as client:
        wait_for_epoch(client, 0)
        world.network.cut(world.host("proxy0"), world.network.hosts[away])
        eventually(lambda: is_error(client, HIGH), awaited="its time-out")
        for _ in range(20):
            assert epoch_of(client.get(LOW), LOW) >= 0
            assert is_error(client, HIGH)
        world.network.heal()
        wait_for_epoch(client, 0)


def test_transactions_over_two_shards_succeed_without_registry_and_announcements(
    world: World,
) -> None:
    world.start_proxy(0, "--log", world.root, *PATIENT)
    with world.connect(timeout_s=PATIENT_CLIENT_S) as client:
        wait_for_epoch(client, 0)
        world.network.isolate(world.network.hosts["registry"])
        world.tell_writer("go")
        newest, after = -1, world.record.committed() + 20
        while newest < after:
            epochs = epochs_in_transaction(client)  # an error is a failure of the test
            assert len({*epochs}) == 1
            assert epochs[0] >= newest
            newest = epochs[0]


def test_proxy_that_knows_only_registry_comes_back_after_half_open_connection_to_it(world: World) -> None:
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
        eventually(lambda: {*world.masters()} == {"server2", "server3"}, awaited=world.output)
        newest = world.tell_writer("one")["epoch"]
        world.network.heal()
        wait_for_epoch(client, newest)
