"""`sparkis registry`: a process that assigns slots to state servers. It has no state, and clients never wait for it."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
from ipaddress import ip_address

from resp_server.exporter.registry_source import RegistrySource
from resp_server.net import event_loop
from resp_server.net.addresses import address_of
from resp_server.net.client import Client
from resp_server.net.listeners import LOOPBACK, cannot_listen, raise_file_limit
from resp_server.net.service_manager import ServiceManager
from resp_server.net.tls import Certificates, certificates_of, server_files_of
from resp_server.programs.command_line import Mistakes, Program
from resp_server.programs.config_reload import ConfigReload
from resp_server.programs.listening import Shutdown
from resp_server.programs.metrics_options import check_metrics, listener_of
from resp_server.registry.registry_file import FencedError, RegistryLease
from resp_server.registry.service import CONNECTIONS_MAX, Registry
from resp_server.registry.standby import ANSWER_S_MAX, Connect, wait_for_absence
from resp_server.serving.token import token_of
from resp_server.serving.token_port import UNAUTHENTICATED_MAX
from resp_server.settings.programs import add_settings
from resp_server.settings.setting import REGISTRY
from state_backend.log.filesystems import Filesystem, open_filesystem

logger = logging.getLogger("sparkis.registry")

# The exit code of a registry that another one has replaced; a supervisor must not restart it.
FENCED_CODE = 3

DESCRIPTION = """\
Assign slots to the state servers of a change log, and reassign them when servers join or leave. The registry writes its
address and the topology into registry.json under the log's root. Servers go on serving while it is down; a restarted
registry resumes from that file.
"""
EXAMPLES = """\
examples:
  SPARKIS_CONTROL_TOKEN=secret sparkis registry --log /data/log
  sparkis registry --log /data/log --token-file token --bind 10.0.0.1 --replicas 1
  sparkis registry --log /data/log --token-file token --bind 10.0.0.2 --replicas 1 --standby
  sparkis registry --log /data/log --tls-cert-file a.crt --tls-key-file a.key --tls-ca-cert-file ca.crt
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a registry to a command."""
    add_settings(parser, REGISTRY)


def serve(options: argparse.Namespace) -> int:
    """Assign slots until a signal, or for a child until its standard input ends; return the exit code."""
    mistakes = Mistakes()
    with mistakes.noted():
        check_metrics(options)
    with mistakes.noted():
        token = token_of(options)
    with mistakes.noted():
        certificates = certificates_of(server_files_of(options))
    with mistakes.noted():
        host = _advertised(options)
    mistakes.raise_if_any()
    try:
        event_loop.run(_run(options, host, token, certificates))
    except FencedError as error:
        logger.error("%s; this registry ends", error)
        return FENCED_CODE
    return 0


async def _run(options: argparse.Namespace, host: str, token: str, certificates: Certificates | None) -> None:
    """Assign slots until shutdown. While another registry leads, wait as its standby.

    Args:
        host: The advertised one.
    """
    signals = Shutdown(watches_input=options.child, reload=ConfigReload(options, None).reload)
    shutdown = asyncio.create_task(signals.wait())
    raise_file_limit(CONNECTIONS_MAX + UNAUTHENTICATED_MAX)
    filesystem = open_filesystem(options.log)
    filesystem.make_folder("")
    source = RegistrySource()
    metrics = listener_of(options, source)
    shutdown.add_done_callback(lambda _: metrics.drain())
    try:
        await metrics.start()
        while not shutdown.done():
            if options.standby:
                logger.info("standing by for the registry of %s", filesystem.root)
                signals.service_manager.ready(f"Standing by for the registry of {filesystem.root}")
                absence = asyncio.create_task(wait_for_absence(filesystem, _connecting(token, certificates)))
                await asyncio.wait([absence, shutdown], return_when=asyncio.FIRST_COMPLETED)
                if not absence.done():
                    absence.cancel()
                    return
                absence.result()
            try:
                await _assign(options, host, filesystem, token, certificates, shutdown, source, signals.service_manager)
            except FencedError as error:
                if not options.standby:
                    raise
                logger.warning("%s; this registry is a standby again", error)
    finally:
        shutdown.cancel()
        await metrics.stop()
        logger.info("ended")


async def _assign(
    options: argparse.Namespace,
    host: str,
    filesystem: Filesystem,
    token: str,
    certificates: Certificates | None,
    shutdown: asyncio.Task[None],
    source: RegistrySource,
    service_manager: ServiceManager,
) -> None:
    """Lead as the log's registry until shutdown; FencedError when another registry has taken over."""
    try:
        listener = socket.create_server(
            (options.bind, options.port), family=socket.AF_INET6 if ":" in options.bind else socket.AF_INET
        )
    except OSError as error:
        raise cannot_listen(options.bind, options.port, error) from None
    port = listener.getsockname()[1]
    address = address_of(host, port)
    lease = await asyncio.to_thread(RegistryLease.acquire, filesystem, address, options.replicas)
    if shutdown.done():
        listener.close()
        logger.info("ends before it has started")
        return
    registry = Registry(lease, token, certificates)
    await registry.start(listener)
    source.registry = registry
    running = asyncio.create_task(registry.run())
    try:
        if not options.child and host in (*LOOPBACK, "localhost"):
            logger.warning(
                "registry.json has the address %s, which only processes of this machine reach; if others are to, start "
                "the registry with --bind, and --advertise HOST if that is not their address for it",
                address,
            )
        logger.info("started registry @ %s, term %d", address, registry.term)
        service_manager.ready(f"Assigning slots at {address}, term {registry.term}")
        if options.child:
            print(json.dumps({"host": host, "port": port}), flush=True)
        await asyncio.wait([running, shutdown], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        source.registry = None
        running.cancel()
        await registry.stop()


def _connecting(token: str, certificates: Certificates | None) -> Connect:
    def connect(host: str, port: int) -> Client:
        tls = None if certificates is None else certificates.for_server()
        return Client(host, port, password=token, timeout_s=ANSWER_S_MAX, tls=tls)

    return connect


def _advertised(options: argparse.Namespace) -> str:
    host: str = options.advertise or options.bind
    try:
        is_any = ip_address(host).is_unspecified
    except ValueError:
        is_any = not host
    if is_any:
        raise ValueError(f"--bind {options.bind}: say with --advertise HOST where state servers find this machine")
    return host


PROGRAM = Program("registry", DESCRIPTION, EXAMPLES, add_options, serve)
run, main = PROGRAM.run, PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
