"""The faults between hosts, and of hosts. Each begins one, and returns what ends it; the readers go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compat.waiting import eventually
from resp_server.programs.registry import FENCED_CODE
from tests.hosts.network import Host
from tests.hosts.world import World

End = Callable[[], object]
# Of the packets between two hosts, and the time that each takes at most.
LOSS, DELAY_MS, STORE_DELAY_MS = 0.02, 80, 300
# The server whose store has a disk of its own, and the disk's size. A store has some hundred kilobytes of rows. Loading
# slots from a log without a snapshot is a transaction for each epoch, 120 kB each, and no page is used twice before the
# next epoch releases a pinned one: after 300 epochs a store had 37 MB.
FULL, DISK_BYTES = 1, 256 << 20


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        is_selected: CI runs it.
        stops_writer: No epoch is committed until it ends.
        may_step_back: The log's storage is away: each connection may go back to an older epoch, once.
    """

    name: str
    begin: Callable[[World], End]
    is_selected: bool = False
    stops_writer: bool = False
    may_step_back: bool = False


def _nothing(world: World) -> End:
    return world.network.heal


def _master(world: World) -> Host:
    return world.network.hosts[world.masters()[0]]


def _others(world: World, host: Host) -> list[Host]:
    return [each for each in world.network.hosts.values() if each is not host]


def _cut_master(world: World) -> End:
    world.network.isolate(_master(world))
    return world.network.heal


def _cut_masters_packets(world: World) -> End:
    host = _master(world)
    for other in _others(world, host):
        world.network.cut(host, other, both_ways=False)
    return world.network.heal


def _cut_packets_to_master(world: World) -> End:
    host = _master(world)
    for other in _others(world, host):
        world.network.cut(other, host, both_ways=False)
    return world.network.heal


def _cut_master_from_proxy(world: World) -> End:
    world.network.cut(world.network.hosts["proxy0"], _master(world))
    return world.network.heal


def _half_open(world: World) -> End:
    """Kill a master while its host is cut off: nobody hears that its connections have ended."""
    host = _master(world)
    world.network.isolate(host)
    world.end(host.name)
    world.start_server(_number(host), disk=_disk(host), is_awaited=False)
    return world.network.heal


def _restart_master(world: World) -> End:
    host = _master(world)
    host.stop()

    def restart() -> None:
        world.start_again(host.name)
        world.start_server(_number(host), disk=_disk(host))

    return restart


def _number(host: Host) -> int:
    return int(host.name.removeprefix("server"))


def _disk(host: Host) -> int:
    return DISK_BYTES if _number(host) == FULL else 0


def _cut_registry(world: World) -> End:
    """Cut the registry off until the standby has taken over; then it ends, and stands by."""
    name = _registry(world)
    before = world.record.address()
    world.network.isolate(world.network.hosts[name])
    eventually(lambda: world.record.address() != before, awaited=world.output)

    def heal() -> None:
        world.network.heal()
        replaced = world.running[name]
        if "--standby" not in world.options_of[name]:
            assert replaced.popen.wait() == FENCED_CODE
            world.start_registry(name, "--standby")

    return heal


def _registry(world: World) -> str:
    address = world.record.address().partition(":")[0]
    return next(name for name, host in world.network.hosts.items() if host.address == address)


def _restart_registry(world: World) -> End:
    name = _registry(world)
    world.network.hosts[name].stop()

    def restart() -> None:
        world.start_again(name)
        world.start_registry(name, "--standby")

    return restart


def _cut_upstream(world: World) -> End:
    world.network.isolate(world.network.hosts["upstream"])
    return world.network.heal


def _restart_proxy(world: World) -> End:
    world.network.hosts["proxy0"].stop()

    def restart() -> None:
        world.start_again("proxy0")
        world.start_proxy(0, *world.upstream_options(0))

    return restart


def _delay(world: World) -> End:
    """Delay and lose packets between the proxies and the servers."""
    for proxy in ("proxy0", "proxy1"):
        for number in range(world.servers):
            hosts = world.network.hosts
            world.network.delay(hosts[proxy], hosts[f"server{number}"], delay_ms=DELAY_MS, loss=LOSS)
    return world.network.heal


def _split(world: World) -> End:
    """Split the hosts: the registry, half of the servers and one proxy cannot reach the others."""
    hosts = world.network.hosts
    half = {"registry", "proxy0", "upstream", "driver", "spark"} | {f"server{n}" for n in range(world.servers // 2)}
    for name in half & hosts.keys():
        for other in hosts.keys() - half - {"client"}:
            world.network.cut(hosts[name], hosts[other])
    return world.network.heal


def _fill_disk(world: World) -> End:
    host = world.network.hosts[f"server{FULL}"]
    filler = world.folder / f"store{FULL}" / "filler"
    host.run("sh", "-c", f"cat /dev/zero >{filler} 2>/dev/null || true")
    return lambda: host.run("rm", str(filler))


def _lose_log_of_master(world: World) -> End:
    host = _master(world)
    world.lose_log(host.name)
    return lambda: world.find_log(host.name)


def _lose_log(world: World) -> End:
    """Take the log away from all hosts; the writer's commit fails, and it is started again afterwards."""
    names = [name for name in world.network.hosts if name != "client"]
    world.lose_log(*names)

    def find() -> None:
        world.find_log(*names)
        world.end("driver")
        world.start_any_writer()

    return find


def _restart_driver(world: World) -> End:
    world.network.hosts["driver"].stop()

    def restart() -> None:
        world.start_again("driver")
        world.start_any_writer()

    return restart


def _users_of_store(world: World) -> list[Host]:
    """Return the hosts that use the log; the clients' host goes on reading it."""
    store = world.network.hosts["store"]
    return [host for host in _others(world, store) if host is not world.client]


def _cut_master_from_store(world: World) -> End:
    world.network.cut(world.network.hosts["store"], _master(world))
    return world.network.heal


def _cut_store(world: World) -> End:
    for host in _users_of_store(world):
        world.network.cut(world.network.hosts["store"], host)
    return world.network.heal


def _cut_store_until_commit_fails(world: World) -> End:
    _cut_store(world)
    eventually(lambda: world.running["driver"].popen.poll() is not None, awaited=world.output)

    def heal() -> None:
        world.network.heal()
        world.start_any_writer()

    return heal


def _delay_store(world: World) -> End:
    for host in _users_of_store(world):
        world.network.delay(world.network.hosts["store"], host, delay_ms=STORE_DELAY_MS, loss=LOSS)
    return world.network.heal


FAULTS = [
    Fault("nothing happens", _nothing),
    Fault("a master's host is cut off", _cut_master, is_selected=True),
    Fault("packets of a master's host are lost, those to it arrive", _cut_masters_packets, is_selected=True),
    Fault("packets to a master's host are lost, its own arrive", _cut_packets_to_master),
    Fault("a proxy cannot reach a master that others reach", _cut_master_from_proxy),
    Fault(
        "a master's connections are half open: it was killed while its host was cut off", _half_open, is_selected=True
    ),
    Fault("a master's host loses power, and comes back", _restart_master, is_selected=True),
    Fault("the registry's host is cut off, and comes back", _cut_registry),
    Fault("the registry's host loses power, and comes back", _restart_registry),
    Fault("the upstream's host is cut off", _cut_upstream),
    Fault("a proxy's host loses power, and comes back", _restart_proxy),
    Fault(f"packets between proxies and servers take up to {DELAY_MS} ms, 2 % are lost", _delay, is_selected=True),
    Fault("the network is split: half of the servers and a proxy on each side", _split),
    Fault("a server's disk is full", _fill_disk, is_selected=True),
    Fault("a master's host loses the log's folder", _lose_log_of_master),
    Fault("all hosts lose the log's folder", _lose_log, is_selected=True, stops_writer=True, may_step_back=True),
    Fault("the driver's host loses power, and comes back", _restart_driver, stops_writer=True),
]
# The log is in an object store on a host of its own.
STORE_FAULTS = [
    Fault("nothing happens", _nothing),
    Fault("a master's host cannot reach the store", _cut_master_from_store),
    Fault(f"packets to and from the store take up to {STORE_DELAY_MS} ms, 2 % are lost", _delay_store),
    Fault("nobody reaches the store for some seconds", _cut_store, stops_writer=True, may_step_back=True),
    Fault(
        "nobody reaches the store until the writer's commit fails",
        _cut_store_until_commit_fails,
        stops_writer=True,
        may_step_back=True,
    ),
    Fault("a master's host loses power, and comes back", _restart_master),
    Fault("the driver's host loses power, and comes back", _restart_driver, stops_writer=True),
]
