"""`sparkis serve`: a server process, with its options, store folder, appliers, listeners and signals.

Needs no Spark and no JVM. The change logs that it serves may be read-only.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import uvloop

from resp_server.acl.rate_limits import RateLimit
from resp_server.acl.users import AccessError, Users
from resp_server.cluster.topology_source import TopologyFile, TopologySource
from resp_server.commands.config import CLIENTS_MAX, INT32_MAX
from resp_server.config import ServerConfig
from resp_server.native import CORE
from resp_server.net.children import PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, TOKEN_VARIABLE
from resp_server.net.listeners import LOOPBACK, raise_file_limit
from resp_server.net.tls import CA_OPTION, add_tls_options, certificates_of, files_of, server_context
from resp_server.programs.command_line import Program, add_level_option, tcp_port, whole_number
from resp_server.programs.supervisor import SUPERVISED, supervise
from resp_server.push.keyspace_notifications import ClassesError, classes_of, letters_of
from resp_server.serving.appliers import Appliers
from resp_server.serving.control_api import ControlListener
from resp_server.serving.job_catalog import JobCatalog, LocalJobCatalog
from resp_server.serving.server import Server
from resp_server.workers.master import Workers
from state_backend.apply.compact import add_retention_option
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import StoreError
from state_backend.store.keyspace import Keyspace

logger = logging.getLogger("sparkis.server")

DEFAULT_PORT = 7379
# More than any machine has free cores (guess); each worker takes about 50 MB.
WORKERS_MAX = 64
# The server listens when its jobs are loaded, or after this time; then it replies LOADING until they are (guess).
LOADING_GRACE_S = 5.0

DESCRIPTION = "Serve the jobs of a change log to Redis clients. Needs no Spark and no JVM."
EXAMPLES = """\
examples:
  sparkis serve --log ./sparkis-log
  sparkis serve --log /data/log-a --log /data/log-b --port 6380
  SPARKIS_PASSWORD=secret sparkis serve --log ./sparkis-log --bind 0.0.0.0
  sparkis serve --log ./sparkis-log --tls-cert-file server.crt --tls-key-file server.key
  sparkis serve --log /data/log --bind 10.0.0.1 --cluster cluster.json --cluster-node 10.0.0.1:7379
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server to a command."""
    parser.add_argument("--log", action="append", required=True, metavar="PATH", help="a log root; may be repeated")
    add_listening_options(parser)
    add_tls_port_option(parser)
    parser.add_argument("--store", metavar="FOLDER", help="the folder of the stores (default: in the user's cache)")
    parser.add_argument(
        "--role",
        choices=("master", "slave"),
        default="master",
        help="the role in HELLO, ROLE and INFO (default master)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1, WORKERS_MAX, "a number of processes"),
        default=1,
        metavar="N",
        help="processes that serve the port (default %(default)s)",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="serve as a node of a Redis Cluster with the topology in this file; reloaded when it changes",
    )
    parser.add_argument(
        "--cluster-node",
        metavar="HOST:PORT",
        help="with --cluster: this server's node in the topology, by address or id",
    )
    parser.add_argument(
        "--compact", action="store_true", help="write snapshots into the log, and remove the files that they supersede"
    )
    add_retention_option(parser, "with --compact: retain younger files, for readers that are behind")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def add_listening_options(
    parser: argparse.ArgumentParser,
    port: int | None = DEFAULT_PORT,
    port_help: str = "TCP port (default %(default)s; 0: a free one)",
) -> None:
    """Add the options that all programs with Redis clients have."""
    parser.add_argument("--port", type=tcp_port, default=port, help=port_help)
    parser.add_argument(
        "--bind",
        nargs="+",
        default=list(LOOPBACK),
        metavar="ADDRESS",
        help="addresses to listen on (default: loopback)",
    )
    parser.add_argument(
        "--requirepass",
        metavar="PASSWORD",
        help=f"the password for AUTH; safer: {PASSWORD_VARIABLE} in the environment",
    )
    parser.add_argument("--requirepass-file", metavar="FILE", help="read the password from a file")
    parser.add_argument("--aclfile", metavar="FILE", help="the file of the users and their rules, as in Redis")
    parser.add_argument(
        "--rate-limit",
        action="append",
        type=_limit,
        default=[],
        metavar="USER=COMMANDS[,BYTES]",
        help="the limits of a user: commands, and bytes, per second; may be repeated",
    )
    parser.add_argument(
        "--notify-keyspace-events",
        type=_event_classes,
        default="",
        metavar="CLASSES",
        help="the classes of keyspace notifications, as in Redis (default: none)",
    )
    parser.add_argument(
        "--protected-mode",
        choices=("yes", "no"),
        default="yes",
        help="yes: without a password, serve only clients on this machine (default yes)",
    )
    parser.add_argument(
        "--maxclients",
        type=whole_number(1, CLIENTS_MAX, "a number of connections"),
        default=10_000,
        metavar="N",
        help="connections at a time (default %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=whole_number(0, INT32_MAX, "a number of seconds"),
        default=0,
        metavar="SECONDS",
        help="close clients that are idle for longer (default: never)",
    )
    add_level_option(parser)
    add_tls_options(parser)


def add_tls_port_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of programs that can have a plain port and a port with TLS."""
    parser.add_argument(
        "--tls-port",
        type=tcp_port,
        metavar="PORT",
        help="a port with TLS; --port is then plain (default: TLS at --port)",
    )


def _limit(text: str) -> RateLimit:
    try:
        return RateLimit.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _event_classes(text: str) -> str:
    try:
        return letters_of(classes_of(text))
    except ClassesError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def config_of(options: argparse.Namespace, *, takes_ca_alone: bool = False) -> ServerConfig:
    """Return the server's settings; ValueError for a password file, TlsError for a certificate that cannot be read."""
    if options.requirepass and options.requirepass_file:
        raise ValueError("--requirepass and --requirepass-file are both given; give one of them")
    password = options.requirepass or os.environ.get(PASSWORD_VARIABLE) or None
    if options.requirepass_file:
        try:
            password = Path(options.requirepass_file).read_text().strip()
        except OSError as error:
            raise ValueError(f"--requirepass-file {options.requirepass_file}: {error.strerror}") from None
    if options.aclfile and password is not None:
        raise ValueError(
            "a password and --aclfile are both given; with an ACL file, set the password of the "
            "user 'default' in that file"
        )
    tls = files_of(options)
    if tls is not None:
        if tls.cert is None and not takes_ca_alone:
            raise ValueError(f"{CA_OPTION} has no use without --tls-cert-file and --tls-key-file; give them as well")
        tls = None if tls.cert is None else tls
    if tls is not None:
        server_context(tls)  # checks the files before the start
    return ServerConfig(
        tls=tls,
        tls_port=getattr(options, "tls_port", None),
        hosts=tuple(options.bind),
        port=options.port,
        password=password,
        server_password=os.environ.get(SERVER_PASSWORD_VARIABLE) or None,
        acl_file=options.aclfile,
        limits=tuple(options.rate_limit),
        notify_events=options.notify_keyspace_events,
        protected_mode=options.protected_mode == "yes",
        role=options.role,
        clients_max=options.maxclients,
        idle_timeout_seconds=options.timeout,
    )


def serve(options: argparse.Namespace) -> None:
    """Serve until a signal, or for a child until its standard input ends."""
    if (options.cluster is None) != (options.cluster_node is None):
        raise ValueError("--cluster FILE needs --cluster-node HOST:PORT, and the other way round; give both")
    if options.cluster is not None and options.tls_port is not None:
        raise ValueError(
            "--tls-port cannot be combined with --cluster, because a topology has one port for each node; without "
            "--tls-port a node with a certificate speaks TLS at --port, and all nodes must do the same"
        )
    roots = [open_filesystem(log).root for log in options.log]
    check_logs(roots)
    supervised = json.loads(os.environ.pop(SUPERVISED, "{}"))
    # With workers, this process maps no stores and restarts the workers itself.
    is_supervisor = not (options.child or options.workers > 1 or supervised)
    if supervised.get("port"):
        options.port = supervised["port"]  # as before a restart
        options.tls_port = supervised["tls_port"] if options.tls_port is not None else None
    with store_folder(options.store, roots) as folder:
        config = config_of(options)
        if not is_supervisor:
            uvloop.run(_serve(options, config, roots, folder, supervised))
    if is_supervisor:
        supervise()


def check_logs(roots: Sequence[str]) -> None:
    """Raise ValueError if a local log root does not exist: with a misspelled root the server would wait for ever."""
    for root in roots:
        if "://" not in root and not Path(root).is_dir():
            raise ValueError(f"--log {root} is not a folder; name the change log of a job, or start the job first")


@contextmanager
def store_folder(store_option: str | None, roots: Sequence[str]) -> Iterator[Path]:
    """Lock and return the folder of the stores; StoreError if another process has it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkis"
    named = hashlib.blake2b("\0".join(roots).encode(), digest_size=8).hexdigest()
    folder = Path(store_option).expanduser() if store_option else cache / named
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise StoreError(f"--store {folder}: {error.strerror}; name a folder that this server can write to") from None
    with open(folder / "lock", "a+b") as lock:
        _lock(lock, folder)
        yield folder


def _lock(lock: BinaryIO, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().decode() or "unknown"
        raise StoreError(
            f"the store folder {folder} is in use by process {holder}; give this server its own with --store"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()


async def _serve(
    options: argparse.Namespace,
    config: ServerConfig,
    roots: Sequence[str],
    folder: Path,
    supervised: Mapping[str, int],
) -> None:
    catalog: JobCatalog
    server: Server | Workers
    raise_file_limit(config.clients_max)
    if options.workers > 1:
        catalog = server = Workers(config, options.workers)
        load_users(server.users)
        await server.start_processes()
    else:
        keyspace = Keyspace()
        catalog, server = LocalJobCatalog(keyspace), Server(keyspace, config)
        load_users(server.users)
    retention_ms = int(options.retention * 60_000) if options.compact else None
    appliers = Appliers(catalog, list(roots), folder, retention_ms=retention_ms)
    server.watch_event_demand(appliers.record_events)
    token = os.environ.pop(TOKEN_VARIABLE, None)
    topology_source = TopologySource(server)
    control = ControlListener(appliers, topology_source, token, certificates_of(config.tls)) if token else None
    loading: asyncio.Task[None] | None = None
    topology_task: asyncio.Task[None] | None = None
    try:
        if options.cluster is not None:
            file = TopologyFile(Path(options.cluster), options.cluster_node, topology_source)
            file.read()
            topology_task = asyncio.create_task(file.follow())
        await appliers.start()
        loading = asyncio.create_task(appliers.catch_up())
        await asyncio.wait([loading], timeout=LOADING_GRACE_S)
        # Before the jobs are loaded, a reply could be a wrong nil.
        server.set_loading(not loading.done())
        loading.add_done_callback(lambda _: server.set_loading(False))
        await server.start()
        control_port = await control.start() if control else None
        log_started(config, server.port, server.tls_port)
        if options.child:
            ports = {"port": server.port, "tls_port": server.tls_port, "control_port": control_port}
            print(json.dumps(ports), flush=True)
        if supervised:
            os.write(supervised["ports"], json.dumps({"port": server.port, "tls_port": server.tls_port}).encode())
        await until_shutdown(watches_input=options.child, users=server, lifeline=supervised.get("lifeline"))
    finally:
        for task in (loading, topology_task):
            if task is not None:
                task.cancel()
        if control:
            await control.stop()
        await server.stop()
        await appliers.stop()
        logger.info("ended")


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


class UserSource(Protocol):
    """A server, or the master of workers, with the users of an ACL file."""

    @property
    def users(self) -> Users:
        """The current users."""

    def reload_users(self) -> None:
        """Read the ACL file again, for all connections; AccessError if it is invalid: then nothing changes."""


async def until_shutdown(
    *,
    watches_input: bool,
    users: UserSource | None = None,
    lifeline: int | None = None,
    reload: Callable[[], None] | None = None,
) -> bool:
    """Wait for SIGTERM, SIGINT, or the end of the parent process; True if a signal came.

    watches_input: the parent's end closes stdin. lifeline: another descriptor that closes at the parent's end. SIGHUP,
    which a closing terminal also sends, reloads the ACL file, and calls `reload`.
    """
    # Exclude all present objects from garbage collection, which would take a seventh of a proxy's time (measured).
    gc.freeze()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _finish, ended, True)
    loop.add_signal_handler(signal.SIGHUP, _hang_up, users, reload)
    if watches_input:
        lifeline = sys.stdin.fileno()
    if lifeline is not None:
        loop.add_reader(lifeline, _on_input, ended, lifeline)
    return await ended


def _hang_up(server: UserSource | None, reload: Callable[[], None] | None) -> None:
    if reload is not None:
        reload()
    _reload_users(server)


def _reload_users(server: UserSource | None) -> None:
    if server is None or server.users.path is None:
        logger.info("SIGHUP: there is no ACL file to reload; changed certificates are reloaded without a signal")
        return
    try:
        server.reload_users()
    except AccessError as error:
        logger.error("SIGHUP: %s", error)
    else:
        logger.info("SIGHUP: read %d users from %s", len(server.users), server.users.path)


def _finish(ended: asyncio.Future[bool], is_signal: bool) -> None:
    if not ended.done():
        ended.set_result(is_signal)


def _on_input(ended: asyncio.Future[bool], descriptor: int) -> None:
    if not os.read(descriptor, 4096):
        asyncio.get_running_loop().remove_reader(descriptor)
        _finish(ended, False)


PROGRAM = Program("serve", DESCRIPTION, EXAMPLES, add_options, serve)
run, main = PROGRAM.run, PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
