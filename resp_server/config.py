"""The settings of a server. The name of each limit ends with its unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from resp_server.acl.rate_limits import RateLimit
from resp_server.net.listeners import LOOPBACK
from resp_server.net.tls import TlsFiles
from resp_server.protocol.request_parser import RequestLimits

MIB = 1024 * 1024

# The version of Redis that is reproduced. Client-side caching in redis-py and Jedis needs 7.4 or later.
REDIS_VERSION = "7.4.0"


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one server.

    hosts           the addresses to listen on; loopback addresses that the machine does not have are skipped
    port            0: any free port
    password        the password of AUTH; None: no password is needed
    server_password  the password of proxies and other nodes, whose rights are unrestricted; None: `password`
    acl_file        the file of the users; None: at the start there is only the user `default`
    limits          the rate limits of users
    protected_mode  without a password, clients on other machines get only DENIED
    role            `master`; `slave`: HELLO, ROLE and INFO report a replica, so that clients do not try to write
    tls             the certificate; `port` speaks TLS, unless there is a `tls_port`
    tls_port        the port with TLS; `port` is then plain. 0: any free port
    shares_port     another process of this user may listen at the same port: the one that takes over (SO_REUSEPORT)
    config_file     the file that CONFIG REWRITE changes, in its table `config_table`; None: there is none
    changed_fields  the fields that CONFIG SET has changed since the start
    """

    hosts: tuple[str, ...] = LOOPBACK
    port: int = 6379
    password: str | None = field(default=None, repr=False)
    server_password: str | None = field(default=None, repr=False)
    acl_file: str | None = None
    limits: tuple[RateLimit, ...] = ()
    protected_mode: bool = True
    role: str = "master"
    tls: TlsFiles | None = None
    tls_port: int | None = None
    shares_port: bool = False
    config_file: str | None = None
    config_table: str = ""
    changed_fields: Sequence[str] = ()
    databases: int = 16
    clients_max: int = 10_000
    backlog_connections: int = 511
    idle_timeout_seconds: int = 0  # 0: never
    tcp_keepalive_seconds: int = 300  # 0: off
    # A client that has not authenticated after this time is disconnected (guess: a person types).
    auth_seconds_max: int = 60
    # The longest word of a request: receiving, hashing or matching a longer one takes too long for one turn.
    bulk_bytes_max: int = MIB
    value_bytes_max: int = 0  # see `RequestLimits`
    query_buffer_bytes_max: int = 1024 * MIB
    # A connection is not read while more output than this is unsent.
    output_pause_bytes: int = MIB
    # A connection with more unsent output than this is closed; only one huge reply can exceed it. It is also closed if
    # more than the soft limit was unsent for the soft seconds; soft limit 0: none.
    output_bytes_max: int = 1024 * MIB
    output_soft_bytes: int = 0
    output_soft_seconds: int = 0
    # The same limits for subscribers; standard: Redis' limits.
    subscriber_output_bytes_max: int = 32 * MIB
    subscriber_output_soft_bytes: int = 8 * MIB
    subscriber_output_soft_seconds: int = 60
    # The enabled classes of keyspace notifications, by their letters (see `push.keyspace_notifications`).
    notify_events: str = ""
    # The number of keys in the tracking table of each process; 0: only memory limits it.
    tracked_keys_max: int = 1_000_000
    # Requests that take longer are in SLOWLOG; 0: all, -1: none.
    slow_over_us: int = 10_000
    slow_entries_max: int = 128
    # Requests that take this long or longer are events of LATENCY; 0: none.
    latency_over_ms: int = 0
    # What is logged (see `log_lines.parse_levels`).
    log_levels: str = "info"
    # The number of entries of ACL LOG.
    acl_log_entries_max: int = 128
    # The longest time for which a sliced reply may pin its epoch.
    sliced_reply_ms_max: int = 60_000
    # The longest time for which `stop` waits until replies are sent.
    stop_ms_max: int = 2_000

    def __post_init__(self) -> None:
        if self.role not in ("master", "slave"):
            raise ValueError(f"role is 'master' or 'slave', not {self.role!r}")
        if len({each.user for each in self.limits}) < len(self.limits):
            raise ValueError("--rate-limit is given twice for one user; write both limits as USER=COMMANDS,BYTES")
        if self.tls_port is not None and self.tls is None:
            raise ValueError("--tls-port needs a certificate: give --tls-cert-file and --tls-key-file")
        if self.tls_port is not None and self.tls_port == self.port != 0:
            raise ValueError(f"--port and --tls-port are both {self.port}; for TLS only, leave --tls-port out")

    @property
    def is_replica(self) -> bool:
        """Return whether clients see a replica."""
        return self.role == "slave"

    @property
    def request_limits(self) -> RequestLimits:
        """The limits of one client's unfinished request."""
        return RequestLimits(self.bulk_bytes_max, self.value_bytes_max, self.query_buffer_bytes_max)
