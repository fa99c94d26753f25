"""The settings that a server reads while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from resp_server.acl.rate_limits import RateLimit
from resp_server.net.children import PASSWORD_VARIABLE
from resp_server.net.listeners import LOOPBACK
from resp_server.net.tls import TlsFiles
from resp_server.protocol.request_parser import BULK_BYTES_MAX, QUERY_BUFFER_BYTES_MAX, RequestLimits
from resp_server.settings.config_values import (
    INT32_MAX,
    INT64_MAX,
    MIB,
    OutputLimits,
    event_classes,
    integer_between,
    log_levels,
    memory_size,
    option_of,
    output_limits,
    output_limits_text,
    parse_password,
    shown_levels,
    yes_or_no,
)
from resp_server.settings.event_classes import config_letters
from resp_server.settings.option_values import event_letters, levels, names, tcp_port, whole_number
from resp_server.settings.setting import (
    ATTACH,
    PROXY,
    REGISTRY,
    SERVE,
    SERVERS,
    STATE_SERVER,
    InConfig,
    rows_of,
    setting,
    text_of,
)

# The version of Redis that is reproduced. Client-side caching in redis-py and Jedis needs 7.4 or later.
REDIS_VERSION = "7.4.0"
DEFAULT_PORT = 7379
CLIENTS_MAX = 2**32 - 1
# A client with more unsent output than the first number of bytes is closed; only one huge reply can exceed it. It is
# also closed if more than the second number was unsent for the seconds; 0: no such limit. Standard: Redis' limits.
OUTPUT_LIMITS: Mapping[str, OutputLimits] = {"normal": (1024 * MIB, 0, 0), "pubsub": (32 * MIB, 8 * MIB, 60)}

Value = TypeVar("Value")


def of_redis(
    initial: Value,
    parse: Callable[[bytes], Any],
    metavar: str,
    help: str,
    *,
    render: Callable[[Any], str] = text_of,
    note: str = "",
) -> Value:
    """Declare a setting of Redis that CONFIG SET can change, and that is an option of the same values."""
    return setting(
        initial,
        help,
        SERVERS,
        section="redis",
        title="settings of Redis, which CONFIG SET can change",
        config=InConfig(parse, render),
        note=note,
        type=option_of(parse),
        metavar=metavar,
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Limits of clients and of what is recorded about them, by Redis' names."""

    maxclients: int = setting(
        10_000,
        "connections at a time (default %(default)s)",
        SERVERS,
        section="limits",
        config=InConfig(integer_between(1, CLIENTS_MAX)),
        note="Over all workers",
        type=whole_number(1, CLIENTS_MAX, "a number of connections"),
        metavar="N",
    )
    timeout: int = setting(
        0,
        "close clients that are idle for longer (default: never)",
        SERVERS,
        section="limits",
        config=InConfig(integer_between(0, INT32_MAX)),
        type=whole_number(0, INT32_MAX, "a number of seconds"),
        metavar="SECONDS",
    )
    committed_only: Sequence[str] = setting(
        (),
        "users, with commas between them, whose connections begin with STATE FRESHNESS COMMITTED: they read no values "
        "before their commit (default: none)",
        SERVERS,
        section="rate-limit",
        config=InConfig(render=",".join),
        note="([Real-Time Mode](real-time.md#readers-choose))",
        type=names,
        metavar="USER[,USER...]",
    )
    # A batch with more values shows none of them. (Guess: a million keys.)
    fresh_values_max_bytes: int = setting(
        256 * MIB,
        "values of a job before their commit, in each server (default 256mb)",
        SERVERS,
        section="limits",
        config=InConfig(memory_size(MIB, INT64_MAX)),
        note="([Real-Time Mode](real-time.md))",
        type=option_of(memory_size(MIB, INT64_MAX)),
        metavar="BYTES",
    )
    acllog_max_len: int = of_redis(128, integer_between(0, INT64_MAX), "N", "entries of ACL LOG (default 128)")
    client_output_buffer_limit: Mapping[str, OutputLimits] = of_redis(
        OUTPUT_LIMITS,
        output_limits,
        "'CLASS HARD SOFT SECONDS'",
        "the limits of unsent output of normal clients and of pubsub (default 'normal 1gb 0 0 pubsub 32mb 8mb 60')",
        render=output_limits_text,
    )
    client_query_buffer_limit: int = of_redis(
        1024 * MIB,
        memory_size(MIB, QUERY_BUFFER_BYTES_MAX),
        "BYTES",
        "the longest unfinished request of a client (default 1gb)",
    )
    # Requests that take this long or longer are events of LATENCY; 0: none.
    latency_monitor_threshold: int = of_redis(
        0, integer_between(0, INT64_MAX), "MS", "requests that take this long are events of LATENCY (default 0: none)"
    )
    # The longest word of a request: receiving, hashing or matching a longer one takes too long for one turn.
    proto_max_bulk_len: int = of_redis(
        MIB,
        memory_size(MIB, BULK_BYTES_MAX),
        "BYTES",
        "the longest argument of a request (default 1mb)",
        note="A proxy with an upstream has [its own limits](access.md#limits-of-a-client)",
    )
    # Requests that take longer are in SLOWLOG; 0: all, -1: none.
    slowlog_log_slower_than: int = of_redis(
        10_000,
        integer_between(-1, INT64_MAX),
        "US",
        "requests that take longer, in microseconds, are in SLOWLOG (default 10000)",
    )
    slowlog_max_len: int = of_redis(128, integer_between(0, INT64_MAX), "N", "entries of SLOWLOG (default 128)")
    tcp_keepalive: int = of_redis(
        300,
        integer_between(0, INT32_MAX),
        "SECONDS",
        "the pause before probes of an idle connection (default 300; 0: none)",
    )
    # In the tracking table of each process; 0: only memory limits it.
    tracking_table_max_keys: int = of_redis(
        1_000_000,
        integer_between(0, INT64_MAX),
        "N",
        "keys in the table of CLIENT TRACKING (default 1000000; 0: no limit)",
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ClientLimits):
    """The settings of one server.

    hosts           the addresses to listen on; loopback addresses that the machine does not have are skipped
    password        the password of AUTH; None: no password is needed
    server_password  the password of proxies and other nodes, whose rights are unrestricted; None: `password`
    rate_limits     the rate limits of users
    role            `master`; `slave`: HELLO, ROLE and INFO report a replica, so that clients do not try to write
    tls             the certificate; `port` speaks TLS, unless there is a `tls_port`
    config_file     the file that CONFIG REWRITE changes, in its table `config_table`; None: there is none
    changed_fields  the fields that CONFIG SET has changed since the start
    """

    port: int = setting(
        DEFAULT_PORT,
        "TCP port (default %(default)s; 0: a free one)",
        (*SERVERS, ATTACH),
        section="address",
        keyword="port",
        note="In Python the default is 0",
        in_program={
            STATE_SERVER: {
                "default": None,
                "help": "instead of --ports: the only TCP port (0: a free one)",
                "note": "",
            },
            ATTACH: {"help": "the port of --serve (default %(default)s)"},
        },
        type=tcp_port,
    )
    hosts: tuple[str, ...] = setting(
        LOOPBACK,
        "addresses to listen on (default: loopback)",
        (*SERVERS, ATTACH),
        option="bind",
        section="address",
        keyword="bind",
        config=InConfig(),
        nargs="+",
        metavar="ADDRESS",
    )
    password: str | None = setting(
        None,
        f"the password for AUTH; safer: {PASSWORD_VARIABLE} in the environment",
        (*SERVERS, ATTACH),
        option="requirepass",
        section="password",
        keyword="password",
        config=InConfig(parse_password),
        is_secret=True,
        repr=False,
        note="Other users of the machine can read a command line",
        metavar="PASSWORD",
    )
    aclfile: str | None = setting(
        None,
        "the file of the users and their rules, as in Redis",
        (*SERVERS, ATTACH),
        section="aclfile",
        keyword="acl_file",
        spark="aclFile",
        config=InConfig(),
        note="([access.md](access.md))",
        metavar="FILE",
    )
    # The enabled classes, by their letters (see `event_classes`).
    notify_keyspace_events: str = setting(
        "",
        "the classes of keyspace notifications, as in Redis (default: none)",
        SERVERS,
        section="events",
        keyword="notify_keyspace_events",
        spark="notifyKeyspaceEvents",
        config=InConfig(event_classes, config_letters),
        note="([push.md](push.md#keyspace-notifications))",
        type=event_letters,
        metavar="CLASSES",
    )
    # Without a password, clients on other machines get only DENIED.
    protected_mode: bool = setting(
        True,
        "yes: without a password, serve only clients on this machine (default yes)",
        SERVERS,
        section="events",
        config=InConfig(yes_or_no),
        choices=("yes", "no"),
    )
    # Another process of this user may listen at the same port: the one that takes over.
    shares_port: bool = setting(
        False,
        "yes: the next process may listen at the same port before this one ends (SO_REUSEPORT; default no)",
        SERVERS,
        option="reuse-port",
        section="end",
        choices=("yes", "no"),
    )
    # What is logged (see `log_lines.parse_levels`).
    loglevel: str = setting(
        "info",
        "the lowest level that is logged: debug, info, warning, error or nothing; and that of some parts, as in "
        "warning,sparkis.tls=debug (default %(default)s)",
        (*SERVERS, REGISTRY),
        section="loglevel",
        config=InConfig(log_levels, shown_levels, in_file=str),
        note="([the log](serving.md#the-log))",
        type=levels,
        metavar="LEVEL[,PART=LEVEL...]",
    )
    tls_port: int | None = setting(
        None,
        "a port with TLS; --port is then plain (default: TLS at --port)",
        (SERVE, PROXY),
        section="tls-port",
        type=tcp_port,
        metavar="PORT",
    )
    databases: int = setting(16, config=InConfig())
    tcp_backlog: int = setting(511, config=InConfig())
    server_password: str | None = field(default=None, repr=False)
    rate_limits: tuple[RateLimit, ...] = ()
    role: str = "master"
    tls: TlsFiles | None = None
    config_file: str | None = None
    config_table: str = ""
    changed_fields: Sequence[str] = ()
    # A client that has not authenticated after this time is disconnected (guess: a person types).
    auth_seconds_max: int = 60
    value_bytes_max: int = 0  # see `RequestLimits`
    # A connection is not read while more output than this is unsent.
    output_pause_bytes: int = MIB
    # The longest time for which a sliced reply may pin its epoch.
    sliced_reply_ms_max: int = 60_000
    # The longest time for which `stop` waits until replies are sent.
    stop_ms_max: int = 2_000

    def __post_init__(self) -> None:
        if self.role not in ("master", "slave"):
            raise ValueError(f"role is 'master' or 'slave', not {self.role!r}")
        if len({limit.user for limit in self.rate_limits}) < len(self.rate_limits):
            raise ValueError("--rate-limit is given twice for one user; write both limits as USER=COMMANDS,BYTES")
        if self.tls_port is not None and self.tls is None:
            raise ValueError("--tls-port needs a certificate: give --tls-cert-file and --tls-key-file")
        if self.tls_port is not None and self.tls_port == self.port != 0:
            raise ValueError(f"--port and --tls-port are both {self.port}; for TLS only, leave --tls-port out")

    @property
    def is_replica(self) -> bool:
        """Whether clients see a replica."""
        return self.role == "slave"

    @property
    def request_limits(self) -> RequestLimits:
        """The limits of one client's unfinished request."""
        return RequestLimits(self.proto_max_bulk_len, self.value_bytes_max, self.client_query_buffer_limit)

    def output_limits(self, *, is_subscriber: bool) -> OutputLimits:
        """Return the limits of a client's unsent output."""
        return self.client_output_buffer_limit["pubsub" if is_subscriber else "normal"]


ROWS = {row.name: row for row in rows_of(ServerConfig)}
