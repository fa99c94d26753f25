"""Serving from executors: what the driver runs for it.

    driver ─┬─ registry   knows the state servers and who owns which slots (`resp_server/registry`)
            └─ proxy      what `url` points to: plain clients are answered from all servers
    executor ── task ─► keeper ── state server      (spark_hooks/serving/placement.py)

Both are child processes, started again when they die, which end with the driver. Servers are placed by the tasks of
sinks and attachments; and by a small Spark job here, so that a log can be read before any query has data.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from resp_server.net import children
from resp_server.net.addresses import address_of, host_and_port
from resp_server.net.children import TOKEN_VARIABLE, UPSTREAM_PASSWORD_VARIABLE
from resp_server.net.client import Client
from resp_server.net.listeners import is_wildcard
from resp_server.net.tls import TlsFiles
from resp_server.programs.registry import FENCED_CODE
from resp_server.registry.record import read_record
from resp_server.registry.report import DRAIN_S_MAX
from spark_hooks.serving import endpoints, placement
from spark_hooks.serving.placement import ForClients, Plan
from spark_hooks.serving.supervised_process import SupervisedProcess
from spark_hooks.sessions import is_stopped, parallelism_of
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.serve")

# How often it is looked whether any server is there; where none is, a Spark job places some again (guess).
LOOK_INTERVAL_S = 5.0
PLACE_AGAIN_S_MAX = 60.0
# Tasks go to executors that have a core free, so that a few more tasks than cores reach all of them (guess).
TASKS_PER_CORE = 2
FENCED = (
    "the log {log} has another registry now: one that stood by, which goes on from there, or another driver's; in that "
    "case give each application a log of its own, or call sparkis.serve(spark, placement='driver')"
)
# How long it is waited for the next server to end, of those that were told to.
END_TIMEOUT_S = 3.0
END_LOOK_S = 0.05


@dataclass(frozen=True)
class Cluster:
    """What `serve` was told of servers on executors, checked.

    host, bind     the driver: what executors are told, and what its registry listens on
    registry_port  0: any
    tls            the files of all parts, on the host of each
    """

    host: str
    bind: str
    replicas: int
    ports: str
    server_bind: str | None
    server_host: str | None
    registry_port: int
    password: str | None = field(repr=False)
    tls: TlsFiles | None = None
    for_clients: ForClients = field(default_factory=ForClients)


class PlacedEndpoint(endpoints.ServedEndpoint):
    """Servers beside executors, found through a proxy beside the driver. `registry` is where servers register.

    Whoever is in charge of the log is told and asked: the registry here, or one that has taken its place.
    """

    def __init__(self, spark: SparkSession, log: str, cluster: Cluster, *, port: int, bind: list[str]) -> None:
        super().__init__()
        self.log = log
        self._spark = spark
        # One that is given lets servers in that somebody starts by hand.
        self._token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        # Servers that others than their own machine may ask have a password, given or not; users have their own.
        is_open = cluster.host in ("127.0.0.1", "::1", "localhost") or cluster.for_clients.acl_file is not None
        self.password = cluster.password or (None if is_open else secrets.token_hex(16))
        upstream = os.environ.get(UPSTREAM_PASSWORD_VARIABLE) or secrets.token_hex(16)
        upstream_password = upstream if cluster.for_clients.has_users else None
        self._registry = SupervisedProcess(
            "the sparkis registry",
            _registry(cluster, log),
            self._environment(),
            last_words={FENCED_CODE: FENCED.format(log=log)},
        )
        self.registry = address_of(cluster.host, self._registry.port)
        self._filesystem = open_filesystem(log)
        reached_at = _own_address(cluster.bind)
        self._own = endpoints.ControlAddress(self._registry.port, self._token, reached_at, cluster.tls)
        self._in_charge = self._own
        self._untold: dict[str, int] = {}  # the newest epoch of each job
        self._is_news = threading.Event()
        try:
            self._proxy = SupervisedProcess(
                "the sparkis proxy",
                _proxy(cluster, address_of(reached_at, self._registry.port), port, bind),
                self._environment(cluster.password, upstream_password or self.password),
            )
        except SparkisError:
            self._registry.stop()
            raise
        self.port = self._proxy.port
        self.url = endpoints.url_of(_own_address(bind[0]), self.port, cluster.password, cluster.tls)
        self.plan = Plan(
            id=secrets.token_hex(8),
            registry=(cluster.host, self._registry.port),
            log=log,
            ports=cluster.ports,
            bind=cluster.server_bind,
            advertise=cluster.server_host,
            token=self._token,
            password=self.password,
            upstream_password=upstream_password,
            tls=cluster.tls,
            for_clients=cluster.for_clients,
        )
        threading.Thread(target=self._keep_telling, name="sparkis-teller", daemon=True).start()
        placement.know(self.plan)
        endpoints.add(log, self)
        atexit.register(self.stop)
        threading.Thread(target=self._keep_placing, name="sparkis-placer", daemon=True).start()

    @property
    def pids(self) -> tuple[int, int]:
        """The process ids of the registry and of the proxy."""
        return self._registry.pid, self._proxy.pid

    def members(self) -> list[dict[str, Any]]:
        """Return what the registry tells of each state server that is there; SparkisError if it does not answer."""
        with self._connect() as client:
            return _connected(client)

    def notice(self, job: str, epoch: int) -> None:
        """Have servers told of a committed epoch. At once: no batch waits for a registry that may be anywhere."""
        self._untold[job] = epoch
        self._is_news.set()

    def stop(self) -> None:
        """End registry, proxy, and the servers on executors; clients are disconnected. The log stays as it is.

        Servers that were started by hand take over first, for some seconds at most.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._is_news.set()
        atexit.unregister(self.stop)
        placement.forget(self.plan)
        endpoints.remove(self.log, self)
        with suppress(Exception):  # Spark itself may have stopped, and says so in many ways
            self._spark.sparkContext.cancelJobGroup(self._job_group)
        try:
            self._end_servers()
        except (SparkisError, OSError) as error:
            logger.warning("the servers on executors were not told to end, and end with them: %s", error)
        self._proxy.stop()
        self._registry.stop()

    def _end_servers(self) -> None:
        with self._connect() as client:
            client.call("END", self.plan.id, timeout_s=DRAIN_S_MAX + endpoints.CONTROL_TIMEOUT_S)
            left, ends_s = self._placed(client), time.monotonic() + END_TIMEOUT_S
            while left and time.monotonic() < ends_s:
                time.sleep(END_LOOK_S)
                before, left = left, self._placed(client)
                if left < before:
                    ends_s = time.monotonic() + END_TIMEOUT_S

    def _placed(self, registry: Client) -> int:
        return sum(member["driver"] == self.plan.id for member in _connected(registry))

    def _keep_telling(self) -> None:
        """Tell of epochs, over one connection."""
        while not self._stopping.is_set():
            self._is_news.wait()
            self._is_news.clear()
            for job in list(self._untold):
                super().notice(job, self._untold.pop(job))
        self._disconnect()

    def _keep_placing(self) -> None:
        """Place servers now, and again whenever there are none."""
        pause_s = LOOK_INTERVAL_S
        while not self._stopping.is_set() and not is_stopped(self._spark):
            try:
                self._place()
            except Exception as error:
                if self._stopping.is_set() or is_stopped(self._spark):
                    return
                logger.error("no state servers could be placed: %s; tried again", error)
            while not self._stopping.wait(pause_s) and self._has_members():
                pause_s = LOOK_INTERVAL_S
            pause_s = min(2 * pause_s, PLACE_AGAIN_S_MAX)

    def _has_members(self) -> bool:
        try:
            return bool(self.members())
        except (SparkisError, OSError) as error:  # it is being started again
            logger.debug("%r did not answer MEMBERS: %s", self, error)
            self._look_anew()
            return True

    @property
    def _job_group(self) -> str:
        return f"sparkis-{self.plan.id}"

    def _place(self) -> None:
        """Run a small Spark job, each of whose tasks makes sure that there is a server."""
        tasks = TASKS_PER_CORE * parallelism_of(self._spark)
        self._spark.sparkContext.setJobGroup(self._job_group, "sparkis: place state servers")
        placed = self._spark.range(0, tasks, 1, tasks).mapInArrow(placement.PlacingTask(self.plan), placement.RESULT)
        for failure in sorted({row.failure for row in placed.collect() if row.failure is not None}):
            logger.error("%s", failure)

    def _address(self) -> endpoints.ControlAddress:
        return self._in_charge

    def _look_anew(self) -> None:
        """Find out who is in charge. Storage may hang: never in a batch's thread."""
        try:
            record = read_record(self._filesystem)
            if record is None or record.address == self.registry:
                self._in_charge = self._own
            else:
                host, port = host_and_port(record.address)
                self._in_charge = self._own._replace(host=host, port=port)
        except (SparkisError, ValueError) as error:
            logger.debug("%r: who is in charge of the log is not known: %s", self, error)

    def _environment(self, password: str | None = None, upstream_password: str | None = None) -> dict[str, str]:
        environment = children.environment() | {TOKEN_VARIABLE: self._token}
        return placement.with_passwords(environment, password, upstream_password)


def _registry(cluster: Cluster, log: str) -> list[str]:
    command = [sys.executable, "-m", "resp_server.programs.registry", "--child", "--log", log]
    command += ["--bind", cluster.bind, "--advertise", cluster.host, "--port", str(cluster.registry_port)]
    command += ["--replicas", str(cluster.replicas), "--loglevel", "warning"]
    return [*command, *placement.tls_arguments(cluster.tls)]


def _proxy(cluster: Cluster, registry: str, port: int, bind: list[str]) -> list[str]:
    command = [sys.executable, "-m", "resp_server.programs.proxy", "--child", "--registry", registry]
    command += ["--port", str(port), "--bind", *bind, "--loglevel", "warning"]
    return [*command, *placement.tls_arguments(cluster.tls), *cluster.for_clients.arguments()]


def _own_address(bound: str) -> str:
    """Return where this machine reaches what listens there."""
    if not is_wildcard(bound):
        return bound
    return "::1" if bound == "::" else "127.0.0.1"


def _connected(registry: Client) -> list[dict[str, Any]]:
    return [member for member in registry.call("MEMBERS") if member["connected"]]
