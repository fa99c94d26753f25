"""The settings of a server. The name of each limit ends with its unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from resp_server.acl.rate_limits import RateLimit
from resp_server.net.listeners import LOOPBACK
from resp_server.net.tls import TlsFiles
from resp_server.protocol.request_parser import RequestLimits

MIB = 1024 * 1024

# The Redis whose behaviour is reproduced. Client-side caching in redis-py and Jedis asks for 7.4 or later.
REDIS_VERSION = "7.4.0"


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one server.

    hosts           addresses to listen on; the loopback ones are left out where the machine does not have them
    port            0 takes a free one
    password        what AUTH asks for; None lets everybody in
    upstream_password  what proxies and other nodes are let in with, whatever users may do; None: it is `password`
    acl_file        where users are read from, and written to; None: there is the user `default` alone at first
    limits          what users may ask
    protected_mode  without a password, answer clients of other machines with DENIED only
    role            `master`, or `slave` for clients that should learn from it that nothing can be written
    tls             the certificate; `port` speaks TLS with it, unless it has a port of its own
    tls_port        speaks TLS, and `port` does not; 0 takes a free one
    """

    hosts: tuple[str, ...] = LOOPBACK
    port: int = 6379
    password: str | None = field(default=None, repr=False)
    upstream_password: str | None = field(default=None, repr=False)
    acl_file: str | None = None
    limits: tuple[RateLimit, ...] = ()
    protected_mode: bool = True
    role: str = "master"
    tls: TlsFiles | None = None
    tls_port: int | None = None
    databases: int = 16
    clients_max: int = 10_000
    backlog_connections: int = 511
    idle_timeout_seconds: int = 0  # 0: never
    tcp_keepalive_seconds: int = 300  # 0: off
    # Who has to authenticate has so long for it in all, whatever it sends meanwhile (guess: a person types).
    auth_seconds_max: int = 60
    # Of one word of a request: to take a longer one in, to hash it or to match it takes too long for one turn.
    bulk_bytes_max: int = MIB
    query_buffer_bytes_max: int = 1024 * MIB
    # A connection's input is not read while more than this waits to be sent to it.
    output_pause_bytes: int = MIB
    # A connection is cut when more than this waits: only one huge reply can do that. So it is when more than the soft
    # limit has waited for as long as that says; 0: there is none.
    output_bytes_max: int = 1024 * MIB
    output_soft_bytes: int = 0
    output_soft_seconds: int = 0
    # The same while it is subscribed to something: Redis' limits.
    subscriber_output_bytes_max: int = 32 * MIB
    subscriber_output_soft_bytes: int = 8 * MIB
    subscriber_output_soft_seconds: int = 60
    # The classes of events that subscribers are notified of, by their letters (see `notifications`).
    notify_events: str = ""
    # Keys of which is remembered who tracks them, in each process; 0: as many as there is room for.
    tracked_keys_max: int = 1_000_000
    # Requests that take longer are in SLOWLOG; 0: all, -1: none.
    slow_over_us: int = 10_000
    slow_entries_max: int = 128
    # Requests that take so long, or longer, are events of LATENCY; 0: none are.
    latency_over_ms: int = 0
    # Entries of ACL LOG.
    acl_log_entries_max: int = 128
    # How long a reply made in steps may keep its epoch from being freed.
    sliced_reply_ms_max: int = 60_000
    # How long `stop` waits for replies to be sent.
    stop_ms_max: int = 2_000

    def __post_init__(self) -> None:
        if self.role not in ("master", "slave"):
            raise ValueError(f"role is 'master' or 'slave', not {self.role!r}")
        if len({each.user for each in self.limits}) < len(self.limits):
            raise ValueError("--rate-limit is given twice for one user; write both limits as USER=COMMANDS,BYTES")
        if self.tls_port is not None and self.tls is None:
            raise ValueError("--tls-port needs a certificate: give --tls-cert-file and --tls-key-file")
        if self.tls_port is not None and self.tls_port == self.port != 0:
            raise ValueError(
                f"--port and --tls-port are both {self.port}; leave --tls-port out to have TLS alone there"
            )

    @property
    def is_slave(self) -> bool:
        """Tell whether clients are told that this is a replica."""
        return self.role == "slave"

    @property
    def request_limits(self) -> RequestLimits:
        """What one client may make the server hold."""
        return RequestLimits(self.bulk_bytes_max, self.query_buffer_bytes_max)
