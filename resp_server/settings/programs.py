"""The options that no server reads while it runs and `sparkis.serve` does not have, and the options of each program."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from resp_server.cluster.topology import NODES_MAX
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.settings.groups import TIMEOUT_MS_MAX, Driver, Executors, Limits, Upstream
from resp_server.settings.option_values import (
    Address,
    advertised,
    as_of,
    http_address,
    minutes,
    registry_address,
    seconds,
    tcp_port,
    whole_number,
)
from resp_server.settings.server import ServerConfig
from resp_server.settings.setting import (
    ATTACH,
    PROXY,
    REGISTRY,
    SERVE,
    SERVERS,
    STATE_SERVER,
    SWAP_CHECK,
    Setting,
    add_rows,
    rows_of,
    setting,
)
from resp_server.settings.tls import Tls
from state_backend import log_lines
from state_backend.log.garbage_collector import RETENTION_MS
from state_backend.log.time_travel import AS_OF_HELP, AsOf
from state_backend.model.clock import MS_PER_MINUTE, MS_PER_S

REGISTRY_PORT = 7377
# More than any machine has free cores (guess); each worker takes about 50 MB.
WORKERS_MAX = 64
# The time limit of a server's reply to a proxy.
SERVER_TIMEOUT_S = 1.0
# The longest time for the end of a program: less than the 30 s after which Kubernetes kills a pod.
DRAIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a program reads: logs, and the registry."""

    log: Sequence[str] = setting(
        (),
        "a log root; may be repeated",
        (*SERVERS, REGISTRY),
        section="log",
        keyword="log",
        spark="log",
        in_program={
            PROXY: {
                "required": False,
                "default": [],
                "metavar": "ROOT",
                "help": "a log root; its registry writes the topology there; may be repeated",
            },
            REGISTRY: {"action": "store", "help": "the log root; registry.json is written there"},
        },
        action="append",
        required=True,
        metavar="PATH",
    )
    registry: Sequence[str] = setting(
        (),
        "the registry's address (default: the one in registry.json under a log root)",
        (PROXY, STATE_SERVER),
        section="log",
        in_program={
            PROXY: {
                "action": "append",
                "default": [],
                "type": str,
                "help": "a registry, which announces each new topology; may be repeated",
            }
        },
        default=None,
        type=registry_address,
        metavar="HOST:PORT",
    )
    token_file: str | None = setting(
        None,
        f"the secret that registry and servers share (default: {TOKEN_VARIABLE} in the environment)",
        (PROXY, REGISTRY, STATE_SERVER),
        section="token",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What all programs with Redis clients have, beside `ServerConfig`."""

    requirepass_file: str | None = setting(
        None, "read the password from a file", (*SERVERS, ATTACH), section="password-file", at_once=True, metavar="FILE"
    )
    drain_delay: float = setting(
        0.0,
        "after SIGTERM, serve new clients for this time while /readyz says no: until balancers have noticed "
        "(default %(default)g)",
        SERVERS,
        section="drain",
        type=seconds,
        metavar="SECONDS",
    )
    drain_timeout: float = setting(
        DRAIN_TIMEOUT_S,
        "then finish requests for at most this time (default %(default)g)",
        SERVERS,
        section="drain",
        type=seconds,
        metavar="SECONDS",
    )
    log_format: str = setting(
        "text",
        "json: each line of the log is a JSON object (default %(default)s)",
        (*SERVERS, REGISTRY),
        section="log-format",
        at_once=True,
        choices=log_lines.FORMATS,
    )
    metrics: Address | None = setting(
        None,
        "answer /metrics, /livez and /readyz by HTTP (default: do not; the default HOST is loopback); needs "
        "sparkis[metrics]",
        (*SERVERS, REGISTRY, ATTACH),
        section="metrics",
        keyword="metrics",
        note="([metrics.md](metrics.md))",
        type=http_address,
        metavar="[HOST:]PORT",
    )
    ready_lag_max: float | None = setting(
        None,
        "with --metrics: /readyz says no if a job's clients read an epoch that is older than the committed one by "
        "more than this (default: any lag will do)",
        (*SERVERS, ATTACH),
        section="metrics",
        type=seconds,
        metavar="SECONDS",
    )


@dataclass(frozen=True, kw_only=True)
class Serve:
    """What only `sparkis serve` has."""

    workers: int = setting(
        1,
        "processes that serve the port; with --upstream: that read the states behind it (default %(default)s)",
        (SERVE,),
        section="serve",
        keyword="workers",
        type=whole_number(1, WORKERS_MAX, "a number of processes"),
        metavar="N",
    )
    cluster: Sequence[str] | None = setting(
        None,
        "serve as a node of a Redis Cluster with the topology in this file; reloaded when it changes",
        (SERVE, PROXY),
        section="serve",
        note="([as Redis Cluster nodes](serving.md#as-redis-cluster-nodes))",
        in_program={
            PROXY: {
                "action": "append",
                "default": [],
                "help": "a file with the topology of the servers; reloaded when it changes; may be repeated",
            }
        },
        metavar="FILE",
    )
    cluster_node: str | None = setting(
        None,
        "with --cluster: this server's node in the topology, by address or id",
        (SERVE,),
        section="serve",
        metavar="HOST:PORT",
    )
    announcements: Address | None = setting(
        None,
        "where writers on other machines announce their epochs (`spark.sparkis.announce`), with the secret in "
        f"{TOKEN_VARIABLE}; for logs that this machine cannot watch",
        (SERVE,),
        section="serve",
        note="([how soon](serving.md#how-soon-an-epoch-is-readable))",
        type=http_address,
        metavar="[HOST:]PORT",
    )
    compact: str | None = setting(
        None,
        "write snapshots into the logs, and remove the files that they supersede (default: where the log can be "
        "written)",
        (SERVE, STATE_SERVER),
        section="past",
        note="`--compact` alone is `yes`, and then a log that cannot be written is an error",
        in_program={
            STATE_SERVER: {
                "action": "store_true",
                "help": "write this server's part of snapshots into the log, and remove superseded files; all servers "
                "need it",
                "note": "",
            }
        },
        choices=("yes", "no"),
        nargs="?",
        const="yes",
    )
    as_of: AsOf | None = setting(
        None,
        f"serve a past moment only, while the logs can be read there: {AS_OF_HELP}",
        (SERVE,),
        section="past",
        note="([past.md](past.md#a-server-of-a-past-moment))",
        type=as_of,
        metavar="EPOCH|TIME",
    )
    job: Sequence[str] | None = setting(
        None, "with --as-of: only this job; may be repeated", (SERVE,), section="past", action="append", metavar="NAME"
    )
    retention: float = setting(
        RETENTION_MS / MS_PER_MINUTE,
        "if the log is compacted: how far back it can be read, also by readers that are behind (default %(default)g)",
        (SERVE, STATE_SERVER),
        section="past",
        note="([past.md](past.md#how-far-back))",
        in_program={
            STATE_SERVER: {
                "help": "with --compact: how far back the log can be read, also by readers that are behind "
                "(default %(default)g)"
            }
        },
        type=minutes,
        metavar="MINUTES",
    )


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """What only `sparkis proxy` has."""

    server_timeout: int = setting(
        int(SERVER_TIMEOUT_S * MS_PER_S),
        "the time limit for a server's reply, in milliseconds (default %(default)s)",
        (PROXY,),
        section="proxy",
        type=whole_number(1, TIMEOUT_MS_MAX, "a number of milliseconds"),
        metavar="MS",
    )
    server_tls: str | None = setting(
        None,
        "whether servers and registries speak TLS (default: yes if a TLS file is given)",
        (PROXY,),
        section="server-tls",
        choices=("yes", "no"),
    )


@dataclass(frozen=True, kw_only=True)
class StateServer:
    """What only `sparkis state-server` and `sparkis registry` have."""

    advertise: tuple[str, int | None] | None = setting(
        None,
        "the address for clients and other servers (default: the first --bind address, and the port)",
        (STATE_SERVER, REGISTRY),
        section="state-server",
        note="With IPv6 a port follows brackets: `[2001:db8::12]:7400`",
        in_program={
            REGISTRY: {
                "type": str,
                "metavar": "HOST",
                "help": "this machine's address for state servers (default: the --bind address)",
                "note": "",
            }
        },
        type=advertised,
        metavar="HOST[:PORT]",
    )
    zone: str = setting(
        "",
        "servers of one zone may fail together: copies of a slot are placed in several zones (default: the host)",
        (STATE_SERVER,),
        section="state-server",
        note="Servers of Spark's executors are in the zone of their application",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class RegistryOptions:
    """What only `sparkis registry` has."""

    port: int = setting(
        REGISTRY_PORT,
        "TCP port (default %(default)s; 0: a free one)",
        (REGISTRY,),
        section="registry-address",
        type=tcp_port,
    )
    bind: str = setting(
        "127.0.0.1",
        "the address to listen on (default %(default)s)",
        (REGISTRY,),
        section="registry-address",
        metavar="ADDRESS",
    )
    replicas: int = setting(
        0,
        "replicas of each slot, if there are enough servers (default %(default)s)",
        (REGISTRY,),
        section="registry",
        keyword="replicas",
        spark="replicas",
        type=whole_number(0, NODES_MAX - 1, "a number of replicas"),
        metavar="N",
    )
    standby: bool = setting(
        False,
        "take over when the log's registry has not answered for two seconds (its driver may have ended)",
        (REGISTRY,),
        section="registry",
        note="It stands by again when another registry takes over",
        action="store_true",
    )


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """The options of programs that sparkis itself starts."""

    child: bool = setting(False, None, (*SERVERS, REGISTRY), section="hidden", action="store_true")
    driver: str = setting("", None, (STATE_SERVER,), section="hidden")
    # See `serve_upstream`.
    behind_proxy: bool = setting(False, None, (SERVE,), section="hidden", action="store_true")
    control_port: int = setting(0, None, (SERVE,), section="hidden", type=tcp_port)
    # The folder of the record of a server beside a driver.
    record: str | None = setting(None, None, (SERVE,), section="hidden", metavar="FOLDER")


@dataclass(frozen=True, kw_only=True)
class Attach:
    """What only `sparkis attach` has for its server."""

    serve: bool = setting(
        False,
        "also serve the log, by a server that all attachments of the log share",
        (ATTACH,),
        section="attach",
        action="store_true",
    )


@dataclass(frozen=True, kw_only=True)
class OnSpark:
    """What only `sparkis.serve` has."""

    placement: str | None = setting(
        None,
        "`Executors(...)` or `Driver(...)`, also by name: `executors`, `driver`; the default depends on the master",
        option="",
        keyword="placement",
        spark="placement",
    )


# The whole table.
TABLE = [
    row
    for section in (
        Sources,
        ServerConfig,
        ServerOptions,
        Limits,
        Tls,
        Driver,
        Serve,
        Executors,
        StateServer,
        RegistryOptions,
        Proxy,
        Upstream,
        Hidden,
        Attach,
        OnSpark,
    )
    for row in rows_of(section)
    if not (section is Limits and row.name in ServerConfig.__dataclass_fields__)
]

# Those of a program with Redis clients, in the order of the help.
LISTENING = (
    "address",
    "password",
    "password-file",
    "aclfile",
    "rate-limit",
    "events",
    "limits",
    "end",
    "drain",
    "redis",
    "loglevel",
    "log-format",
    "tls",
    "metrics",
)
SECTIONS = {
    SERVE: ("log", *LISTENING, "tls-port", "store", "serve", "past", "upstream", "hidden"),
    PROXY: ("log", "token", "serve", "proxy", "upstream", *LISTENING, "tls-port", "server-tls", "hidden"),
    STATE_SERVER: ("log", *LISTENING, "state-server", "store", "past", "token", "hidden"),
    REGISTRY: (
        "log",
        "registry-address",
        "state-server",
        "registry",
        "token",
        "tls",
        "loglevel",
        "log-format",
        "metrics",
        "hidden",
    ),
    ATTACH: ("attach", "address", "store", "password", "password-file", "aclfile", "tls", "metrics"),
    SWAP_CHECK: ("upstream", "tls"),
} | dict.fromkeys(("status", "health", "owners", "confirm", "release", "reload", "shadow"), ("tls",))


def rows_for(program: str, *sections: str) -> list[Setting]:
    """Return the rows of a program's options, in the order of its help. sections: only these; none: all."""
    return [
        row
        for section in sections or SECTIONS[program]
        for row in TABLE
        if row.section == section and program in row.programs
    ]


def add_settings(parser: argparse.ArgumentParser, program: str, *sections: str) -> None:
    """Add the options of a program. sections: only these; none: all."""
    add_rows(parser, rows_for(program, *sections), program)
