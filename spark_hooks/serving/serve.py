"""`sparkis.serve`: a server process beside the driver, or state servers beside executors (`executor_endpoint`).

    endpoint = sparkis.serve(spark)      endpoint.url, endpoint.stop()

The servers follow the session's change log like any other server. The driver announces each epoch to them at once, and
can wait until the epoch is readable.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from resp_server.net import children
from resp_server.net.addresses import PORT_MAX
from resp_server.net.tls import TlsFiles
from resp_server.settings.groups import Driver, Executors, Limits, Upstream
from resp_server.settings.programs import WORKERS_MAX
from resp_server.settings.tls import Tls
from spark_hooks.serving import arguments, endpoints
from spark_hooks.serving.arguments import PlacementName, names_groups
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from spark_hooks.serving.detached_server import seconds_of
from spark_hooks.serving.endpoints import LOG_SETTING, ServedEndpoint
from spark_hooks.serving.executor_endpoint import ClusterOptions, ExecutorsEndpoint
from spark_hooks.serving.placement import ClientOptions, tls_arguments, with_passwords
from spark_hooks.serving.upstream import UpstreamOptions
from spark_hooks.sessions import check_connect
from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.serve")

REPLACED = "%r is replaced: it was ended, or sparkis.serve was called again with other options"
# More copies than anybody needs (guess).
REPLICAS_MAX = 10


@names_groups
def serve(
    spark: SparkSession,
    *,
    log: str | Path | None = None,
    port: int = 0,
    bind: str | Sequence[str] = ("127.0.0.1",),
    password: str | None = None,
    acl_file: str | Path | None = None,
    notify_keyspace_events: str | None = None,
    workers: int = 1,
    replicas: int | None = None,
    metrics: int | str | None = None,
    placement: PlacementName | Driver | Executors | None = None,
    tls: Tls | None = None,
    upstream: Upstream | None = None,
    limits: Limits | None = None,
) -> ServedEndpoint:
    """Start servers for a change log, set it as the session's log, and return their endpoint.

    All servers are processes without a JVM. If the log already has a server beside the driver, for example after a
    crash of the driver, this driver takes it over. A state server ends with its executor. A second call with the same
    arguments returns the endpoint of the first; with others, it replaces the servers. Most arguments can be
    settings of Spark instead: see docs/access.md, docs/push.md, docs/tls.md and docs/placement.md.

    Args:
        spark: The session whose queries publish to the log.
        log: The root of the change log. Default: the setting `spark.sparkis.log`. The log belongs to the queries'
            checkpoints: a query that continues with another log publishes only the keys that change from then on.
        port: The port for clients; 0: any free port.
        bind: The address or addresses to listen on. Without a password, only clients on this machine are accepted.
        password: The password that clients send with AUTH.
        acl_file: Instead of `password`: the file of users and their rules, on the host of each process.
        notify_keyspace_events: The classes of keyspace events to publish, as in Redis: `KEA`.
        workers: With a server beside the driver: the number of processes that serve the port; each can use a core.
        replicas: With state servers beside executors: the number of further copies of each slot. Default: 0.
        metrics: The port, or `HOST:PORT`, at which the server, or the proxy beside the driver, answers `/metrics`,
            `/livez` and `/readyz` by HTTP (docs/metrics.md); needs `sparkis[metrics]`. Default: none.
        placement: `Driver(...)`, or `driver`: one server beside this driver. `Executors(...)`, or `executors`: a state
            server beside each executor, a registry and a proxy beside this driver. Default: `driver` where the master
            is local, else `executors`.
        tls: The certificate of all ports, which then accept only TLS (docs/tls.md).
        upstream: Your own Redis, which has all keys that no state owns: clients then read and write both at
            `endpoint.url` (docs/swap.md).
        limits: Rates of users, and limits of clients by the names of Redis' settings.

    Raises:
        DescriptorError: No log is given.
        SparkisError: A server does not start, or the log cannot be written.
        ValueError: An argument is invalid, or has no effect with the placement.
        TypeError: A group is something else, or an argument is in a group now.

    Examples:
        >>> import redis
        >>> limits = spark.createDataFrame([("boiler", 90)], "sensor string, limit int")
        >>> with sparkis.serve(spark, log=f"{path}/log") as endpoint:
        ...     epoch = sparkis.publish_table(limits, "limits", field="sensor", value="limit", job="rules")
        ...     with redis.Redis.from_url(endpoint.url, decode_responses=True) as client:
        ...         client.hgetall("rules:limits")
        {'boiler': '90'}
    """
    if not hasattr(spark, "conf"):
        raise TypeError(f"sparkis.serve takes the SparkSession first, sparkis.serve(spark, log=...), not {spark!r}")
    check_connect(spark)
    arguments.check_groups(tls=tls, upstream=upstream, limits=limits)
    port = arguments.number("port", port, PORT_MAX)
    place = arguments.placed(spark, placement)
    if not 1 <= workers <= WORKERS_MAX:
        raise ValueError(f"workers={workers!r}: give a number of processes from 1 to {WORKERS_MAX}")
    if isinstance(place, Executors):
        arguments.refuse_ineffective("executors", workers=workers if workers > 1 else None)
    else:
        arguments.refuse_ineffective("driver", replicas=replicas)
        if upstream is not None and place.role != "master":
            raise ValueError(f"role={place.role!r} has no effect with upstream, which has a role itself; leave it out")
    root, hosts = _log_root(spark, log), arguments.hosts_of(bind)
    metrics_arguments = arguments.metrics_arguments(metrics)
    files = arguments.tls_files(arguments.filled(spark, tls or Tls()))
    limits = arguments.filled(spark, limits or Limits())
    client_options = arguments.client_options(spark, password, acl_file, notify_keyspace_events, limits)
    upstream_options = UpstreamOptions.of(upstream, password, client_options.acl_file)
    endpoint: ServedEndpoint
    if isinstance(place, Executors):
        executors = arguments.filled(spark, place)
        host = spark.conf.get("spark.driver.host", None) or "127.0.0.1"
        options = ClusterOptions(
            host=host.strip("[]"),
            bind=(spark.conf.get("spark.driver.bindAddress", None) or host).strip("[]"),
            replicas=arguments.number("replicas", arguments.option(spark, "replicas", replicas) or "0", REPLICAS_MAX),
            ports=arguments.ports_of(executors),
            registry_port=arguments.number("registry_port", executors.registry_port or 0, PORT_MAX),
            executors=executors,
            password=password,
            tls=files,
            client_options=client_options,
            upstream=upstream_options,
            metrics_arguments=tuple(metrics_arguments),
        )
        endpoint = _serve_beside_executors(spark, root, options, port, hosts)
    else:
        command = [*_command(root, hosts, place, workers, files, client_options), *upstream_options.arguments]
        endpoint = _serve_beside_driver(
            spark,
            root,
            [*command, *metrics_arguments],
            with_passwords(upstream_options.environment(children.environment()), password, None),
            place,
            port=port,
            host="127.0.0.1" if hosts[0] == "0.0.0.0" else hosts[0],
            password=password,
            tls=files,
            has_proxy=upstream_options.url is not None,
        )
    spark.conf.set(LOG_SETTING, root)
    return endpoint


def _log_root(spark: SparkSession, argument: str | Path | None) -> str:
    """Return the root of the log, which can be written; DescriptorError if none is given."""
    chosen = argument or spark.conf.get(LOG_SETTING, None)
    if chosen is None:
        raise DescriptorError(
            f"sparkis.serve needs a change log: pass log='/a/permanent/folder', or set {LOG_SETTING}. The log belongs "
            f"to the queries' checkpoints: put it beside them, and keep or delete both together"
        )
    root = open_filesystem(chosen).root
    check_writable(root)
    return root


def _serve_beside_executors(
    spark: SparkSession, root: str, options: ClusterOptions, port: int, hosts: list[str]
) -> ServedEndpoint:
    for before in endpoints.of_log(root):
        if isinstance(before, ExecutorsEndpoint):  # a log has one registry
            if before.has_options(options, port, hosts):
                return before
            logger.warning(REPLACED, before)
            before.stop()
    return ExecutorsEndpoint(spark, root, options, port=port, bind=hosts)


def _command(
    root: str, hosts: Sequence[str], driver: Driver, workers: int, tls: TlsFiles | None, client_options: ClientOptions
) -> list[str]:
    command = [sys.executable, "-m", "resp_server.programs.serve", "--log", root, "--bind", *hosts]
    command += ["--role", driver.role, "--loglevel", "warning", "--workers", str(workers)]
    return [*command, *tls_arguments(tls), *client_options.arguments()]


def _serve_beside_driver(
    spark: SparkSession,
    root: str,
    command: list[str],
    environment: dict[str, str],
    driver: Driver,
    *,
    port: int,
    host: str,
    password: str | None,
    tls: TlsFiles | None,
    has_proxy: bool,
) -> ServedEndpoint:
    linger_s, store = seconds_of(driver.linger), arguments.expanded(driver.store)
    endpoint: DetachedEndpoint | None = None
    for before in endpoints.of_log(root):
        if isinstance(before, DetachedEndpoint) and before.has_options(command, environment, port, store):
            before.set_linger(linger_s)
            endpoint = before
        elif isinstance(before, DetachedEndpoint):
            logger.warning(REPLACED, before)
            before.stop()
    if endpoint is None:
        endpoint = DetachedEndpoint(
            command,
            environment,
            log=root,
            host=host,
            port=port,
            password=password,
            store=store,
            linger_s=linger_s,
            tls=tls,
            has_proxy=has_proxy,
        )
    spark.conf.set(endpoints.ADDRESS_SETTING, str(endpoint.address_file))
    return endpoint
