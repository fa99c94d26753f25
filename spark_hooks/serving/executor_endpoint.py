"""Serving beside executors: the driver's part.

    driver ─┬─ registry   assigns slots to state servers (`resp_server/registry`)
            └─ proxy      listens at the address in `url`; plain Redis clients read all servers through it
    executor ── task ─► executor supervisor ── state server      (spark_hooks/serving/placement.py)

Registry and proxy are child processes; they are restarted when they die, and end with the driver. The tasks of sinks
and attachments start state servers. A small Spark job here starts servers as well, so that a log is readable before any
query has data.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from resp_server.net import children
from resp_server.net.addresses import address_of, host_and_port
from resp_server.net.children import SERVER_PASSWORD_VARIABLE, TOKEN_VARIABLE
from resp_server.net.client import Client
from resp_server.net.listeners import is_wildcard
from resp_server.net.tls import TlsFiles
from resp_server.programs.registry import FENCED_CODE
from resp_server.registry.registry_file import read_registry_file
from resp_server.registry.report import DRAIN_S_MAX
from resp_server.settings.groups import Executors
from spark_hooks.serving import endpoints, placement
from spark_hooks.serving.placement import ClientOptions, ServerPlan
from spark_hooks.serving.supervised_process import SupervisedProcess
from spark_hooks.serving.upstream import UpstreamOptions
from spark_hooks.sessions import is_stopped, parallelism_of
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.serve")

# The pause between two checks for connected state servers. If there is none, the Spark job runs again (guess).
CHECK_INTERVAL_S = 5.0
PLACEMENT_RETRY_S_MAX = 60.0
# Spark sends tasks to executors with a free core: a few more tasks than cores reach all executors (guess).
TASKS_PER_CORE = 2
FENCED = (
    "another registry has taken over the log {log}: a standby registry, or the registry of another driver. If it is "
    "another driver's, give each application its own log, or call sparkis.serve(spark, placement='driver')"
)
# After all servers were requested to end: the longest wait for the next one to end.
SHUTDOWN_TIMEOUT_S = 3.0
SHUTDOWN_POLL_S = 0.05


@dataclass(frozen=True)
class ClusterOptions:
    """The arguments and settings of `serve` with placement `executors`, validated.

    host           the driver's host, as executors reach it
    bind           the address that the registry listens on
    executors      the argument, with Spark's settings
    registry_port  0: any free port
    tls            the files of all processes; each has them on its own host
    metrics_arguments  of the proxy
    """

    host: str
    bind: str
    replicas: int
    ports: str
    registry_port: int
    executors: Executors
    password: str | None = field(repr=False)
    tls: TlsFiles | None = None
    client_options: ClientOptions = field(default_factory=ClientOptions)
    upstream: UpstreamOptions = field(default_factory=UpstreamOptions)
    metrics_arguments: Sequence[str] = ()


class ExecutorsEndpoint(endpoints.ServedEndpoint):
    """State servers beside executors, behind a proxy beside the driver. registry: the registry's address.

    Epochs are announced to the log's leader: this driver's registry, or a standby registry that has taken over.
    """

    def __init__(self, spark: SparkSession, log: str, options: ClusterOptions, *, port: int, bind: list[str]) -> None:
        super().__init__()
        self.log = log
        self._spark = spark
        self._options = (options, port, bind)
        self.tls = options.tls
        # With a token from the environment, state servers that a user starts can register as well.
        self._token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        # Servers that listen on other addresses than loopback always have a password; an ACL file has the users' own.
        needs_no_password = (
            options.host in ("127.0.0.1", "::1", "localhost") or options.client_options.acl_file is not None
        )
        self.password = options.password or (None if needs_no_password else secrets.token_hex(16))
        between = os.environ.get(SERVER_PASSWORD_VARIABLE) or secrets.token_hex(16)
        server_password = between if options.client_options.has_users else None
        self._registry_process = SupervisedProcess(
            "the sparkis registry",
            _registry_command(options, log),
            self._environment(),
            final_exits={FENCED_CODE: FENCED.format(log=log)},
        )
        self.registry = address_of(options.host, self._registry_process.port)
        self._filesystem = open_filesystem(log)
        reached_at = _local_address(options.bind)
        self._own_registry = endpoints.ControlAddress(self._registry_process.port, self._token, reached_at, options.tls)
        self._leader = self._own_registry
        self._pending_epochs: dict[str, tuple[int, int]] = {}  # job: its newest epoch and its term
        self._has_pending = threading.Event()
        try:
            self._proxy_process = SupervisedProcess(
                "the sparkis proxy",
                _proxy_command(options, address_of(reached_at, self._registry_process.port), port, bind),
                options.upstream.environment(self._environment(options.password, server_password or self.password)),
            )
        except SparkisError:
            self._registry_process.stop()
            raise
        self.port = self._proxy_process.port
        self.url = endpoints.url_of(_local_address(bind[0]), self.port, options.password, options.tls)
        self.plan = ServerPlan(
            id=secrets.token_hex(8),
            registry=(options.host, self._registry_process.port),
            log=log,
            ports=options.ports,
            bind=options.executors.bind,
            advertise=options.executors.host,
            token=self._token,
            password=self.password,
            server_password=server_password,
            tls=options.tls,
            client_options=options.client_options,
        )
        threading.Thread(target=self._send_notices, name="sparkis-notices", daemon=True).start()
        placement.register(self.plan)
        endpoints.add(log, self)
        atexit.register(self.stop)
        threading.Thread(target=self._run_placement, name="sparkis-placement", daemon=True).start()

    @property
    def pids(self) -> tuple[int, int]:
        """The process ids of the registry and of the proxy."""
        return self._registry_process.pid, self._proxy_process.pid

    def has_options(self, options: ClusterOptions, port: int, bind: list[str]) -> bool:
        """Return whether these options would start the same servers, and this endpoint has not ended."""
        has_ended = self._registry_process.has_ended or self._proxy_process.has_ended or is_stopped(self._spark)
        return self._options == (options, port, bind) and not (has_ended or self._stopping.is_set())

    def members(self) -> list[dict[str, Any]]:
        """Return the registry's record of each connected state server; SparkisError if the registry does not answer."""
        with self._connect() as client:
            return _connected_members(client)

    def announce(self, job: str, epoch: int, term: int) -> None:
        """Queue the announcement of a committed epoch. Returns at once: a batch must not wait for a remote registry."""
        self._pending_epochs[job] = epoch, term
        self._has_pending.set()

    def stop(self) -> None:
        """Stop the registry, the proxy and the servers on executors. The log stays unchanged.

        Before that, servers that a user has started take over the slots, which takes some seconds at most.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._has_pending.set()
        atexit.unregister(self.stop)
        placement.unregister(self.plan)
        endpoints.remove(self.log, self)
        with suppress(Exception):  # a stopped Spark raises many kinds of errors
            self._spark.sparkContext.cancelJobGroup(self._job_group)
        try:
            self._stop_servers()
        except (SparkisError, OSError) as error:
            logger.warning("the servers on executors could not be stopped; they end with their executors: %s", error)
        self._proxy_process.stop()
        self._registry_process.stop()

    def _stop_servers(self) -> None:
        with self._connect() as client:
            client.call("END", self.plan.id, timeout_s=DRAIN_S_MAX + endpoints.CONTROL_TIMEOUT_S)
            running, deadline_s = self._server_count(client), time.monotonic() + SHUTDOWN_TIMEOUT_S
            while running and time.monotonic() < deadline_s:
                time.sleep(SHUTDOWN_POLL_S)
                before, running = running, self._server_count(client)
                if running < before:
                    deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S

    def _server_count(self, registry: Client) -> int:
        return sum(member["driver"] == self.plan.id for member in _connected_members(registry))

    def _send_notices(self) -> None:
        """Announce the queued epochs over one connection. Runs in a separate thread."""
        while not self._stopping.is_set():
            self._has_pending.wait()
            self._has_pending.clear()
            for job in list(self._pending_epochs):
                super().announce(job, *self._pending_epochs.pop(job))
        self._disconnect()

    def _run_placement(self) -> None:
        """Place servers at once, and again whenever none is connected. Runs in a separate thread."""
        pause_s = CHECK_INTERVAL_S
        while not self._stopping.is_set() and not is_stopped(self._spark):
            try:
                self._place()
            except Exception as error:
                if self._stopping.is_set() or is_stopped(self._spark):
                    return
                logger.error("no state servers could be placed: %s; retrying", error)
            while not self._stopping.wait(pause_s) and self._has_members():
                pause_s = CHECK_INTERVAL_S
            pause_s = min(2 * pause_s, PLACEMENT_RETRY_S_MAX)

    def _has_members(self) -> bool:
        try:
            return bool(self.members())
        except (SparkisError, OSError) as error:  # the registry may be restarting
            logger.debug("%r did not answer MEMBERS: %s", self, error)
            self._rediscover()
            return True

    @property
    def _job_group(self) -> str:
        return f"sparkis-{self.plan.id}"

    def _place(self) -> None:
        """Run a small Spark job. Each of its tasks starts a state server if its executor has none."""
        tasks = TASKS_PER_CORE * parallelism_of(self._spark)
        self._spark.sparkContext.setJobGroup(self._job_group, "sparkis: place state servers")
        placed = self._spark.range(0, tasks, 1, tasks).mapInArrow(placement.PlacementTask(self.plan), placement.RESULT)
        for failure in sorted({row.failure for row in placed.collect() if row.failure is not None}):
            logger.error("%s", failure)

    def _address(self) -> endpoints.ControlAddress:
        return self._leader

    def _rediscover(self) -> None:
        """Read the log's leader from the registry's record. Storage may hang, so no thread of a batch may call this."""
        try:
            record = read_registry_file(self._filesystem)
            if record is None or record.address == self.registry:
                self._leader = self._own_registry
            else:
                host, port = host_and_port(record.address)
                self._leader = self._own_registry._replace(host=host, port=port)
        except (SparkisError, ValueError) as error:
            logger.debug("%r: the log's leader is unknown: %s", self, error)

    def _environment(self, password: str | None = None, server_password: str | None = None) -> dict[str, str]:
        environment = children.environment() | {TOKEN_VARIABLE: self._token}
        return placement.with_passwords(environment, password, server_password)


def _registry_command(options: ClusterOptions, log: str) -> list[str]:
    command = [sys.executable, "-m", "resp_server.programs.registry", "--child", "--log", log]
    command += ["--bind", options.bind, "--advertise", options.host, "--port", str(options.registry_port)]
    command += ["--replicas", str(options.replicas), "--loglevel", "warning"]
    return [*command, *placement.tls_arguments(options.tls)]


def _proxy_command(options: ClusterOptions, registry: str, port: int, bind: list[str]) -> list[str]:
    command = [sys.executable, "-m", "resp_server.programs.proxy", "--child", "--registry", registry]
    command += ["--port", str(port), "--bind", *bind, "--loglevel", "warning"]
    command += [*placement.tls_arguments(options.tls), *options.client_options.arguments()]
    return [*command, *options.upstream.arguments, *options.metrics_arguments]


def _local_address(bound: str) -> str:
    """Return the address at which this machine reaches a listener that is bound to an address."""
    if not is_wildcard(bound):
        return bound
    return "::1" if bound == "::" else "127.0.0.1"


def _connected_members(registry: Client) -> list[dict[str, Any]]:
    return [member for member in registry.call("MEMBERS") if member["connected"]]
