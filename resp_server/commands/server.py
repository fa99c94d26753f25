"""Commands about the server: time, size, role, settings. INFO has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping

from resp_server.commands.spec import OneOrMore, command
from resp_server.config import ServerConfig
from resp_server.glob import matcher
from resp_server.instance import Call
from resp_server.protocol.replies import Reply

GLOB_MARKS = frozenset(b"*?[")


@command("dbsize")
def dbsize(call: Call) -> int:
    """Returns the number of keys in the database."""
    return call.view.key_count()


@command("time")
def time(call: Call) -> Reply:
    """Returns the server time."""
    seconds, milliseconds = divmod(call.instance.clock(), 1000)
    return [b"%d" % seconds, b"%d" % (milliseconds * 1000)]


@command("role")
def role(call: Call) -> Reply:
    """Returns the replication role."""
    if call.instance.config.is_slave:
        # The master is a Spark query: it has a name but no address.
        return [b"slave", b"spark", 0, b"connected", 0]
    return [b"master", 0, []]


@command("config|get")
def config_get(call: Call, *patterns: OneOrMore) -> Reply:
    """Returns the effective values of configuration parameters."""
    settings = config_values(call.instance.config, call.instance.port)
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


def config_values(config: ServerConfig, port: int) -> Mapping[str, str]:
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
        "port": str(port),
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
    }


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
