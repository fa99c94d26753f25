"""`sparkis proxy`: a process that answers plain clients from several servers. It has no stores."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from resp_server.backends.overlay.overlay_backend import OverlayBackend
from resp_server.backends.overlay.owner_changes import OwnerChanges
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.long_arguments import FIRST_ARGUMENT_BYTES_MAX, VALUE_BYTES_MAX
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.servers.proxy_connection import ProxyConnection
from resp_server.backends.servers.proxy_message_bus import connect_pubsub
from resp_server.backends.servers.request_split import APPLICATIONS_MAX
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.servers.topology_sources import (
    FileTopologySource,
    LogTopologySource,
    ProxyTopologySource,
    RegistryTopologySource,
)
from resp_server.exporter.proxy_source import ProxySource
from resp_server.net import event_loop
from resp_server.net.addresses import host_and_port
from resp_server.net.listeners import raise_file_limit
from resp_server.net.tls import Certificates, TlsError, certificates_of, files_of
from resp_server.pipeline.batched import BatchedPipeline
from resp_server.pipeline.context import ServerContext
from resp_server.programs.analyzed_states import key_formats_of_log
from resp_server.programs.command_line import Mistakes, Program
from resp_server.programs.config_reload import ConfigReload
from resp_server.programs.draining import Drain
from resp_server.programs.listening import (
    EndedBeforeStartError,
    Shutdown,
    addresses_of,
    config_of,
    load_users,
    log_started,
    report_ports,
)
from resp_server.programs.metrics_options import check_metrics, listener_of
from resp_server.programs.upstream_options import overlay_of
from resp_server.serving.server import Server
from resp_server.serving.token import token_of
from resp_server.settings.programs import add_settings
from resp_server.settings.server import ServerConfig
from resp_server.settings.setting import PROXY
from state_backend.log.filesystems import open_filesystem
from state_backend.model.clock import MS_PER_S
from state_backend.model.errors import SparkisError
from state_backend.store.keyspace import Keyspace

logger = logging.getLogger("sparkis.proxy")

KNOWN_POLL_S = 0.02

DESCRIPTION = """\
Serve plain Redis clients from several state servers: each request goes to the owner of its key's slot.
Each --cluster, --registry and --log is a separate application; with several of them, a request goes to the application
that has the key's job.
"""
EXAMPLES = """\
examples:
  sparkis proxy --log /data/sparkis-log
  SPARKIS_CONTROL_TOKEN=... sparkis proxy --registry driver-a:7377 --registry driver-b:7377
  sparkis proxy --cluster cluster.json
  sparkis proxy --log /data/sparkis-log --upstream redis://cache:6379 --ownership /var/lib/sparkis/owners.json
  SPARKIS_PASSWORD=secret sparkis proxy --log /data/sparkis-log --bind 0.0.0.0 --port 6379
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a proxy to a command."""
    add_settings(parser, PROXY)


def serve(options: argparse.Namespace) -> None:
    """Answer clients until a signal, or for a child until its standard input ends."""
    mistakes = Mistakes()
    with mistakes.noted():
        config = config_of(options, takes_ca_alone=True)
    with mistakes.noted():
        certificates = _server_certificates(options)
    with mistakes.noted():
        sources = _sources(options)
    with mistakes.noted():
        check_metrics(options)
    with mistakes.noted():
        overlay = overlay_of(options)
    mistakes.raise_if_any()
    password = config.server_password or config.password
    for source in sources:
        source.cluster = StateCluster(source.name, ServerAccess(password, options.server_timeout / MS_PER_S))
        source.cluster.access.certificates = certificates
    # Jobs of an application whose log is not named are known from its servers only.
    logs = options.log if len(options.log) == len(sources) else ()
    event_loop.run(answer_clients(options, config, sources, overlay, logs=logs))


def _sources(options: argparse.Namespace) -> Sequence[ProxyTopologySource]:
    """Return the topology source of each application; ValueError for invalid options."""
    token = token_of(options) if options.registry else ""
    result: list[ProxyTopologySource] = [FileTopologySource(path) for path in options.cluster]
    for text in options.registry:
        try:
            result.append(RegistryTopologySource(*host_and_port(text), token))
        except ValueError as error:
            raise ValueError(f"--registry: {error}") from None
    result += [LogTopologySource(open_filesystem(root)) for root in options.log]
    if not 1 <= len(result) <= APPLICATIONS_MAX:
        raise ValueError(
            f"{len(result)} applications are given; give 1 to {APPLICATIONS_MAX} by --log, --registry or --cluster"
        )
    names = [source.name for source in result]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; give each application once")
    return result


def _server_certificates(options: argparse.Namespace) -> Certificates | None:
    """Return the certificates for connections to servers and registries; None: without TLS."""
    if options.server_tls == "no":
        return None
    files = files_of(options)
    if files is None and options.server_tls == "yes":
        raise TlsError("--server-tls yes needs --tls-ca-cert-file, the CA that signs the servers' certificates")
    return certificates_of(files)


async def answer_clients(
    options: argparse.Namespace,
    config: ServerConfig,
    sources: Sequence[ProxyTopologySource],
    overlay: tuple[Upstream, Ownership] | None,
    supervised: Mapping[str, int] = MappingProxyType({}),
    *,
    loading_grace_s: float = 0.0,
    unused: asyncio.Event | None = None,
    logs: Sequence[str] = (),
    **further_ports: int | None,
) -> None:
    """Answer clients from the servers of all sources, and an upstream, until a signal or the end of the parent.

    Args:
        supervised: As in `programs.supervisor`.
        loading_grace_s: The proxy listens when the owners of keys are known, or after this time; then it replies
            LOADING.
        logs: The logs of all jobs; their jobs' keys are known before servers report them.
        unused: The event that ends the proxy in place of the end of its parent.
        further_ports: More fields for the line of JSON that a child prints.
    """
    drain = Drain(options)
    shutdown = Shutdown(
        watches_input=options.child and unused is None, lifeline=supervised.get("lifeline"), drain=drain
    )
    raise_file_limit(config.maxclients + (options.upstream_pinned if overlay else 0))
    proxy = _Proxy(options, config, sources, overlay)
    server = proxy.server
    reloads = [ConfigReload(options, server).reload]
    if proxy.overlay is not None:
        reloads.append(proxy.overlay.control.reload_at_signal)
    proxy.start()
    metrics = listener_of(options, proxy.metrics_source())
    shutdown.handle_hang_ups(server, lambda: _run_all(reloads))
    try:
        with shutdown.cancelling_start():
            await metrics.start()
            await proxy.until_ready(logs, loading_grace_s)
        await server.start()
        ports = {"port": server.port, "tls_port": server.tls_port, "metrics_port": metrics.port, **further_ports}
        report_ports(ports, options.child, supervised)
        log_started(config, server.port, server.tls_port)
        shutdown.service_manager.ready(f"Serving {addresses_of(config, server.port, server.tls_port)}")
        ends: list[Coroutine[None, None, object]] = [shutdown.wait()]
        if proxy.overlay is not None and options.copiers == "refuse":
            ends.append(proxy.overlay.control.end_at_legacy_writer())
        if unused is not None:
            ends.append(unused.wait())
        await next(asyncio.as_completed(ends))
        metrics.drain()
        await drain.run(server.drain)
    except EndedBeforeStartError:
        pass
    finally:
        if drain.is_urgent:
            server.cut_clients()
        await proxy.stop()
        await metrics.stop()
        logger.info("ended")


class _Proxy:
    """A proxy's server and its backends: the state servers of all sources, and an upstream if there is one."""

    def __init__(
        self,
        options: argparse.Namespace,
        config: ServerConfig,
        sources: Sequence[ProxyTopologySource],
        overlay: tuple[Upstream, Ownership] | None,
    ) -> None:
        self._sources = sources
        self._shares_port = config.shares_port
        self._upstream = None if overlay is None else overlay[0]
        self._tasks: list[asyncio.Task[None]] = []
        self._clusters = StateClusters([source.cluster for source in sources], needs_key_formats=overlay is not None)
        self.overlay: OverlayBackend | None = None
        self.server = self._make_server(options, config, overlay)
        context, aliases = self.server.context, None
        context.proxy.info_fields = self._clusters.info_fields
        if self.overlay is not None:
            context.proxy.info_fields, aliases = self.overlay.info_fields, self.overlay.aliases
        self._relay = connect_pubsub(self._clusters, context, aliases)

    def _make_server(
        self, options: argparse.Namespace, config: ServerConfig, overlay: tuple[Upstream, Ownership] | None
    ) -> Server:
        """Return a server that does not listen yet. With an upstream, its backend is `self.overlay`."""

        def pipeline(server: ServerContext) -> BatchedPipeline:
            servers = ServersBackend(server, self._clusters, is_routed=overlay is not None)
            if overlay is None:
                return BatchedPipeline(server, servers)
            self.overlay = OverlayBackend(
                server,
                servers,
                *overlay,
                is_strict=options.transactions == "strict",
                has_client_logins=options.upstream_auth == "client",
                allowed=options.upstream_allow or (),
            )
            return BatchedPipeline(server, self.overlay)

        if overlay is not None:
            config = replace(config, proto_max_bulk_len=FIRST_ARGUMENT_BYTES_MAX, value_bytes_max=VALUE_BYTES_MAX)
        if options.upstream_auth == "client":
            config = replace(config, password=secrets.token_hex())  # so that clients have to log in
        config = replace(config, server_password=None)  # no process logs in to a proxy with it
        server = Server(Keyspace(), config, pipeline, connection=ProxyConnection)
        load_users(server.users)
        return server

    def metrics_source(self) -> ProxySource:
        """Return the source of this proxy's metrics."""
        upstream_fields = None if self._upstream is None else self.server.context.proxy.info_fields
        return ProxySource(self.server, self._clusters, upstream_fields)

    def start(self) -> None:
        """Connect to the backends."""
        self.server.begin_polling()
        self._clusters.start()
        if self._upstream is not None:
            self._upstream.start()
        if self.overlay is not None:
            self.overlay.start()

    async def until_ready(self, logs: Sequence[str], loading_grace_s: float) -> None:
        """Follow the sources; return when the owners of keys are known, or after a time."""
        for source in self._sources:
            source.begin()
            self._tasks.append(asyncio.create_task(source.follow()))
        if self.overlay is not None:
            if logs and self.overlay.owners.is_loading:
                self._tasks.append(asyncio.create_task(_learn_from_logs(self.overlay.owners, logs)))
            await _until_loaded(self.overlay.owners, loading_grace_s)
        if self._shares_port:  # it takes over at once, so it must be able to answer
            while not all(source.cluster.slots.is_complete for source in self._sources):
                await asyncio.sleep(KNOWN_POLL_S)
        if self.overlay is not None:
            await self.overlay.control.check_tracking()

    async def stop(self) -> None:
        """Close the clients' connections, then those to the backends."""
        for task in self._tasks:
            task.cancel()
        await self.server.stop()
        self._relay.stop()
        self._clusters.stop()


def _run_all(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()


async def _learn_from_logs(owners: OwnerChanges, roots: Sequence[str]) -> None:
    """Read which keys are states' from the logs. If a log cannot be read, requests with keys wait for the servers."""
    try:
        formats = [await asyncio.to_thread(key_formats_of_log, root) for root in roots]
    except SparkisError as error:
        logger.warning(
            "the key formats of the states are not read from the log: %s; the servers will report them", error
        )
        return
    owners.learn_from_logs(formats)


async def _until_loaded(owners: OwnerChanges, seconds_max: float) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + seconds_max
    while owners.is_loading and loop.time() < deadline_s:
        await asyncio.sleep(KNOWN_POLL_S)


PROGRAM = Program("proxy", DESCRIPTION, EXAMPLES, add_options, serve)
run, main = PROGRAM.run, PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
