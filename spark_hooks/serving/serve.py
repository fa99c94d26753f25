"""`sparkis.serve`: a server process beside the driver, or state servers beside executors (`executor_endpoint`).

    endpoint = sparkis.serve(spark)      endpoint.url, endpoint.stop()

The servers follow the session's change log like any other server. The driver announces each epoch to them at once, and
can wait until the epoch is readable.
"""

from __future__ import annotations

import logging
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from pyspark.sql import SparkSession

from resp_server.acl.rate_limits import RateLimit
from resp_server.acl.users import Users
from resp_server.commands import command_table
from resp_server.exporter.exposition import check_installed
from resp_server.net import children
from resp_server.net.addresses import PORT_MAX, address_of
from resp_server.net.tls import TlsFiles, server_context
from resp_server.settings.event_classes import ClassesError, classes_of, letters_of
from resp_server.settings.groups import LINGER_S
from resp_server.settings.option_values import http_address
from resp_server.settings.programs import WORKERS_MAX
from resp_server.settings.server import ServerConfig
from spark_hooks.serving import endpoints
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from spark_hooks.serving.detached_server import seconds_of
from spark_hooks.serving.endpoints import LOG_SETTING, ServedEndpoint
from spark_hooks.serving.executor_endpoint import ClusterOptions, ExecutorsEndpoint
from spark_hooks.serving.placement import ClientOptions, tls_arguments, with_passwords
from spark_hooks.serving.upstream import UpstreamOptions
from spark_hooks.sessions import check_connect, is_connect
from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.serve")

PLACEMENT_SETTING = "spark.sparkis.placement"
Placement = Literal["driver", "executors"]
TlsAuthClients = Literal["yes", "no", "optional"]
PORTS = "7400-7500"
REPLACED = "%r is replaced: it was ended, or sparkis.serve was called again with other options"
# More copies than anybody needs (guess).
REPLICAS_MAX = 10


def serve(
    spark: SparkSession,
    *,
    log: str | Path | None = None,
    port: int = 0,
    bind: str | Sequence[str] = ("127.0.0.1",),
    password: str | None = None,
    acl_file: str | Path | None = None,
    rate_limits: str | Sequence[str] | None = None,
    notify_keyspace_events: str | None = None,
    store: str | Path | None = None,
    role: str = "master",
    workers: int = 1,
    metrics: int | str | None = None,
    linger: float | None = LINGER_S,
    tls_cert_file: str | Path | None = None,
    tls_key_file: str | Path | None = None,
    tls_ca_cert_file: str | Path | None = None,
    tls_auth_clients: TlsAuthClients | None = None,
    placement: Placement | None = None,
    replicas: int | None = None,
    ports: str | None = None,
    server_bind: str | None = None,
    server_host: str | None = None,
    registry_port: int | None = None,
    upstream: str | None = None,
    ownership: str | Path | None = None,
    new_jobs: Literal["wait", "take"] | None = None,
    routes: str | Path | None = None,
    copiers: Literal["refuse", "report"] | None = None,
    transactions: Literal["mixed", "strict"] | None = None,
    upstream_auth: Literal["proxy", "client"] | None = None,
    upstream_timeout_ms: int | None = None,
    upstream_connections: int | None = None,
    upstream_pinned: int | None = None,
    upstream_allow: Sequence[str] | None = None,
    upstream_tls_ca_cert_file: str | Path | None = None,
    upstream_tls_cert_file: str | Path | None = None,
    upstream_tls_key_file: str | Path | None = None,
    upstream_tls_server_name: str | None = None,
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
        rate_limits: Limits per user and second, as `USER=COMMANDS[,BYTES]`; one text, or several.
        notify_keyspace_events: The classes of keyspace events to publish, as in Redis: `KEA`.
        store: With placement `driver`: the folder of the server's store, which stays when the server ends. Default: a
            temporary folder.
        role: With placement `driver`: the role that the server reports: `master`, or `slave`, by which clients see
            that it is read-only.
        workers: With placement `driver`: the number of processes that serve the port; each can use a core.
        metrics: The port, or `HOST:PORT`, at which the server, or the proxy beside the driver, answers `/metrics`,
            `/livez` and `/readyz` by HTTP (docs/metrics.md); needs `sparkis[metrics]`. Default: none.
        linger: With placement `driver`: how many seconds the server stays after this driver was killed or has crashed,
            or, if `port` was chosen, after its exit; None: for ever. The next `sparkis.serve` of the log on this
            machine takes the server over. `endpoint.stop()` and `sparkis stop --log ...` end it at once.
        tls_cert_file: The certificate, a PEM file on the host of each process. With it, every port accepts only TLS.
        tls_key_file: The key of the certificate.
        tls_ca_cert_file: The CA certificate by which servers, registry, proxy and driver verify each other.
        tls_auth_clients: Whether clients must have a certificate of that CA: `yes` (the default), `no` or `optional`.
        placement: `driver`: one server beside this driver. `executors`: a state server beside each executor, a
            registry and a proxy beside this driver. Default: `driver` where the master is local, else `executors`.
        replicas: With placement `executors`: the number of further copies of each slot. Default: 0.
        ports: With placement `executors`: a port range; each state server takes the first free port. Default:
            `7400-7500`.
        server_bind: With placement `executors`: the address that state servers listen on. Default: the address from
            which their machine reaches the driver.
        server_host: With placement `executors`: the host that clients connect to, if it is not `server_bind`; `$NAME`
            in it is an environment variable of the executor.
        registry_port: With placement `executors`: the registry's port beside the driver. Default: any free port.
        upstream: The URL of your own Redis, which has all keys that no state owns: clients then read and write both
            at `endpoint.url`. `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`, `rediss://` for TLS, `unix://`,
            `redis+cluster://` or `redis+sentinel://`; see docs/swap.md, also for the arguments below.
        ownership: With `upstream`, required: the file on the driver's host that records which keys belong to states.
        new_jobs: Whether a new job waits for `sparkis confirm` if the upstream has keys of its formats (`wait`, the
            default), or takes these keys at once (`take`).
        routes: A file of rules that come before the jobs' key formats (docs/swap-rules.md).
        copiers: Whether a start fails beside a program that still copies keys of a rule with `prefer-state` (`refuse`,
            the default), or reports it (`report`).
        transactions: Whether EXEC runs a transaction over both sides (`mixed`, the default) or refuses it (`strict`).
        upstream_auth: `proxy`: all requests run as the URL's user (the default). `client`: each client logs in there.
        upstream_timeout_ms: The silence of the upstream after which it counts as failed. Default: 10000.
        upstream_connections: The shared connections to the upstream for each protocol version. Default: 4.
        upstream_pinned: The most connections to the upstream that one client has alone. Default: 1000.
        upstream_allow: Commands for the upstream that are refused otherwise, such as `CONFIG SET` (docs/swap.md).
        upstream_tls_ca_cert_file: The CA of the upstream's certificate. Default: the CAs that this machine trusts.
        upstream_tls_cert_file: The certificate to present to the upstream.
        upstream_tls_key_file: The key of that certificate.
        upstream_tls_server_name: The name in the upstream's certificate. Default: the URL's host.

    Raises:
        DescriptorError: No log is given.
        SparkisError: A server does not start, or the log cannot be written.
        ValueError: An argument is invalid, or has no effect with the placement.

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
    port = _number("port", str(port), PORT_MAX)
    linger_s = seconds_of(linger)
    if not 1 <= workers <= WORKERS_MAX:
        raise ValueError(f"workers={workers!r}: give a number of processes from 1 to {WORKERS_MAX}")
    root = _log_root(spark, log)
    hosts = [bind] if isinstance(bind, str) else list(bind)
    metrics_arguments = _metrics_arguments(metrics)
    tls = _tls(spark, tls_cert_file, tls_key_file, tls_ca_cert_file, tls_auth_clients)
    client_options = _client_options(spark, password, acl_file, rate_limits, notify_keyspace_events)
    upstream_options = UpstreamOptions.of(
        upstream,
        {
            "ownership": ownership,
            "new-jobs": new_jobs,
            "routes": routes,
            "copiers": copiers,
            "transactions": transactions,
            "upstream-auth": upstream_auth,
            "upstream-timeout": upstream_timeout_ms,
            "upstream-connections": upstream_connections,
            "upstream-pinned": upstream_pinned,
            "upstream-allow": upstream_allow,
            "upstream-tls-ca-cert-file": upstream_tls_ca_cert_file,
            "upstream-tls-cert-file": upstream_tls_cert_file,
            "upstream-tls-key-file": upstream_tls_key_file,
            "upstream-tls-server-name": upstream_tls_server_name,
        },
        password,
        client_options.acl_file,
    )
    endpoint: ServedEndpoint
    if _placement(spark, placement) == "executors":
        _reject_ineffective(
            "executors",
            store=store,
            role=role if role != "master" else None,
            workers=workers if workers > 1 else None,
            linger=linger if linger != LINGER_S else None,
        )
        options = _cluster_options(
            spark,
            password,
            tls,
            client_options,
            upstream_options,
            replicas,
            ports,
            server_bind,
            server_host,
            registry_port,
            metrics_arguments,
        )
        endpoint = _serve_beside_executors(spark, root, options, port, hosts)
    else:
        _reject_ineffective(
            "driver",
            replicas=replicas,
            ports=ports,
            server_bind=server_bind,
            server_host=server_host,
            registry_port=registry_port,
        )
        if upstream is not None and role != "master":
            raise ValueError(f"role={role!r} has no effect with upstream, which has a role itself; leave it out")
        endpoint = _serve_beside_driver(
            spark,
            root,
            port,
            hosts,
            password,
            tls,
            client_options,
            upstream_options,
            store,
            role,
            workers,
            linger_s,
            metrics_arguments,
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


def _placement(spark: SparkSession, argument: str | None) -> Placement:
    requested = argument or spark.conf.get(PLACEMENT_SETTING, None)
    if requested not in (*get_args(Placement), None):
        raise ValueError(f"placement={requested!r}: give one of {', '.join(map(repr, get_args(Placement)))}")
    if is_connect(spark):
        if requested == "executors":
            raise ValueError("placement='executors' needs the driver's process, and this is a Spark Connect client")
        return "driver"
    if requested is not None:
        return cast(Placement, requested)
    return "driver" if re.fullmatch(r"local(\[.*\])?", str(spark.sparkContext.master)) else "executors"


def _option(spark: SparkSession, argument: object, setting: str, otherwise: str | None = None) -> str | None:
    """Return an argument's text; if it is None, the setting `spark.sparkis.<setting>`, or `otherwise` without one."""
    return str(argument) if argument is not None else spark.conf.get(f"spark.sparkis.{setting}", otherwise)


def _client_options(
    spark: SparkSession,
    password: str | None,
    acl_file: str | Path | None,
    rate_limits: str | Sequence[str] | None,
    notify_events: str | None,
) -> ClientOptions:
    """Validate the options about clients; ValueError, or AccessError for an ACL file that is invalid on this host."""
    limits = rate_limits if rate_limits is None or isinstance(rate_limits, str) else " ".join(rate_limits)
    texts = (_option(spark, limits, "rateLimits") or "").split()  # no user's name has spaces
    ServerConfig(rate_limits=tuple(map(RateLimit.parse, texts)))
    letters = _option(spark, notify_events, "notifyKeyspaceEvents") or ""
    try:
        letters = letters_of(classes_of(letters))
    except ClassesError as error:
        raise ValueError(f"notify_keyspace_events={letters!r}: {error}") from None
    file = _option(spark, acl_file, "aclFile")
    if file is not None:
        if password is not None:
            raise ValueError(
                f"password and acl_file={file!r} are both given; leave password out, and give the user 'default' its "
                "password in the file"
            )
        Users(command_table(), path=file).load()
    return ClientOptions(file, tuple(texts), letters)


def _metrics_arguments(metrics: int | str | None) -> list[str]:
    """Return the options of a server for the argument `metrics`; ValueError, or MissingExtraError without the extra."""
    if metrics is None:
        return []
    try:
        host, port = http_address(str(metrics))
    except ArgumentTypeError as error:
        raise ValueError(f"metrics={metrics!r}: {error}") from None
    check_installed()
    return ["--metrics", address_of(host, port)]


def _tls(
    spark: SparkSession,
    cert: str | Path | None,
    key: str | Path | None,
    ca: str | Path | None,
    auth_clients: str | None,
) -> TlsFiles | None:
    """Return the files from arguments or settings; TlsError if they cannot be used on this host."""
    files = TlsFiles(
        _option(spark, cert, "tls.certFile"),
        _option(spark, key, "tls.keyFile"),
        _option(spark, ca, "tls.caCertFile"),
        _option(spark, auth_clients, "tls.authClients"),
    )
    if files == TlsFiles():
        return None
    if files.cert is None:
        raise ValueError("TLS needs a certificate and its key: give tls_cert_file and tls_key_file as well")
    server_context(files)
    return files


def _reject_ineffective(placement: Placement, **arguments: object) -> None:
    """Raise ValueError if an argument is given that has no effect with the placement."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} has no effect with placement={placement!r}; leave it out")


def _cluster_options(
    spark: SparkSession,
    password: str | None,
    tls: TlsFiles | None,
    client_options: ClientOptions,
    upstream: UpstreamOptions,
    replicas: int | None,
    ports: str | None,
    server_bind: str | None,
    server_host: str | None,
    registry_port: int | None,
    metrics_arguments: Sequence[str],
) -> ClusterOptions:
    """Validate the options of placement `executors`: arguments, then settings, then defaults."""
    copies = _number("replicas", _option(spark, replicas, "replicas", "0"), REPLICAS_MAX)
    chosen = _option(spark, ports, "server.ports", PORTS) or PORTS
    if not (found := re.fullmatch(r"(\d+)-(\d+)", chosen)) or not 1 <= int(found[1]) <= int(found[2]) <= PORT_MAX:
        raise ValueError(f"ports={chosen!r}: give the first and the last port of a range, like {PORTS}")
    host = spark.conf.get("spark.driver.host", None) or "127.0.0.1"
    return ClusterOptions(
        host=host.strip("[]"),
        bind=(spark.conf.get("spark.driver.bindAddress", None) or host).strip("[]"),
        replicas=copies,
        ports=chosen,
        server_bind=_option(spark, server_bind, "server.bindAddress"),
        server_host=_option(spark, server_host, "server.host"),
        registry_port=_number("registry_port", _option(spark, registry_port, "registry.port", "0"), PORT_MAX),
        password=password,
        tls=tls,
        client_options=client_options,
        upstream=upstream,
        metrics_arguments=tuple(metrics_arguments),
    )


def _number(name: str, text: str | None, largest: int) -> int:
    if text is None or not text.isdecimal() or int(text) > largest:
        raise ValueError(f"{name}={text}: give a number from 0 to {largest}")
    return int(text)


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


def _serve_beside_driver(
    spark: SparkSession,
    root: str,
    port: int,
    hosts: list[str],
    password: str | None,
    tls: TlsFiles | None,
    client_options: ClientOptions,
    upstream: UpstreamOptions,
    store: str | Path | None,
    role: str,
    workers: int,
    linger_s: float,
    metrics_arguments: Sequence[str],
) -> ServedEndpoint:
    command = [sys.executable, "-m", "resp_server.programs.serve", "--log", root, "--bind", *hosts, "--role", role]
    command += ["--loglevel", "warning", "--workers", str(workers), *tls_arguments(tls), *client_options.arguments()]
    command += [*upstream.arguments, *metrics_arguments]
    environment = with_passwords(upstream.environment(children.environment()), password, None)
    host = "127.0.0.1" if hosts[0] == "0.0.0.0" else hosts[0]
    permanent_store = None if store is None else str(Path(store).expanduser())
    endpoint: DetachedEndpoint | None = None
    for before in endpoints.of_log(root):
        if isinstance(before, DetachedEndpoint) and before.has_options(command, environment, port, permanent_store):
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
            store=permanent_store,
            linger_s=linger_s,
            tls=tls,
            has_proxy=upstream.url is not None,
        )
    spark.conf.set(endpoints.ADDRESS_SETTING, str(endpoint.address_file))
    return endpoint
