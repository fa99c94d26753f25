"""Commands about the server: time, size, role, settings. INFO has a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from resp_server.cluster.view import PartView
from resp_server.commands.generic import sliced
from resp_server.commands.spec import OneOrMore, command
from resp_server.config import ServerConfig
from resp_server.glob import matcher
from resp_server.instance import Call
from resp_server.protocol.replies import Reply
from state_backend.keyspace import KeyspaceView

GLOB_MARKS = frozenset(b"*?[")


@command("dbsize")
def dbsize(call: Call) -> Reply:
    """Returns the number of keys in the database."""
    if isinstance(call.view, PartView) and not call.view.is_counted:
        return sliced(call, _key_counts, int)
    return call.view.key_count()


def _key_counts(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
    assert isinstance(view, PartView)
    return ([count] for count in view.key_counts())


@command("time")
def time(call: Call) -> Reply:
    """Returns the server time."""
    seconds, milliseconds = divmod(call.instance.clock(), 1000)
    return [b"%d" % seconds, b"%d" % (milliseconds * 1000)]


@command("role")
def role(call: Call) -> Reply:
    """Returns the replication role."""
    cluster = call.instance.cluster
    if cluster is not None and cluster.is_replica:
        return [b"slave", cluster.master.host.encode(), cluster.master.port, b"connected", 0]
    if call.instance.is_slave:
        # The master is a Spark query: it has a name but no address.
        return [b"slave", b"spark", 0, b"connected", 0]
    replicas = () if cluster is None else cluster.topology.replicas(cluster.myself)
    return [b"master", 0, [[each.host.encode(), b"%d" % each.port, b"0"] for each in replicas]]


@command("config|get")
def config_get(call: Call, *patterns: OneOrMore) -> Reply:
    """Returns the effective values of configuration parameters."""
    settings = {
        **config_values(call.instance.config, call.instance.port, call.instance.tls_port),
        **_cluster_values(call),
    }
    found: dict[str, bytes] = {}  # by their names, as the client typed them first
    for pattern in patterns:
        if not GLOB_MARKS.intersection(pattern):
            name = pattern.decode("utf-8", "replace").lower()
            if name in settings:
                found.setdefault(name, pattern)
            continue
        matches = matcher(pattern, ignore_case=True)
        for name in settings:
            if matches(name.encode()):
                found.setdefault(name, name.encode())
    return {typed: settings[name].encode() for name, typed in found.items()}


def config_values(config: ServerConfig, port: int, tls_port: int) -> Mapping[str, str]:
    """Return the settings in Redis' names: those that are real here, and what clients ask and nothing else can be."""
    return {
        "appendonly": "no",
        "bind": " ".join(config.hosts),
        "client-query-buffer-limit": str(config.query_buffer_bytes_max),
        "client-output-buffer-limit": f"normal {config.output_bytes_max} 0 0",
        "databases": str(config.databases),
        "maxclients": str(config.clients_max),
        "maxmemory": "0",
        "maxmemory-policy": "noeviction",
        "notify-keyspace-events": "",
        "port": str(port if port != tls_port else 0),
        "protected-mode": "yes" if config.protected_mode else "no",
        "proto-max-bulk-len": str(config.bulk_bytes_max),
        "replica-read-only": "yes",
        "replica-serve-stale-data": "yes",
        "requirepass": config.password or "",
        "save": "",
        "slave-read-only": "yes",
        "slave-serve-stale-data": "yes",
        "tcp-backlog": str(config.backlog_connections),
        "tcp-keepalive": str(config.tcp_keepalive_seconds),
        "timeout": str(config.idle_timeout_seconds),
        **({"tls-port": str(tls_port)} if tls_port else {}),
    }


def _cluster_values(call: Call) -> Mapping[str, str]:
    """Return the settings that a cluster's node has. Keys are answered while others are nobody's."""
    return {} if call.instance.cluster is None else {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}


@command("config|help")
def config_help(call: Call) -> Reply:
    """Returns helpful text about the different subcommands."""
    return call.instance.table.help("config")


@command("module|list")
def module_list(call: Call) -> Reply:
    """Returns all loaded modules."""
    return []


@command("script|exists")
def script_exists(call: Call, *digests: OneOrMore) -> Reply:
    """Determines whether server-side Lua scripts exist in the script cache."""
    return [0 for _ in digests]
