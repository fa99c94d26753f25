"""The groups of `sparkis.serve`, whose fields are also options. Public, as `sparkis.Tls` and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from resp_server.limits import DEDICATED_CONNECTIONS_MAX, UPSTREAM_CONNECTIONS, UPSTREAM_TIMEOUT_S
from resp_server.settings.option_values import denied_command, port_range, rate_limit, seconds, whole_number
from resp_server.settings.server import ClientLimits
from resp_server.settings.setting import (
    ATTACH,
    PROXY,
    SERVE,
    SERVERS,
    STATE_SERVER,
    SWAP_CHECK,
    Value,
    documented,
    setting,
)
from state_backend.model.clock import MS_PER_S

# The longest time limit of a reply.
TIMEOUT_MS_MAX = 60_000
# More than one Redis can serve faster than fewer (guess).
CONNECTIONS_MAX = 64
PINNED_CONNECTIONS_MAX = 65_536
# A URL with a password is better given here than on the command line, which every user of the machine can read.
UPSTREAM_VARIABLE = "SPARKIS_UPSTREAM"
# How long a server beside a driver stays after a crash by default: long enough for a restart of the driver (guess).
LINGER_S = 600.0
DEFAULT_PORTS = "7400-7500"
WITH_URL = (SERVE, PROXY, SWAP_CHECK)
TO_UPSTREAM = "TLS to the upstream, with --upstream rediss://..."


def of_upstream(initial: Value, help: str, programs: tuple[str, ...] = (SERVE, PROXY), **known: Any) -> Value:
    """Declare a setting of an upstream."""
    return setting(initial, help, programs, section="upstream", **known)


@documented
@dataclass(frozen=True)
class Upstream:
    """A Redis of your own, which has all keys that no state owns: clients read and write both at one address.

    Examples:
        >>> sparkis.Upstream("redis://127.0.0.1:6379", timeout_ms=500).timeout_ms
        500
    """

    url: str | None = of_upstream(
        None,
        "a Redis that has all keys that no state owns: redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], "
        "redis[s]+cluster://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...], "
        "redis[s]+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DATABASE] or "
        f"unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE] (default: {UPSTREAM_VARIABLE} of the environment)",
        WITH_URL,
        option="upstream",
        variable=UPSTREAM_VARIABLE,
        repr=False,
        note="`redis+cluster://...` is a [Redis Cluster](swap.md#a-redis-cluster-as-the-upstream), "
        "`redis+sentinel://...` the master that [sentinels](swap.md#sentinels) know. Escape special characters of a "
        "password as in any URL (`@` is `%40`). Other users of the machine can read a command line",
        metavar="URL",
    )
    _: KW_ONLY
    timeout_ms: int = of_upstream(
        int(UPSTREAM_TIMEOUT_S * MS_PER_S),
        "the silence of the upstream, in milliseconds, after which it counts as failed (default %(default)s)",
        WITH_URL,
        option="upstream-timeout",
        note="A script that runs longer counts as a failure, too",
        type=whole_number(1, TIMEOUT_MS_MAX, "a number of milliseconds"),
        metavar="MS",
    )
    tls_ca_cert_file: str | Path | None = of_upstream(
        None,
        "the CA of the upstream's certificate (default: this machine's CAs)",
        WITH_URL,
        option="upstream-tls-ca-cert-file",
        title=TO_UPSTREAM,
        metavar="FILE",
    )
    tls_cert_file: str | Path | None = of_upstream(
        None,
        "the certificate to present to the upstream",
        WITH_URL,
        option="upstream-tls-cert-file",
        title=TO_UPSTREAM,
        note="New connections use changed files",
        metavar="FILE",
    )
    tls_key_file: str | Path | None = of_upstream(
        None, "its private key", WITH_URL, option="upstream-tls-key-file", title=TO_UPSTREAM, metavar="FILE"
    )
    tls_server_name: str | None = of_upstream(
        None,
        "the name in the upstream's certificate (default: the host)",
        WITH_URL,
        option="upstream-tls-server-name",
        title=TO_UPSTREAM,
        metavar="NAME",
    )
    ownership: str | Path | None = of_upstream(
        None,
        "with --upstream: the file that records which keys belong to states, also to those of stopped jobs",
        note="Required. Each proxy needs its own file, which must survive a restart",
        type=Path,
        metavar="FILE",
    )
    new_jobs: Literal["wait", "take"] = of_upstream(
        "wait",
        "with --upstream: if the upstream has keys of a new job, wait for `sparkis confirm JOB`, or let the job's "
        "states take these keys at once (default %(default)s)",
        note="([new jobs](swap.md#new-jobs))",
        choices=("wait", "take"),
    )
    routes: str | Path | None = of_upstream(
        None,
        "with --upstream: rules (TOML) about the owners of keys, which come before the jobs' key formats; "
        "reloaded by SIGHUP and by `sparkis reload`",
        note="([swap-rules.md](swap-rules.md))",
        type=Path,
        metavar="FILE",
    )
    connections: int = of_upstream(
        UPSTREAM_CONNECTIONS,
        "the shared connections to each database of the upstream for each version of the protocol "
        "(default %(default)s)",
        option="upstream-connections",
        note="Of a cluster: to each node",
        type=whole_number(1, CONNECTIONS_MAX, "a number of connections"),
        metavar="N",
    )
    pinned: int = of_upstream(
        DEDICATED_CONNECTIONS_MAX,
        "the connections to the upstream that one client has alone, for its blocking commands; beyond N they are "
        "an error (default %(default)s)",
        option="upstream-pinned",
        note="([connections of single clients](swap.md#connections-of-single-clients))",
        type=whole_number(1, PINNED_CONNECTIONS_MAX, "a number of connections"),
        metavar="N",
    )
    transactions: Literal["mixed", "strict"] = of_upstream(
        "mixed",
        "with --upstream: mixed: EXEC runs a transaction with keys of both backends, although they are not read at "
        "the same instant; strict: EXEC refuses it (default %(default)s)",
        note="([transactions](swap.md#transactions))",
        choices=("mixed", "strict"),
    )
    auth: Literal["proxy", "client"] = of_upstream(
        "proxy",
        "with --upstream: proxy: all requests run as the URL's user; client: each client logs in at the upstream, "
        "which checks its AUTH (default %(default)s)",
        option="upstream-auth",
        note="([clients that log in](swap.md#clients-that-log-in-at-the-upstream))",
        choices=("proxy", "client"),
    )
    copiers: Literal["refuse", "report"] = of_upstream(
        "refuse",
        "with --upstream and rules of prefer-state: whether the proxy ends a few seconds after its start if a "
        "program still copies such keys, or only reports it (default %(default)s)",
        note="([a copier that still runs](swap-rules.md#a-copier-that-still-runs))",
        choices=("refuse", "report"),
    )
    allow: Sequence[str] | None = of_upstream(
        None,
        "with --upstream: pass a command on to the upstream that is refused otherwise, such as 'CONFIG SET'; may "
        "be repeated",
        option="upstream-allow",
        note="A list in Python ([commands that are refused](swap.md#commands-that-are-refused))",
        type=denied_command,
        action="append",
        metavar="COMMAND",
    )


@documented
@dataclass(frozen=True, kw_only=True)
class Limits(ClientLimits):
    """Limits of the clients of each server and of the proxy: rates of users, and Redis' own settings by their names.

    Examples:
        >>> sparkis.Limits(maxclients=1_000, rates="dashboard=100").maxclients
        1000
    """

    rates: str | Sequence[str] | None = setting(
        None,
        "the limits of a user: commands, and bytes, per second; may be repeated",
        SERVERS,
        option="rate-limit",
        section="rate-limit",
        spark="rateLimits",
        note="A list in Python ([access.md](access.md#rates))",
        action="append",
        type=rate_limit,
        default=[],
        metavar="USER=COMMANDS[,BYTES]",
    )


@documented
@dataclass(frozen=True, kw_only=True)
class Driver:
    """The place of one server beside the driver. It may outlive the driver.

    Examples:
        >>> sparkis.Driver(store="stores", linger=600).linger
        600
    """

    store: str | Path | None = setting(
        None,
        "the folder of the stores (default: in the user's cache)",
        (SERVE, STATE_SERVER, ATTACH),
        section="store",
        note="For this server only; in Python the default is a temporary folder",
        in_program={
            STATE_SERVER: {
                "help": "the folder of the stores and of the server's identity (default: in the user's cache)",
                "note": "For this server only",
            }
        },
        metavar="FOLDER",
    )
    role: Literal["master", "slave"] = setting(
        "master",
        "the role in HELLO, ROLE and INFO (default master)",
        (SERVE,),
        section="serve",
        choices=("master", "slave"),
    )
    linger: float | None = setting(
        LINGER_S,
        "how long the server stays after the last attachment was killed (default %(default)g)",
        (SERVE, ATTACH),
        section="store",
        note="In Python: after its driver was killed; `None`: for ever "
        "([while the driver restarts](serving.md#while-the-driver-restarts))",
        in_program={SERVE: {"help": None, "default": None, "type": float}},
        type=seconds,
        metavar="SECONDS",
    )


@documented
@dataclass(frozen=True, kw_only=True)
class Executors:
    """The places of state servers beside executors, and of the registry beside the driver.

    Examples:
        >>> sparkis.Executors(ports="7000-7099").ports
        '7000-7099'
    """

    ports: str | None = setting(
        None,
        f"listen on the first free port of these (default {DEFAULT_PORTS})",
        (STATE_SERVER,),
        section="state-server",
        spark="server.ports",
        note="A server prefers its earlier port",
        type=port_range,
        metavar="FIRST-LAST",
    )
    bind: str | None = setting(
        None,
        "the address that a state server listens on; by default the one by which its machine reaches the driver",
        option="",
        spark="server.bindAddress",
    )
    host: str | None = setting(
        None,
        "the host announced to clients, if it differs; `$NAME` in it is a variable of the executor's environment, such "
        "as a node's address",
        option="",
        spark="server.host",
    )
    registry_port: int | None = setting(None, "the registry's port (0: any)", option="", spark="registry.port")
