"""`sparkis serve`: a server process, with its options, store folder, appliers and listeners.

Needs no Spark and no JVM. The change logs that it serves may be read-only. With an upstream, a proxy answers the
clients (`serve_upstream`), and this server is its child.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.cluster.single_node import single_node_topology
from resp_server.cluster.topology_source import TopologyFile, TopologySource
from resp_server.exporter.sources import ServerSource, WorkersSource
from resp_server.net import event_loop
from resp_server.net.addresses import address_of
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.listeners import raise_file_limit
from resp_server.net.tls import TlsFiles, certificates_of
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
from resp_server.programs.supervisor import SUPERVISED, supervise
from resp_server.programs.upstream_options import overlay_of
from resp_server.serving.announcement_port import AnnouncementListener
from resp_server.serving.appliers import Appliers
from resp_server.serving.control_api import ControlListener
from resp_server.serving.driver_leases import UNUSED_CODE, DriverLeases
from resp_server.serving.job_catalog import JobCatalog, LocalJobCatalog, ReportedCatalog
from resp_server.serving.server import Server
from resp_server.serving.server_file import remove_server_file, remove_store
from resp_server.settings.programs import add_settings
from resp_server.settings.server import ServerConfig
from resp_server.settings.setting import SERVE
from resp_server.workers.master import Workers
from state_backend.apply.store_log import check_stores
from state_backend.log.change_log import ChangeLog, check_writable
from state_backend.log.filesystems import open_filesystem
from state_backend.log.time_travel import AsOf, BeforeFirstEpochError, Moment, moment_of
from state_backend.model.clock import MS_PER_MINUTE
from state_backend.model.errors import LogError, LogUnavailableError, StoreError
from state_backend.store.keyspace import Keyspace

logger = logging.getLogger("sparkis.server")

# The server listens when its jobs are loaded, or after this time; then it replies LOADING until they are (guess).
LOADING_GRACE_S = 5.0
# When a proxy is killed, its state server locks the store folder for a moment longer (guess).
PREDECESSOR_S_MAX = 10.0
LOCK_POLL_S = 0.05

DESCRIPTION = "Serve the jobs of a change log to Redis clients. Needs no Spark and no JVM."
EXAMPLES = """\
examples:
  sparkis serve --log ./sparkis-log
  sparkis serve --log /data/log-a --log /data/log-b --port 6380
  SPARKIS_PASSWORD=secret sparkis serve --log ./sparkis-log --bind 0.0.0.0
  sparkis serve --log ./sparkis-log --tls-cert-file server.crt --tls-key-file server.key
  sparkis serve --log /data/log --bind 10.0.0.1 --cluster cluster.json --cluster-node 10.0.0.1:7379
  sparkis serve --log ./sparkis-log --as-of 2026-11-24T12:00:00Z --port 7380
  sparkis serve --log /data/log --upstream redis://cache:6379 --ownership /var/lib/sparkis/owners.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server to a command."""
    add_settings(parser, SERVE)


def _keep_ports(options: argparse.Namespace, before: Mapping[str, int | None]) -> None:
    """Use the ports of the process before a restart, also those that the system chose: their users know no others."""
    options.port = before["port"]
    options.tls_port = before["tls_port"] if options.tls_port is not None else None
    for name in ("announcements", "metrics"):
        address, port = getattr(options, name), before.get(f"{name}_port")
        if address is not None and port:
            setattr(options, name, address._replace(port=port))


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal, or for a child until its standard input ends; return the exit code.

    A child with a linger time ends as described in `driver_leases`.
    """
    supervised = json.loads(os.environ.pop(SUPERVISED, "{}"))
    if supervised.get("port"):
        _keep_ports(options, supervised)
    mistakes, roots = _mistakes(options), [open_filesystem(log).root for log in options.log]
    with mistakes.noted():
        check_logs(roots)
    with mistakes.noted():
        config = config_of(options)
    with mistakes.noted():
        check_metrics(options)
    with mistakes.noted():
        overlay = overlay_of(options)
    mistakes.raise_if_any()
    stores_wait_s = PREDECESSOR_S_MAX if options.behind_proxy else 0.0
    # With workers, this process maps no stores and restarts the workers itself.
    if not (options.child or supervised or (options.workers > 1 and overlay is None)):
        if overlay is None and options.as_of is None:
            with store_folder(options.store, roots, stores_wait_s):
                pass  # its error needs no child
        # Before anything that starts threads, such as a read of an object store: it forks.
        supervised = supervise()
    if overlay is not None:
        # Imported here, because other servers need nothing of a proxy.
        from resp_server.programs.serve_upstream import serve_with_upstream

        return event_loop.run(serve_with_upstream(options, config, overlay, supervised))
    if options.as_of is not None:
        moments = moments_of(roots, options.as_of, options.job)
        if options.store is not None:
            Path(options.store).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="sparkis-", dir=options.store) as temporary:
            return event_loop.run(_serve(options, config, roots, Path(temporary), supervised, moments))
    with store_folder(options.store, roots, stores_wait_s) as folder:
        return event_loop.run(_serve(options, config, roots, folder, supervised))


def _mistakes(options: argparse.Namespace) -> Mistakes:
    """Return the options that cannot be combined."""
    mistakes = Mistakes()
    if (options.cluster is None) != (options.cluster_node is None):
        mistakes.add("--cluster FILE needs --cluster-node HOST:PORT, and the other way round; give both")
    if options.cluster is not None and options.tls_port is not None:
        mistakes.add(
            "--tls-port cannot be combined with --cluster, because a topology has one port for each node; without "
            "--tls-port a node with a certificate speaks TLS at --port, and all nodes must do the same"
        )
    if options.upstream and options.cluster is not None:
        mistakes.add(
            "--upstream cannot be combined with --cluster; start the nodes without it, and `sparkis proxy --upstream` "
            "in front of them"
        )
    if options.announcements is not None and not os.environ.get(TOKEN_VARIABLE):
        mistakes.add(
            f"--announcements needs a token: set {TOKEN_VARIABLE} to the same secret here and where the writers run"
        )
    if options.upstream and options.role != "master":
        mistakes.add(f"--role {options.role} has no effect with --upstream, which has a role itself; leave it out")
    if options.as_of is not None:
        for option, is_given, reason in (
            ("--upstream", options.upstream, "an upstream has no past"),
            ("--cluster", options.cluster is not None, "a node of a cluster follows the log"),
            ("--announcements", options.announcements is not None, "a server of a past moment follows no log"),
            ("--compact yes", options.compact == "yes", "a server of a past moment writes nothing"),
        ):
            if is_given:
                mistakes.add(f"--as-of cannot be combined with {option}, because {reason}; leave one of them out")
    elif options.job:
        mistakes.add("--job is for --as-of; a server that follows its logs serves all of their jobs")
    return mistakes


def moments_of(roots: Sequence[str], point: AsOf, only: Sequence[str] | None) -> dict[tuple[str, str], Moment]:
    """Return the moment of each job to serve, by log and name; LogError if a job cannot be read there.

    A job that began after a time is left out, unless it was named.
    """
    logs = {root: ChangeLog(root) for root in roots}
    jobs = {(root, job): log.job(job) for root, log in logs.items() for job in log.jobs() if not only or job in only}
    missing = sorted(set(only or ()) - {job for _, job in jobs})
    if missing or not jobs:
        raise LogError(f"no log has a job {', '.join(missing) or 'at all'}; `sparkis inspect LOG` lists the jobs")
    if point.epoch is not None and len(jobs) > 1:
        raise LogError(
            f"--as-of {point.epoch}: each job counts its own epochs, and the logs have the jobs "
            f"{', '.join(sorted(job for _, job in jobs))}; name one with --job, or give a time"
        )
    found, too_early = {}, []
    for place, log in jobs.items():
        try:
            found[place] = moment_of(log, point)
        except BeforeFirstEpochError as error:
            if only:
                raise
            too_early.append(error)
            logger.info("%s; it is not served", error)
    if not found:
        raise too_early[0]
    return found


def check_logs(roots: Sequence[str]) -> None:
    """Raise ValueError if a local log root does not exist: with a misspelled root the server would wait for ever."""
    for root in roots:
        if "://" not in root and not Path(root).is_dir():
            raise ValueError(f"--log {root} is not a folder; name the change log of a job, or start the job first")


def compacted_logs(roots: Sequence[str], choice: str | None) -> list[str]:
    """Return the logs to compact.

    LogUnavailableError if a log cannot be written and the choice is `yes`.

    Args:
        choice: `yes`, `no`, or None for those that can be written.
    """
    compacted = []
    for root in roots if choice != "no" else ():
        try:
            check_writable(root)
        except LogUnavailableError as error:
            if choice == "yes":
                raise
            logger.info("the log %s is not compacted, because it cannot be written: %s", root, error)
        else:
            compacted.append(root)
    return compacted


@contextmanager
def store_folder(store_option: str | None, roots: Sequence[str], wait_s: float = 0.0) -> Iterator[Path]:
    """Lock and return the folder of the stores.

    StoreError if another process has it for longer than `wait_s`, or if it has the stores of other logs than `roots`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkis"
    named = hashlib.blake2b("\0".join(roots).encode(), digest_size=8).hexdigest()
    folder = Path(store_option).expanduser() if store_option else cache / named
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise StoreError(f"--store {folder}: {error.strerror}; name a folder that this server can write to") from None
    with open(folder / "lock", "a+b") as lock:
        _lock(lock, folder, time.monotonic() + wait_s)
        check_stores(folder, roots)
        yield folder


def _lock(lock: BinaryIO, folder: Path, deadline_s: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                lock.seek(0)
                holder = lock.read().decode() or "unknown"
                raise StoreError(
                    f"the store folder {folder} is in use by process {holder}; give this server its own with --store"
                ) from None
        time.sleep(LOCK_POLL_S)
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()


async def _serve(
    options: argparse.Namespace,
    config: ServerConfig,
    roots: Sequence[str],
    folder: Path,
    supervised: Mapping[str, int],
    moments: Mapping[tuple[str, str], Moment] | None = None,
) -> int:
    """Serve until a signal, the end of the parent, or the end of the last driver's lease; return the exit code."""
    drain = Drain(options)
    shutdown = Shutdown(
        # A state server behind a proxy ends with the proxy, which has the record of both.
        watches_input=options.child and (options.linger is None or options.behind_proxy),
        lifeline=supervised.get("lifeline"),
        drain=drain,
    )
    try:
        return await _serve_until(shutdown, drain, options, config, roots, folder, supervised, moments)
    except EndedBeforeStartError:
        return 0


async def _serve_until(
    shutdown: Shutdown,
    drain: Drain,
    options: argparse.Namespace,
    config: ServerConfig,
    roots: Sequence[str],
    folder: Path,
    supervised: Mapping[str, int],
    moments: Mapping[tuple[str, str], Moment] | None,
) -> int:
    raise_file_limit(config.maxclients)
    announcements_tls = config.tls
    if options.behind_proxy:
        config = replace(config, tls=None)  # the proxy has the clients' port, and is on this machine
    with shutdown.cancelling_start():
        catalog, server = await _make_server(config, options.workers, has_peer_processes=options.behind_proxy)
        appliers = await _make_appliers(options, catalog, roots, folder, moments)
    server.watch_event_demand(appliers.record_events)
    server.watch_awaited_epochs(appliers.notice_soon)
    topology_source = TopologySource(server.set_topology)
    driver_leases = None if options.linger is None else DriverLeases(options.linger)
    ports = _OtherPorts(options, config.tls, announcements_tls, server, appliers, topology_source, driver_leases)
    tasks: list[asyncio.Task[None]] = []
    server.set_loading(True)
    try:
        with shutdown.cancelling_start():
            await ports.metrics.start()
            if options.cluster is not None:
                tasks.append(_follow_topology(options, topology_source))
            await appliers.start()
            ports.listen_for_announcements()
            loading = asyncio.create_task(appliers.catch_up())
            tasks.append(loading)
            # A process that shares its port takes over at once, so it must be able to answer.
            await _wait_for_jobs(server, loading, None if config.shares_port else LOADING_GRACE_S)
        shutdown.handle_hang_ups(server, ConfigReload(options, server).reload)
        await _listen(options, config, server, ports, topology_source, supervised)
        if options.behind_proxy:
            loading.add_done_callback(partial(_report_loaded, server.run_id))
        check = server.settled if isinstance(server, Workers) else None
        shutdown.service_manager.ready(f"Serving {addresses_of(config, server.port, server.tls_port)}", check)
        ends: list[Coroutine[None, None, object]] = [shutdown.wait()]
        if driver_leases is not None:
            ends.append(driver_leases.wait_for_end())
        await next(asyncio.as_completed(ends))
        ports.metrics.drain()
        remove_server_file(options.record)
        await drain.run(server.drain)
    finally:
        if drain.is_urgent:
            server.cut_clients()
        for task in tasks:
            task.cancel()
        await ports.stop()
        await server.stop()
        await appliers.stop()
        remove_store(options.record)
        await ports.metrics.stop()
        logger.info("ended")
    is_unused = driver_leases is not None and driver_leases.has_ended
    return UNUSED_CODE if is_unused and options.behind_proxy else 0


def _follow_topology(options: argparse.Namespace, topology_source: TopologySource) -> asyncio.Task[None]:
    """Serve by the topology in a file, and begin to follow it; TopologyError if it cannot be used now."""
    file = TopologyFile(Path(options.cluster), options.cluster_node, topology_source.take)
    file.read()
    return asyncio.create_task(file.follow())


async def _make_appliers(
    options: argparse.Namespace,
    catalog: JobCatalog,
    roots: Sequence[str],
    folder: Path,
    moments: Mapping[tuple[str, str], Moment] | None,
) -> Appliers:
    """Return the appliers of the logs, which are not started yet; LogUnavailableError if `--compact` cannot be done."""
    if options.behind_proxy:
        catalog = ReportedCatalog(catalog, _report)
    choice = options.compact if moments is None else "no"
    compacted = await asyncio.to_thread(compacted_logs, roots, choice)
    retention_ms = int(options.retention * MS_PER_MINUTE)
    return Appliers(catalog, list(roots), folder, retention_ms=retention_ms, compacted=compacted, moments=moments)


class _OtherPorts:
    """The ports beside the clients': of metrics, and, with a token, of writers' announcements and of drivers.

    Args:
        announcements_tls: The TLS of the port of announcements, which writers on other machines reach also where a
            proxy has the clients' port.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        tls: TlsFiles | None,
        announcements_tls: TlsFiles | None,
        server: Server | Workers,
        appliers: Appliers,
        topology_source: TopologySource,
        driver_leases: DriverLeases | None,
    ) -> None:
        self._options = options
        token = os.environ.pop(TOKEN_VARIABLE, None)
        self._control: ControlListener | None = None
        self._announcements: AnnouncementListener | None = None
        self.announcements_port: int | None = None  # while it listens
        if token:
            self._control = ControlListener(appliers, topology_source, token, certificates_of(tls), driver_leases)
        if token and options.announcements is not None:
            self._announcements = AnnouncementListener(appliers, token, certificates_of(announcements_tls))
        source = WorkersSource(server) if isinstance(server, Workers) else ServerSource(server)
        self.metrics = listener_of(options, source)

    def listen_for_announcements(self) -> None:
        """Listen for writers, if an option says so. OSError if the address cannot be bound."""
        if self._announcements is not None:
            self.announcements_port = self._announcements.start(*self._options.announcements)
            logger.info("announcements @ %s", address_of(self._options.announcements.host, self.announcements_port))

    async def listen_for_drivers(self) -> int | None:
        """Listen for drivers; return the port, None without a token."""
        return None if self._control is None else await self._control.start(self._options.control_port)

    async def stop(self) -> None:
        """Stop listening for drivers and writers."""
        if self._control is not None:
            await self._control.stop()
        if self._announcements is not None:
            self._announcements.stop()


async def _listen(
    options: argparse.Namespace,
    config: ServerConfig,
    server: Server | Workers,
    ports: _OtherPorts,
    topology_source: TopologySource,
    supervised: Mapping[str, int],
) -> None:
    """Listen for clients and drivers, and report the ports."""
    await server.start()
    control_port = await ports.listen_for_drivers()
    if options.behind_proxy:
        address = f"{config.hosts[0]}:{server.port}"
        topology_source.take(single_node_topology(address), address)
    else:
        log_started(config, server.port, server.tls_port)
    reported = {
        "port": server.port,
        "tls_port": server.tls_port,
        "control_port": control_port,
        "announcements_port": ports.announcements_port,
        "metrics_port": ports.metrics.port,
    }
    report_ports(reported, options.child, supervised)


async def _wait_for_jobs(server: Server | Workers, loading: asyncio.Task[None], seconds_max: float | None) -> None:
    """Wait for all jobs for a moment; then the server replies LOADING until they are loaded: a nil could be wrong."""
    await asyncio.wait([loading], timeout=seconds_max)
    server.set_loading(not loading.done())
    loading.add_done_callback(lambda _: server.set_loading(False))


async def _make_server(
    config: ServerConfig, workers: int, *, has_peer_processes: bool
) -> tuple[JobCatalog, Server | Workers]:
    """Return a server that does not listen yet, of one process or with workers, and the jobs that it serves.

    Args:
        has_peer_processes: See `Server`. The proxy is one, as it reads the stores, too.
    """
    if workers > 1:
        master = Workers(config, workers)
        load_users(master.users)
        await master.start_processes()
        return master, master
    keyspace = Keyspace()
    server = Server(keyspace, config, pipeline_of_stores, has_peer_processes=has_peer_processes)
    load_users(server.users)
    if has_peer_processes:  # a proxy that reads the stores, and not the fresh values beside them
        keyspace.on_fresh = lambda job: _report({"event": "forget", "job": job})
    return LocalJobCatalog(keyspace), server


def _report_loaded(run_id: str, loading: asyncio.Task[None]) -> None:
    """Tell the proxy that all jobs are loaded, and the name of this run: a line after the ports."""
    if not loading.cancelled():
        _report({"event": "loaded", "run_id": run_id})


def _report(line: Mapping[str, Any]) -> None:
    """Send the proxy a line about the jobs, before or after that with the ports."""
    print(json.dumps(line), flush=True)


PROGRAM = Program("serve", DESCRIPTION, EXAMPLES, add_options, serve)
run, main = PROGRAM.run, PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
