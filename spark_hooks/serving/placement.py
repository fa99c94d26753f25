"""State servers beside executors: the plan that the driver makes, and the tasks that start the servers.

    driver       `serve` makes a `ServerPlan` and registers it under its log (`register`, `plan_of`)
    executor     every task that writes into the log calls `ensure_state_server` first, in Spark's Python worker. Each
                 executor has one lock file; the task that gets the lock starts the executor supervisor
                 (resp_server/programs/executor_supervisor.py)

A Python worker does not know its executor. But Spark gives it the folders of the block manager, and each executor has
its own. The executor's JVM is one of the worker's ancestors: the parent; the grandparent with Spark's Python daemon; or
one farther up if a script starts Python.
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
from resp_server.net.children import PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, TOKEN_VARIABLE
from resp_server.net.listeners import address_towards, is_wildcard
from resp_server.net.tls import TlsFiles
from resp_server.programs.executor_supervisor import ENDED, FAILED, STOP_S_MAX, STORE, start_of
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.executors")

# In Spark's Python workers: the folders of the executor's block manager, separated by commas.
LOCAL_DIRS_VARIABLE = "SPARK_LOCAL_DIRS"
LOCK = "lock"
REPORTED = "reported"
# A supervisor starts within 0.1 s (measured); a loaded machine takes longer.
START_TIMEOUT_S = 30.0
# After a failed start, the pause before a task tries again (guess).
RETRY_S = 60.0
ANCESTORS_MAX = 32
# Variables of Spark's Python workers that servers do not inherit: a secret, and a fixed seed of hashes.
WORKER_VARIABLES = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHONHASHSEED")

# The schema of the rows that `PlacementTask` returns, as Spark's DDL.
RESULT = "failure string"


class PlacementError(SparkisError):
    """No state server can be started beside an executor."""


@dataclass(frozen=True)
class ClientOptions:
    """The options about clients that servers and proxies share, validated; picklable.

    acl_file       the file of users; each process has it on its own host
    rate_limits    texts for `RateLimit.parse`
    notify_events  the letters of event classes
    limits         options of other limits
    """

    acl_file: str | None = None
    rate_limits: tuple[str, ...] = ()
    notify_events: str = ""
    limits: tuple[str, ...] = ()

    @property
    def has_users(self) -> bool:
        """Return whether users have rules or rate limits; then servers and proxies have a password of their own."""
        return self.acl_file is not None or bool(self.rate_limits)

    def arguments(self) -> list[str]:
        """Return the command line options for a server or a proxy."""
        users = [] if self.acl_file is None else ["--aclfile", self.acl_file]
        rates = [f"--rate-limit={each}" for each in self.rate_limits]
        events = [f"--notify-keyspace-events={self.notify_events}"] if self.notify_events else []
        return [*users, *rates, *events, *self.limits]


@dataclass(frozen=True)
class ServerPlan:
    """The configuration of a state server; picklable. It travels in the closures of tasks, never on a command line.

    ports      a port range; a server takes the first free port
    bind       the address to listen on; default: the address from which the executor's machine reaches the driver
    advertise  the host that clients connect to; `$NAME` in it is a variable of the executor's environment
    tls        the paths of the certificates on the executor's host; the files' contents do not travel
    server_password  the password of the proxy and the other servers, where they do not use the clients' password
    """

    id: str
    registry: tuple[str, int]
    log: str
    ports: str
    bind: str | None = None
    advertise: str | None = None
    token: str = field(default="", repr=False)
    password: str | None = field(default=None, repr=False)
    server_password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    client_options: ClientOptions = field(default_factory=ClientOptions)


_plans: dict[str, ServerPlan] = {}


def register(plan: ServerPlan) -> None:
    """Register a plan: tasks that write into its log start servers from now on. Called on the driver."""
    _plans[plan.log] = plan


def unregister(plan: ServerPlan) -> None:
    """Unregister a plan: tasks start no more servers. Called on the driver."""
    if _plans.get(plan.log) == plan:
        del _plans[plan.log]


def plan_of(log: str) -> ServerPlan | None:
    """Return the plan that is registered under a log's root, or None. Called on the driver."""
    return _plans.get(log)


@dataclass(frozen=True)
class PlacementTask:
    """A task for `mapInArrow` that only starts a state server, if its executor has none."""

    plan: ServerPlan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row: the error text, or null if there is a server."""
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"failure": pa.array([ensure_state_server(self.plan)], pa.string())})


def ensure_state_server(plan: ServerPlan | None) -> str | None:
    """Start a state server beside this executor if there is none; return the error text of a failure, once.

    Runs at the start of every task; takes microseconds if a server runs. Never raises an error: a job goes on without
    servers. A failure is logged once in the executor's log, and returned to one task; other tasks get None.
    """
    if plan is None:
        return None
    try:
        folder = _folder(plan)
        return _ensure(plan, folder)
    except (SparkisError, OSError, subprocess.SubprocessError) as error:
        text = f"no state server can be started beside the executor at {platform.node()}: {error}"
        if text in _reported:
            return None
        _reported.add(text)
        logger.error("%s", text)
        return text


_reported: set[str] = set()


def _folder(plan: ServerPlan) -> str:
    """Return the folder that the tasks of this executor share; Spark removes it with the executor."""
    folders = os.environ.get(LOCAL_DIRS_VARIABLE, "").split(",")
    if not folders[0]:
        raise PlacementError(f"{LOCAL_DIRS_VARIABLE} is not set: this process is not a Python worker of Spark")
    return f"{folders[0]}/sparkis-{plan.id}"


def _ensure(plan: ServerPlan, folder: str) -> str | None:
    try:
        lock = _open_lock(folder)
    except FileNotFoundError:
        os.makedirs(folder, 0o700, exist_ok=True)
        lock = _open_lock(folder)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _take_failure(folder)
        if not (os.path.exists(f"{folder}/{ENDED}") or _has_failed_recently(folder)):
            try:
                _start_supervisor(plan, folder, lock)
            except (SparkisError, OSError, subprocess.SubprocessError) as error:
                Path(folder, FAILED).write_text(str(error))
        return _take_failure(folder)
    finally:
        os.close(lock)  # the supervisor has inherited the lock


def _open_lock(folder: str) -> int:
    return os.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _take_failure(folder: str) -> str | None:
    """Return the error of the supervisor, or of the last start, to the first task that calls; None to others."""
    try:
        os.rename(f"{folder}/{FAILED}", f"{folder}/{REPORTED}")
    except FileNotFoundError:
        return None
    text = f"no state server beside the executor at {platform.node()}: {Path(folder, REPORTED).read_text()}"
    logger.error("%s", text)
    return text


def _has_failed_recently(folder: str) -> bool:
    for name in (FAILED, REPORTED):
        with suppress(FileNotFoundError):
            if time.time() - os.stat(f"{folder}/{name}").st_mtime < RETRY_S:
                return True
    return False


def _start_supervisor(plan: ServerPlan, folder: str, lock: int) -> None:
    """Start the supervisor, which starts the server; return once the supervisor has the lock and runs detached."""
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
            f"the executor's stderr has its error (are sparkis and its dependencies installed there?)"
        )


def _check_memory() -> None:
    """Raise PlacementError if spark.executor.pyspark.memory is set: servers would inherit its address space limit."""
    _, limit = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        raise PlacementError(
            f"the address space of processes that a Python worker starts is limited to {limit >> 20} MiB, and a store "
            f"maps more: unset spark.executor.pyspark.memory, or serve with placement='driver'"
        )


def _server(plan: ServerPlan, folder: str) -> list[str]:
    """Return the command line of a state server, without secrets."""
    bind = plan.bind or address_towards(plan.registry)
    host = os.path.expandvars(plan.advertise) if plan.advertise else bind
    if is_wildcard(host):
        host = address_towards(plan.registry)
    if "$" in host:
        raise PlacementError(
            f"Executors(host={plan.advertise!r}) names an environment variable that is not set on this executor"
        )
    command = [sys.executable, "-m", "resp_server.programs.state_server", "--child"]
    command += ["--registry", address_of(*plan.registry), "--log", plan.log, "--store", f"{folder}/{STORE}"]
    command += ["--ports", plan.ports, "--bind", bind, "--advertise", host]
    command += ["--driver", plan.id, "--zone", f"executors of {plan.id}"]  # all end with their application
    command += ["--compact", "--loglevel", "warning", "--drain-timeout", str(STOP_S_MAX - 1)]
    return [*command, *tls_arguments(plan.tls), *plan.client_options.arguments()]


def tls_arguments(tls: TlsFiles | None) -> list[str]:
    """Return the command line options of TLS; none without TLS."""
    return [] if tls is None else tls.arguments()


def _environment(plan: ServerPlan) -> dict[str, str]:
    """Return the environment of a server: the worker's without Spark's own variables, with the plan's secrets."""
    environment = {name: value for name, value in children.environment().items() if name not in WORKER_VARIABLES}
    environment[TOKEN_VARIABLE] = plan.token
    return with_passwords(environment, plan.password, plan.server_password)


def with_passwords(environment: dict[str, str], password: str | None, server_password: str | None) -> dict[str, str]:
    """Return an environment with these passwords and no others."""
    passwords = {PASSWORD_VARIABLE: password, SERVER_PASSWORD_VARIABLE: server_password}
    others = {name: value for name, value in environment.items() if name not in passwords}
    return others | {name: value for name, value in passwords.items() if value is not None}


def _jvm() -> tuple[int, str]:
    """Return the process id and the start time of the executor's JVM."""
    pid = os.getpid()
    for _ in range(ANCESTORS_MAX):
        pid = _parent_of(pid)
        if pid <= 0:
            break
        if _is_jvm(pid):
            start = start_of(pid)
            if start is not None:
                return pid, start
    raise PlacementError(f"the executor's JVM was not found among the ancestors of process {os.getpid()} in /proc")


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_jvm(pid: int) -> bool:
    """Return whether a process is a JVM: by its name, or by its library if another program launched it."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
            return True
        return "libjvm.so" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
