"""State servers beside executors: how a task makes sure that there is one, and how the driver says which.

    driver       `Plan`, made by `serve`, known by its log (`know`, `plan_of`)
    executor     `ensure_state_server`, called at the start of every task that writes into the log, in Spark's Python
                 workers: a lock file per executor, and whoever gets the lock starts a keeper
                 (resp_server/programs/executor_supervisor.py)

A Python worker cannot say which executor it belongs to, but Spark gives it the folders of its block manager, and those
are of one executor alone. The JVM is found above it among its ancestors: the parent, or with Spark's Python daemon the
parent's parent, or farther up where Python is started by a script.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from resp_server.net import children
from resp_server.net.addresses import address_of
from resp_server.net.children import PASSWORD_VARIABLE, TOKEN_VARIABLE, UPSTREAM_PASSWORD_VARIABLE
from resp_server.net.listeners import address_towards, is_wildcard
from resp_server.net.tls import TlsFiles
from resp_server.programs.executor_supervisor import ENDED, FAILED, STORE, start_of
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.executors")

# Spark sets it in Python workers, to the folders of the executor's block manager.
LOCAL_DIRS_VARIABLE = "SPARK_LOCAL_DIRS"
LOCK = "lock"
TOLD = "told"
# A keeper is there within a tenth of a second (measured); a loaded machine takes its time.
START_TIMEOUT_S = 30.0
# After a start that failed, tasks leave it at that for a while (guess).
START_AGAIN_S = 60.0
ANCESTORS_MAX = 32
# What Spark tells its Python workers and no server should have: a secret, and that hashes can be foretold.
WORKERS_OWN = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHONHASHSEED")

# The column of the rows that a task which only places a server gives back, as Spark's DDL.
RESULT = "failure string"


class PlacementError(SparkisError):
    """No state server can be started beside an executor."""


@dataclass(frozen=True)
class ForClients:
    """What is said of clients to all that answers them, checked; picklable.

    acl_file       the file of users, on the host of each process
    rate_limits    as `RateLimit.parse` reads them
    notify_events  the letters of classes of events
    """

    acl_file: str | None = None
    rate_limits: tuple[str, ...] = ()
    notify_events: str = ""

    @property
    def has_users(self) -> bool:
        """Tell whether our own processes must not be taken for clients: by rules, or by rates."""
        return self.acl_file is not None or bool(self.rate_limits)

    def arguments(self) -> list[str]:
        """Return the options that say it to one of our processes."""
        users = [] if self.acl_file is None else ["--aclfile", self.acl_file]
        limits = [f"--rate-limit={each}" for each in self.rate_limits]
        return [*users, *limits, *([f"--notify-keyspace-events={self.notify_events}"] if self.notify_events else [])]


@dataclass(frozen=True)
class Plan:
    """What a state server has to know; picklable, travels in the closures of tasks, never on a command line.

    ports      the range of which a server takes the first free one
    bind       the address it listens on; by default the one by which its machine reaches the driver
    advertise  the host that clients are told; `$NAME` in it is a variable of the executor's environment
    tls        where the certificates are on the executor's host; what is in the files does not travel
    upstream_password  what the proxy and the other servers are let in with, where they are not simply clients
    """

    id: str
    registry: tuple[str, int]
    log: str
    ports: str
    bind: str | None = None
    advertise: str | None = None
    token: str = field(default="", repr=False)
    password: str | None = field(default=None, repr=False)
    upstream_password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    for_clients: ForClients = field(default_factory=ForClients)


_plans: dict[str, Plan] = {}


def know(plan: Plan) -> None:
    """Have the tasks that write into the plan's log start servers by it. On the driver."""
    _plans[plan.log] = plan


def forget(plan: Plan) -> None:
    """Start no more servers by a plan. On the driver."""
    if _plans.get(plan.log) == plan:
        del _plans[plan.log]


def plan_of(log: str) -> Plan | None:
    """Return the plan for the tasks that write into a log, by its root. On the driver."""
    return _plans.get(log)


@dataclass(frozen=True)
class PlacingTask:
    """A task that does nothing but to make sure that there is a server; for `mapInArrow`."""

    plan: Plan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row: why there is no server, or nothing."""
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"failure": pa.array([ensure_state_server(self.plan)], pa.string())})


def ensure_state_server(plan: Plan | None) -> str | None:
    """Make sure that a state server runs beside this executor; return why there is none, if that is news.

    Runs at the start of every task, and takes microseconds if there is one. Never raises: a job goes on without
    servers. What went wrong stands in the executor's log, once, and is returned to one task.
    """
    if plan is None:
        return None
    try:
        folder = _folder(plan)
        return _ensure(plan, folder)
    except (SparkisError, OSError, subprocess.SubprocessError) as error:
        text = f"no state server can be started beside the executor at {platform.node()}: {error}"
        if text in _told:
            return None
        _told.add(text)
        logger.error("%s", text)
        return text


_told: set[str] = set()


def _folder(plan: Plan) -> str:
    """Return the folder for what all tasks of this executor share. It is nobody else's, and goes with the executor."""
    folders = os.environ.get(LOCAL_DIRS_VARIABLE, "").split(",")
    if not folders[0]:
        raise PlacementError(f"{LOCAL_DIRS_VARIABLE} is not set, so this is no Python worker of Spark's")
    return f"{folders[0]}/sparkis-{plan.id}"


def _ensure(plan: Plan, folder: str) -> str | None:
    try:
        lock = _open_lock(folder)
    except FileNotFoundError:
        os.makedirs(folder, 0o700, exist_ok=True)
        lock = _open_lock(folder)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _news(folder)
        if not (os.path.exists(f"{folder}/{ENDED}") or _has_failed_lately(folder)):
            try:
                _start_keeper(plan, folder, lock)
            except (SparkisError, OSError, subprocess.SubprocessError) as error:
                Path(folder, FAILED).write_text(str(error))
        return _news(folder)
    finally:
        os.close(lock)  # the keeper has it still


def _open_lock(folder: str) -> int:
    return os.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _news(folder: str) -> str | None:
    """Return what the keeper, or the last start, failed with; to the first task that asks."""
    try:
        os.rename(f"{folder}/{FAILED}", f"{folder}/{TOLD}")
    except FileNotFoundError:
        return None
    text = f"no state server beside the executor at {platform.node()}: {Path(folder, TOLD).read_text()}"
    logger.error("%s", text)
    return text


def _has_failed_lately(folder: str) -> bool:
    for name in (FAILED, TOLD):
        with suppress(FileNotFoundError):
            if time.time() - os.stat(f"{folder}/{name}").st_mtime < START_AGAIN_S:
                return True
    return False


def _start_keeper(plan: Plan, folder: str, lock: int) -> None:
    """Start the keeper, which starts the server; returns when the keeper has the lock and goes on by itself."""
    _check_memory()
    jvm, start = _jvm()
    command = [sys.executable, "-m", "resp_server.programs.executor_supervisor"]
    command += ["--lock", str(lock), "--watch", f"{jvm}:{start}", "--folder", folder, "--", *_server(plan, folder)]
    started = subprocess.run(
        command,
        env=_environment(plan),
        pass_fds=(lock,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=START_TIMEOUT_S,
        start_new_session=True,
        check=False,
    )
    if started.returncode != 0:
        raise PlacementError(
            f"{sys.executable} -m resp_server.programs.executor_supervisor ended with code {started.returncode}; "
            f"the executor's stderr has its last words (are sparkis and what it needs installed there?)"
        )


def _check_memory() -> None:
    """Refuse what Spark does for spark.executor.pyspark.memory: it limits the addresses of all that a worker starts."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        raise PlacementError(
            f"what a Python worker starts may have {most >> 20} MiB of addresses, and a store maps more than any "
            f"machine has: unset spark.executor.pyspark.memory, or serve with placement='driver'"
        )


def _server(plan: Plan, folder: str) -> list[str]:
    """Return the command line of a state server; there is no secret in it."""
    near = plan.bind or address_towards(plan.registry)
    host = os.path.expandvars(plan.advertise) if plan.advertise else near
    if is_wildcard(host):
        host = address_towards(plan.registry)
    if "$" in host:
        raise PlacementError(f"the address to advertise, {plan.advertise}, names a variable that is not set here")
    command = [sys.executable, "-m", "resp_server.programs.state_server", "--child"]
    command += ["--registry", address_of(*plan.registry), "--log", plan.log, "--store", f"{folder}/{STORE}"]
    command += ["--ports", plan.ports, "--bind", near, "--advertise", host]
    command += ["--driver", plan.id, "--zone", f"executors of {plan.id}"]  # which all go with their application
    command += ["--compact", "--loglevel", "warning"]
    return [*command, *tls_arguments(plan.tls), *plan.for_clients.arguments()]


def tls_arguments(tls: TlsFiles | None) -> list[str]:
    """Return the options that tell one of our processes to speak TLS, or none."""
    return [] if tls is None else tls.arguments()


def _environment(plan: Plan) -> dict[str, str]:
    """Return the environment of a server: this worker's, without what is Spark's own, and with the secrets."""
    environment = {name: value for name, value in children.environment().items() if name not in WORKERS_OWN}
    environment[TOKEN_VARIABLE] = plan.token
    return with_passwords(environment, plan.password, plan.upstream_password)


def with_passwords(environment: dict[str, str], password: str | None, upstream_password: str | None) -> dict[str, str]:
    """Return the environment of one of our processes with these passwords, and with no others."""
    given = {PASSWORD_VARIABLE: password, UPSTREAM_PASSWORD_VARIABLE: upstream_password}
    kept = {name: value for name, value in environment.items() if name not in given}
    return kept | {name: value for name, value in given.items() if value is not None}


def _jvm() -> tuple[int, str]:
    """Return the process id of the executor's JVM, and when it was started."""
    pid = os.getpid()
    for _ in range(ANCESTORS_MAX):
        pid = _parent_of(pid)
        if pid <= 0:
            break
        if _is_jvm(pid):
            start = start_of(pid)
            if start is not None:
                return pid, start
    raise PlacementError(f"the executor's JVM was not found above process {os.getpid()} (it is looked for in /proc)")


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_jvm(pid: int) -> bool:
    """Tell whether a process is a JVM: by its name, and where the launcher is another program by its library."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
            return True
        return "libjvm.so" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
