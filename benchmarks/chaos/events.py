"""The events of a chaos run. Each one leaves the fleet complete; replies are checked by `judge`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.chaos.fleet import START_S_MAX, ChaosError, Fleet
from benchmarks.chaos.relay import Relay
from compat.waiting import eventually

PAUSED_S = 10.0
# A file size limit that any store exceeds with its next epoch.
FULL_BYTES = 16 << 10
CUTS = 20


@dataclass(frozen=True)
class Event:
    """One event. seen_s: its duration before it is undone.

    needs_leader: the event needs a master that was started by hand.
    """

    name: str
    act: Callable[[Fleet, Relay], Callable[[], None] | None]
    seen_s: float = 6.0
    needs_leader: bool = False


def ensure_manual_master(fleet: Fleet) -> None:
    """Make a server that was started by hand a master, by killing its shard's master beside an executor."""
    while not fleet.masters(by_hand=True):
        os.kill(fleet.masters(by_hand=False)[0], signal.SIGKILL)
        eventually(
            lambda: fleet.record.online() < fleet.record.topology_size(),
            awaited="the loss of a server is noticed",
            timeout_s=START_S_MAX,
            error=ChaosError,
        )
        eventually(
            lambda: fleet.record.online() == fleet.record.topology_size(),
            awaited="the return of the server",
            timeout_s=START_S_MAX,
            error=ChaosError,
        )


def _do_nothing(fleet: Fleet, relay: Relay) -> None:
    pass


def _kill_server(fleet: Fleet, relay: Relay) -> None:
    os.kill(fleet.masters(by_hand=False)[0], signal.SIGKILL)


def _kill_server_of_hand(fleet: Fleet, relay: Relay) -> Callable[[], None]:
    """Kill a server that was started by hand; it is started again only when the event is over."""
    pid = fleet.masters(by_hand=True)[0]
    os.kill(pid, signal.SIGKILL)
    name = next(name for name, each in fleet.servers.items() if each.pid == pid)

    def restart() -> None:
        port = relay.port if name == "relayed" else None
        started = fleet.start_server(name, advertise=port)
        if port is not None:
            relay.route_to("127.0.0.1", started.port)

    return restart


def _kill_executor(fleet: Fleet, relay: Relay) -> None:
    os.kill(fleet.executors()[0], signal.SIGKILL)


def _lose_executor(fleet: Fleet, relay: Relay) -> Callable[[], None]:
    fleet.command_driver("lose")

    def gain() -> None:
        eventually(
            lambda: bool(fleet.command_driver("gain")["done"]),
            awaited="another executor",
            timeout_s=START_S_MAX,
            error=ChaosError,
        )

    return gain


def _kill_proxy(fleet: Fleet, relay: Relay) -> Callable[[], None]:
    os.kill(fleet.proxies[0].pid, signal.SIGKILL)
    return lambda: fleet.restart_proxy(0)


def _kill_registry(fleet: Fleet, relay: Relay) -> None:
    os.kill(fleet.registry(), signal.SIGKILL)


def _kill_driver(fleet: Fleet, relay: Relay) -> Callable[[], None]:
    assert fleet.driver is not None
    os.kill(fleet.driver.pid, signal.SIGKILL)
    fleet.driver.process.wait()
    return fleet.start_driver


def _pause_server(fleet: Fleet, relay: Relay) -> None:
    pid = fleet.masters(by_hand=True)[0]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSED_S)
    os.kill(pid, signal.SIGCONT)


def _add_server(fleet: Fleet, relay: Relay) -> None:
    fleet.start_server("added")


def _move_all(fleet: Fleet, relay: Relay) -> Callable[[], None]:
    """Move every slot to another owner: the owners leave one after another; those started by hand return later."""
    before = set(fleet.record.owners())
    fleet.start_server("mover")
    names = []
    for name in [name for name in fleet.servers if name != "mover"]:
        ended = fleet.servers[name]
        os.kill(ended.pid, signal.SIGTERM)
        ended.process.wait()
        names.append(name)
    eventually(
        lambda: set(fleet.record.owners()) != before,
        awaited="moving the slots",
        timeout_s=START_S_MAX,
        error=ChaosError,
    )

    def restart() -> None:
        for name in names:
            started = fleet.start_server(name, advertise=relay.port if name == "relayed" else None)
            if name == "relayed":
                relay.route_to("127.0.0.1", started.port)

    return restart


def _cut_replies(fleet: Fleet, relay: Relay) -> None:
    relay.cut(CUTS)
    eventually(
        lambda: relay.made_cuts >= CUTS or not _is_read(fleet, relay),
        awaited="cutting replies",
        timeout_s=START_S_MAX,
        error=ChaosError,
    )


def _is_read(fleet: Fleet, relay: Relay) -> bool:
    return f"127.0.0.1:{relay.port}" in fleet.record.owners()


def _fill_disk(fleet: Fleet, relay: Relay) -> Callable[[], None]:
    pid = fleet.masters(by_hand=True)[0]
    fleet.limit_files(pid, FULL_BYTES)
    return lambda: fleet.limit_files(pid, None)


EVENTS = [
    Event("nothing happens", _do_nothing, 10.0),
    Event("kill -9 a state server beside an executor", _kill_server, 10.0),
    Event("kill -9 a state server that nobody starts again", _kill_server_of_hand, 10.0, needs_leader=True),
    Event("kill -9 an executor", _kill_executor, 15.0),
    Event("an executor is given back, and another one comes", _lose_executor, 15.0),
    Event("kill -9 a proxy", _kill_proxy),
    Event("kill -9 the registry", _kill_registry),
    Event(f"SIGSTOP a state server for {PAUSED_S:g} s", _pause_server, needs_leader=True),
    Event("add a state server", _add_server, 8.0),
    Event("move the slots of all servers that were started by hand", _move_all, 8.0),
    Event("cut connections inside a reply", _cut_replies),
    Event("fill the disk of a state server", _fill_disk, 8.0, needs_leader=True),
    Event("kill -9 the driver, and start it again after 10 s", _kill_driver, 10.0),
]
