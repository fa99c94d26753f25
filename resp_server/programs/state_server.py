"""`sparkis state-server`: serves the slots that a registry assigns, for all jobs in its change logs.

Its store folder contains the stores, and `member.json` with the server's id, its port and its desired slots, so that a
restarted server is the same member.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from errno import EADDRINUSE
from ipaddress import ip_address
from pathlib import Path

from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.cluster.topology import NODE_ID
from resp_server.cluster.topology_source import TopologySource
from resp_server.exporter.sources import ServerSource
from resp_server.net import event_loop
from resp_server.net.listeners import raise_file_limit
from resp_server.net.tls import certificates_of
from resp_server.programs.command_line import Mistakes, Program
from resp_server.programs.config_reload import ConfigReload
from resp_server.programs.draining import Drain
from resp_server.programs.listening import EndedBeforeStartError, Shutdown, addresses_of, config_of, load_users
from resp_server.programs.metrics_options import check_metrics, listener_of
from resp_server.programs.serve import check_logs, store_folder
from resp_server.registry.client import AdvertisedAddress, RegistryClient
from resp_server.serving.appliers import Appliers
from resp_server.serving.job_catalog import LocalJobCatalog
from resp_server.serving.server import Server
from resp_server.serving.token import token_of
from resp_server.settings.groups import DEFAULT_PORTS
from resp_server.settings.option_values import port_range
from resp_server.settings.programs import add_settings
from resp_server.settings.server import ServerConfig
from resp_server.settings.setting import STATE_SERVER
from state_backend.log.filesystems import open_filesystem
from state_backend.model.clock import MS_PER_MINUTE
from state_backend.model.errors import SlotSetError
from state_backend.model.formats import WRITER, check_format
from state_backend.model.slot_set import NONE, SlotSet
from state_backend.store.keyspace import Keyspace

logger = logging.getLogger("sparkis.server")

MEMBER_FILE = "member.json"
MEMBER_FORMAT = 1
# The part of a drain in which slots may be handed over; the rest is for the replies after that.
HAND_OVER_SHARE = 0.8

DESCRIPTION = """\
Serve the slots that a registry assigns, as a node of a Redis Cluster. Several state servers share the slots of a change
log. Needs no Spark and no JVM; without --compact it only reads the log.
"""
EXAMPLES = """\
examples (all with the same SPARKIS_CONTROL_TOKEN, or --token-file):
  sparkis registry --log /data/log
  sparkis state-server --log /data/log --store ./store1
  sparkis state-server --log /data/log --store ./store2
  sparkis state-server --registry 10.0.0.1:7377 --log /data/log --store /var/sparkis --bind 10.0.0.2
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a state server to a command."""
    add_settings(parser, STATE_SERVER)


@dataclass(frozen=True)
class Identity:
    """The content of `member.json`.

    Args:
        port: 0 before the first start.
    """

    id: str
    port: int = 0
    desired_slots: SlotSet = NONE

    @classmethod
    def of(cls, folder: Path) -> Identity:
        """Read the file, or return a new identity; NewerFormatError."""
        try:
            stored = json.loads((folder / MEMBER_FILE).read_text())
            check_format(stored, MEMBER_FORMAT, folder / MEMBER_FILE)
            if NODE_ID.fullmatch(stored["id"]):
                return cls(stored["id"], int(stored["port"]), SlotSet.parse(stored["desired_slots"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SlotSetError):
            pass  # missing, or incomplete after a crash of the machine: a new member, whose stores are rebuilt
        return cls(secrets.token_hex(20))

    def write(self, folder: Path) -> None:
        """Write the file."""
        path = folder / MEMBER_FILE
        # If the disk is full, the server loads more after its next start.
        with suppress(OSError):
            path.with_suffix(".new").write_text(
                json.dumps(
                    {"format": MEMBER_FORMAT, **WRITER}
                    | {"id": self.id, "port": self.port, "desired_slots": str(self.desired_slots)}
                )
            )
            os.replace(path.with_suffix(".new"), path)


class IdentityFile:
    """Keeps `member.json` up to date with the desired slots, for the server's next start."""

    def __init__(self, identity: Identity, folder: Path) -> None:
        self._identity = identity
        self._folder = folder
        self.is_assigned = asyncio.Event()
        identity.write(folder)

    def set_desired_slots(self, slots: SlotSet) -> None:
        """Store the desired slots."""
        if slots != self._identity.desired_slots:
            self._identity = replace(self._identity, desired_slots=slots)
            self._identity.write(self._folder)
        self.is_assigned.set()


def serve(options: argparse.Namespace) -> None:
    """Serve until a signal, or for a child until its standard input ends."""
    mistakes, roots = Mistakes(), [open_filesystem(log).root for log in options.log]
    with mistakes.noted():
        check_logs(roots)
    if options.port is not None and options.ports is not None:
        mistakes.add("--port and --ports are both given; give one of them")
    with mistakes.noted():
        check_metrics(options)
    with mistakes.noted():
        token = token_of(options)
    with mistakes.noted():
        config = config_of(options)
    mistakes.raise_if_any()
    with store_folder(options.store, roots) as folder:
        event_loop.run(_serve(options, config, token, roots, folder))


async def _serve(
    options: argparse.Namespace, config: ServerConfig, token: str, roots: Sequence[str], folder: Path
) -> None:
    drain = Drain(options)
    shutdown = Shutdown(watches_input=options.child, drain=drain)
    raise_file_limit(config.maxclients)
    identity = Identity.of(folder)
    keyspace = Keyspace()
    server = await _start_server(keyspace, config, _ports_to_try(options, identity))
    shutdown.handle_hang_ups(server, ConfigReload(options, server).reload)
    identity_file = IdentityFile(replace(identity, port=server.port), folder)
    appliers = _make_appliers(options, server, keyspace, roots, folder, identity.desired_slots)
    ended = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    def refused() -> None:
        server.set_loading(True)
        if identity_file.is_assigned.is_set():
            identity_file.is_assigned.clear()
            tasks.append(asyncio.create_task(_open(server, appliers, identity_file.is_assigned)))

    host, port = options.advertise or (_own_host(config.hosts[0]), None)
    registry_client = RegistryClient(
        identity.id,
        AdvertisedAddress(host, port or server.port, options.zone, options.driver),
        TopologySource(server.set_topology).take,
        appliers,
        logs=[open_filesystem(root) for root in roots],
        address=options.registry,
        token=token,
        on_desired_slots=identity_file.set_desired_slots,
        on_end=ended.set if options.driver else None,
        on_refused=refused,
        certificates=certificates_of(config.tls),
    )
    appliers.on_change = registry_client.report_soon
    metrics = listener_of(options, ServerSource(server, lambda: len(appliers.missing_slots)))
    try:
        with shutdown.cancelling_start():
            await metrics.start()
            await appliers.start()
        tasks.append(asyncio.create_task(_open(server, appliers, identity_file.is_assigned)))
        tasks.append(asyncio.create_task(registry_client.run()))
        _report_started(host or config.hosts[0], port or server.port, is_child=options.child)
        shutdown.service_manager.ready(f"Serving {addresses_of(config, server.port, server.tls_port)}")
        await next(asyncio.as_completed([shutdown.wait(), ended.wait()]))
        metrics.drain()
        await drain.run(lambda left_s: registry_client.drain(left_s * HAND_OVER_SHARE), server.drain)
    except EndedBeforeStartError:
        pass
    finally:
        if drain.is_urgent:
            server.cut_clients()
        for task in tasks:
            task.cancel()
        await server.stop()
        await appliers.stop()
        await metrics.stop()
        logger.info("ended")


def _make_appliers(
    options: argparse.Namespace,
    server: Server,
    keyspace: Keyspace,
    roots: Sequence[str],
    folder: Path,
    slots: SlotSet,
) -> Appliers:
    """Return the appliers of the logs, not started yet. The server asks them for the epochs that it needs."""
    appliers = Appliers(
        LocalJobCatalog(keyspace),
        list(roots),
        folder,
        retention_ms=int(options.retention * MS_PER_MINUTE),
        compacted=roots if options.compact else (),
        slots=slots,
    )
    server.watch_event_demand(appliers.record_events)
    server.watch_awaited_epochs(appliers.notice_soon)
    return appliers


def _report_started(host: str, port: int, *, is_child: bool) -> None:
    """Report the address for clients: in the log, and to the parent."""
    logger.info("started state server @ %s:%d", host, port)
    if is_child:
        print(json.dumps({"host": host, "port": port}), flush=True)


def _ports_to_try(options: argparse.Namespace, identity: Identity) -> list[int]:
    """Return the ports to try; the former port is the first, because clients know it."""
    if options.port is not None:
        return [options.port]
    ports = list(options.ports or port_range(DEFAULT_PORTS))
    return [identity.port, *ports] if identity.port in ports else ports


async def _start_server(keyspace: Keyspace, config: ServerConfig, ports: Sequence[int]) -> Server:
    """Start a server at the first free port; it replies LOADING at first."""
    for port in ports:
        server = Server(keyspace, replace(config, port=port), pipeline_of_stores)
        load_users(server.users)
        server.set_loading(True)
        try:
            await server.start()
            return server
        except OSError as error:
            server.context.close()
            if error.errno != EADDRINUSE or port == ports[-1]:
                raise
    raise AssertionError("there is a port to try")


def _own_host(bound: str) -> str | None:
    """Return the address for clients of a listening address; None for a wildcard address."""
    try:
        return None if not bound or ip_address(bound).is_unspecified else bound
    except ValueError:
        return bound


async def _open(server: Server, appliers: Appliers, is_assigned: asyncio.Event) -> None:
    """Stop replying LOADING once slots are assigned and all jobs are found: before, a nil could be wrong."""
    await asyncio.gather(appliers.catch_up(), is_assigned.wait())
    server.set_loading(False)


PROGRAM = Program("state-server", DESCRIPTION, EXAMPLES, add_options, serve)
run, main = PROGRAM.run, PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
