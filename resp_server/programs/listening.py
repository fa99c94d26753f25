"""The common parts of programs that answer Redis clients: their settings, their users, and the wait for a signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from resp_server.acl.users import AccessError, Users
from resp_server.native import CORE
from resp_server.net.addresses import address_of
from resp_server.net.children import PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE
from resp_server.net.passed_sockets import passed_ports
from resp_server.net.service_manager import ServiceManager
from resp_server.net.text_files import read_text
from resp_server.net.tls import CA_OPTION, TlsFiles, files_of, server_context
from resp_server.programs.command_line import Mistakes
from resp_server.programs.configuration import Configuration
from resp_server.programs.draining import Drain
from resp_server.serving.server import Server
from resp_server.settings.server import ROWS, ServerConfig
from resp_server.workers.master import Workers

logger = logging.getLogger("sparkis.server")


def config_of(options: argparse.Namespace, *, takes_ca_alone: bool = False) -> ServerConfig:
    """Return the server's settings; CommandLineError.

    Args:
        takes_ca_alone: The CA may be for connections to other processes, so it needs no certificate.
    """
    mistakes = Mistakes()
    with mistakes.noted():
        password = password_of(options)
    with mistakes.noted():
        tls = _tls(options, takes_ca_alone=takes_ca_alone)
    with mistakes.noted():
        _check_passed_sockets(options)
    mistakes.raise_if_any()
    configuration: Configuration | None = getattr(options, "configuration", None)
    file = None if configuration is None else configuration.file
    values = {name: row.value_of(options) for name, row in ROWS.items() if row.programs and hasattr(options, row.dest)}
    return ServerConfig(
        **values
        | {
            "password": password,
            "server_password": os.environ.get(SERVER_PASSWORD_VARIABLE) or None,
            "rate_limits": tuple(options.rate_limit),
            "role": getattr(options, "role", "master"),
            "tls": tls,
            "config_file": None if file is None else str(Path(file.path).resolve()),
            "config_table": "" if configuration is None else configuration.program,
        }
    )


def password_of(options: argparse.Namespace) -> str | None:
    """Return the password of AUTH; ValueError."""
    if options.requirepass and options.requirepass_file:
        raise ValueError("--requirepass and --requirepass-file are both given; give one of them")
    password = options.requirepass or os.environ.get(PASSWORD_VARIABLE) or None
    if options.requirepass_file:
        try:
            password = read_text(options.requirepass_file).strip()
        except OSError as error:
            raise ValueError(f"--requirepass-file {options.requirepass_file}: {error.strerror}") from None
    if options.aclfile and password is not None:
        raise ValueError(
            "a password and --aclfile are both given; with an ACL file, set the password of the "
            "user 'default' in that file"
        )
    return password


def _check_passed_sockets(options: argparse.Namespace) -> None:
    """Raise ValueError for a socket of systemd that nothing here listens at."""
    metrics = getattr(options, "metrics", None)
    ports = {options.port, getattr(options, "tls_port", None), None if metrics is None else metrics.port}
    for port in passed_ports():
        if port not in ports:
            raise ValueError(
                f"systemd passed a socket of port {port}, but no option names that port; give --port {port}, or change "
                "ListenStream of the socket unit"
            )


def _tls(options: argparse.Namespace, *, takes_ca_alone: bool) -> TlsFiles | None:
    """Return the files of the port with TLS, after loading them once as a check; ValueError, TlsError."""
    tls = files_of(options)
    if tls is None:
        return None
    if tls.cert is None:
        if not takes_ca_alone:
            raise ValueError(f"{CA_OPTION} has no use without --tls-cert-file and --tls-key-file; give them as well")
        return None
    server_context(tls)
    return tls


def load_users(users: Users) -> None:
    """Read the ACL file, if there is one; AccessError if it is invalid."""
    if users.path is not None:
        users.load()
        logger.info("read %d users from %s", len(users), users.path)


def log_started(config: ServerConfig, port: int, tls_port: int) -> None:
    """Log the addresses for clients."""
    for host in config.hosts:
        if port != tls_port:
            logger.info("started @ %s:%d, %s core", host, port, CORE)
        if tls_port:
            logger.info("started @ %s:%d, %s core, TLS", host, tls_port, CORE)


def addresses_of(config: ServerConfig, port: int, tls_port: int) -> str:
    """Return the addresses for clients as a text."""
    return ", ".join(address_of(host, each) for host in config.hosts for each in sorted({port, tls_port} - {0}))


def report_ports(ports: Mapping[str, int | None], is_child: bool, supervised: Mapping[str, int]) -> None:
    """Tell the parent process that clients are answered, and at which ports: one line of JSON.

    Args:
        supervised: As in `programs.supervisor`; empty without one.
    """
    if is_child:
        print(json.dumps(ports), flush=True)
    if supervised:
        os.write(supervised["ports"], json.dumps(ports).encode())


class EndedBeforeStartError(Exception):
    """The end of a program was requested while it started."""


class Shutdown:
    """Waits for SIGTERM, SIGINT, or the end of the parent process. Signals count from the construction on.

    Attributes:
        service_manager: systemd, which it tells of signals.

    Args:
        watches_input: The parent's end closes stdin.
        lifeline: Another descriptor that closes at the parent's end. SIGHUP, which a closing terminal also sends,
            reloads the ACL file, and calls `reload`.
        drain: Gets each signal, also those after the first.
    """

    def __init__(
        self,
        *,
        watches_input: bool,
        users: Server | Workers | None = None,
        lifeline: int | None = None,
        reload: Callable[[], None] | None = None,
        drain: Drain | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._starting: asyncio.Task[Any] | None = None
        self._drain = drain
        self.service_manager = ServiceManager()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not by the loop, whose end would give back the handlers before the process ends.
            signal.signal(number, self._on_signal)
        if users is not None or reload is not None:
            self.handle_hang_ups(users, reload)
        if watches_input:
            lifeline = sys.stdin.fileno()
        if lifeline is not None:
            self._loop.add_reader(lifeline, self._on_input, lifeline)

    @property
    def is_requested(self) -> bool:
        """Return whether the end was requested."""
        return self._ended.is_set()

    def handle_hang_ups(self, users: Server | Workers | None, reload: Callable[[], None] | None) -> None:
        """Reload at each SIGHUP from now on."""
        self._loop.add_signal_handler(signal.SIGHUP, self._hang_up, users, reload)

    @contextmanager
    def cancelling_start(self) -> Iterator[None]:
        """Cancel the block if the end is requested before it is done; then `EndedBeforeStartError` is raised."""
        self._starting = asyncio.current_task()
        try:
            if not self.is_requested:
                yield
                return
        except asyncio.CancelledError:
            if not self.is_requested:
                raise
        finally:
            self._starting = None
        logger.info("ends before it has started")
        raise EndedBeforeStartError

    async def wait(self) -> None:
        """Wait for the end."""
        # Exclude all present objects from garbage collection, which would take a seventh of a proxy's time (measured).
        gc.freeze()
        await self._ended.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_signal)

    def _take_signal(self) -> None:
        if self._drain is not None:
            self._drain.signalled()
        self.service_manager.stopping()
        self._end()

    def _hang_up(self, users: Server | Workers | None, reload: Callable[[], None] | None) -> None:
        self.service_manager.reloading()
        if reload is not None:
            reload()
        _reload_users(users)
        self.service_manager.reloaded()

    def _end(self) -> None:
        self._ended.set()
        if self._starting is not None:
            self._starting.cancel()

    def _on_input(self, descriptor: int) -> None:
        if not os.read(descriptor, 4096):
            self._loop.remove_reader(descriptor)
            self._end()


def _reload_users(server: Server | Workers | None) -> None:
    if server is None or server.users.path is None:
        logger.info("SIGHUP: there is no ACL file to reload; changed certificates are reloaded without a signal")
        return
    try:
        server.reload_users()
    except AccessError as error:
        logger.error("SIGHUP: %s", error)
    else:
        logger.info("SIGHUP: read %d users from %s", len(server.users), server.users.path)
