"""`sparkis serve --upstream`: a proxy with the upstream answers the clients, and a state server is its child process.

    sparkis serve ─── the proxy, at the clients' port ─── state server ─┬─ applier, one per job
    (restarts it)     with the upstream's connections                   └─ workers, with --workers 2 or more

The state server listens at a free port of 127.0.0.1, with a password that only these two processes have. When it dies,
it is restarted at the same ports; meanwhile the upstream's keys are answered as before. It ends when the proxy ends. It
prints which stores it serves: the proxy answers plain reads of stored keys from them (`servers/server_stores.py`).

With a linger time, drivers have their leases at the state server (`driver_leases`). It ends when no driver needs it,
and then the proxy ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.topology_sources import ServerTopologySource
from resp_server.net import children
from resp_server.net.addresses import address_of
from resp_server.net.children import PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, RestartPause
from resp_server.net.client import Client
from resp_server.net.tls import files_of
from resp_server.programs.proxy import answer_clients
from resp_server.protocol.errors import internal_error
from resp_server.serving.applier_process import EVENT_BYTES_MAX
from resp_server.serving.driver_leases import UNUSED_CODE
from resp_server.serving.server_file import remove_server_file, remove_store
from resp_server.settings.groups import UPSTREAM_VARIABLE
from resp_server.settings.server import ServerConfig
from state_backend import log_lines
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.server")

HOST = "127.0.0.1"
# Longer than a server takes to send pending replies and to stop its appliers.
STOP_S_MAX = 10.0
# The state server has loaded its jobs when the proxy asks for them, unless that takes long (guess).
LOADING_GRACE_S = 5.0


async def serve_with_upstream(
    options: argparse.Namespace,
    config: ServerConfig,
    overlay: tuple[Upstream, Ownership],
    supervised: Mapping[str, int],
) -> int:
    """Start both, and answer clients until a signal, the end of the parent or of the leases; return the exit code."""
    try:
        async with StateServerProcess(options) as server:
            source = ServerTopologySource(server.address, server.is_loaded)
            source.cluster = StateCluster(source.name, ServerAccess(server.password), stores=server.stores)
            await answer_clients(
                options,
                config,
                [source],
                overlay,
                supervised,
                loading_grace_s=LOADING_GRACE_S,
                unused=None if options.linger is None else server.is_unused,
                logs=options.log,
                control_port=server.control_port,
                announcements_port=server.announcements_port,
            )
            remove_server_file(options.record)
    except ServerEndedError as error:
        return error.code
    finally:
        remove_store(options.record)
    return 0


class ServerEndedError(Exception):
    """The state server ended at its first start. It has printed the reason."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the state server ended with code {code}")
        self.code = code


class StateServerProcess:
    """The child process; an asynchronous context manager.

    Attributes:
        port: None before the first start.
        control_port: None if it takes no drivers.
        announcements_port: None if it takes no writers.
        stores: The stores that it serves; the proxy reads them, too.
        is_loaded: Set when all jobs were loaded once.
        is_unused: Set when the process has ended because no driver needs it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.password = secrets.token_hex()
        self._command = _command(options)
        self._announcements = options.announcements
        self._log_levels = options.loglevel
        passwords = dict.fromkeys((PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE), self.password)
        self._environment = children.environment() | passwords
        self._environment.pop(UPSTREAM_VARIABLE, None)
        self.port: int | None = None
        self.control_port: int | None = None
        self.announcements_port: int | None = None
        self._ports: tuple[str, ...] = ()  # the options for the ports of the first start
        self.stores = ServerStores()
        self.is_loaded = asyncio.Event()
        self.is_unused = asyncio.Event()
        self._pause = RestartPause()
        self._process: asyncio.subprocess.Process | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address for the proxy."""
        return f"{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        """Start the process, and wait until it answers; ServerEndedError."""
        try:
            while (code := await self._start()) is not None:
                if code >= 0:
                    raise ServerEndedError(code)
                await self._wait_to_restart(code)
        except BaseException:
            await self._stop()
            raise
        self._restarting = asyncio.create_task(self._keep_running())
        log_lines.on_set_up.append(self._set_up_log)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._restarting is not None
        log_lines.on_set_up.remove(self._set_up_log)
        self._restarting.cancel()
        with suppress(asyncio.CancelledError):
            await self._restarting
        await self._stop()  # which ends `_reading`, too

    async def _start(self) -> int | None:
        """Start the process; return its exit code if it ends before it answers."""
        self._pause.begin_run()
        self._close_stores()
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *("--loglevel", self._log_levels),
            *self._ports,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2 * EVENT_BYTES_MAX,  # of a line with such an event
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a shell is for the proxy, which closes the child's stdin
        )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            report = json.loads(line)
            if "port" in report:
                self._keep_ports(report)
                self.stores.set_address(self.address)
                self._reading = asyncio.create_task(self._read(process.stdout))
                return None
            self._take(report)
        return await process.wait()

    def _keep_ports(self, report: Mapping[str, Any]) -> None:
        """Have the next start use the ports of this one: the proxy, drivers and writers know them."""
        self.port, self.control_port = report["port"], report["control_port"]
        self.announcements_port = report["announcements_port"]
        self._ports = ("--port", str(self.port), "--control-port", str(self.control_port or 0))
        if self.announcements_port is not None:
            self._ports += ("--announcements", address_of(self._announcements.host, self.announcements_port))

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Read what the server reports: the stores that it serves, and that all jobs are loaded."""
        while line := await output.readline():
            report = json.loads(line)
            self._take(report)
            if report["event"] == "loaded":
                self.is_loaded.set()

    def _take(self, report: Mapping[str, Any]) -> None:
        try:
            self.stores.take(report)
        except Exception as error:  # without the stores, the state server answers all reads
            internal_error(error)
            self.stores.reset()

    def _close_stores(self) -> None:
        """Read no store of a process that has ended."""
        if self._reading is not None:
            self._reading.cancel()
        self.stores.reset()

    async def _keep_running(self) -> None:
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if code == UNUSED_CODE:
                self.is_unused.set()
                return
            await self._wait_to_restart(code)
            try:
                await self._start()
            except OSError as error:
                logger.error("the state server cannot be started: %s", error)

    def _set_up_log(self, inherited: str) -> None:
        self._log_levels = inherited.partition(" ")[2]
        asyncio.get_running_loop().run_in_executor(None, self._send_log_levels, self._log_levels)

    def _send_log_levels(self, levels: str) -> None:
        try:
            with Client(HOST, self.port or 0, password=self.password) as client:
                client.call("CONFIG", "SET", "loglevel", levels)
        except SparkisError as error:  # it has them when it is started again
            logger.warning("the state server did not take the levels of the log: %s", error)

    async def _wait_to_restart(self, code: int) -> None:
        pause_s = self._pause.next_s()
        reason = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        logger.warning("the state server ended %s; restarting it in %s s", reason, pause_s)
        await asyncio.sleep(pause_s)

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()


def _command(options: argparse.Namespace) -> list[str]:
    """Return the command line of the state server: the options of `sparkis serve` that concern states."""
    command = [sys.executable, "-m", "resp_server.programs.serve", "--child", "--behind-proxy"]
    for log in options.log:
        command += ["--log", log]
    command += ["--port", "0", "--bind", HOST, "--workers", str(options.workers), "--loglevel", options.loglevel]
    command += ["--log-format", options.log_format]
    command += ["--retention", str(options.retention), *([f"--compact={options.compact}"] if options.compact else [])]
    command += [] if options.linger is None else ["--linger", str(options.linger)]
    if options.announcements is not None:
        tls = files_of(options)  # writers reach this port, and not the proxy's
        command += ["--announcements", address_of(*options.announcements), *([] if tls is None else tls.arguments())]
    return command if options.store is None else [*command, "--store", options.store]
