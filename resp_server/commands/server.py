"""Commands about the server: TIME, DBSIZE, ROLE, MONITOR and others. INFO and CONFIG have modules of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from resp_server.acl.visibility import Visibility
from resp_server.command.handler import OneOrMore, command, worker_query
from resp_server.commands.sliced_reply import sliced_reply
from resp_server.pipeline.context import GATHER_S_MAX, CommandContext, PinnedContext, ServerContext
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import OK, Pending, Reply, Verbatim
from resp_server.push.monitor import ANNOUNCE_MONITORS, CUT_MONITORS, RELAY_LINES, MonitorLine
from resp_server.settings.server import REDIS_VERSION

ART = """\
   .  *   .      .   *
  *    \\ | /  .      .
 .   -- (*) --   *
   .   / | \\  .     *
"""


@command("dbsize")
def dbsize(context: CommandContext) -> Reply:
    """Returns the number of keys in the database."""
    count = context.visibility.key_count()
    return sliced_reply(context, lambda view: _key_counts(context.visibility_of(view)), int) if count is None else count


def _key_counts(visibility: Visibility) -> Iterator[Sequence[Reply]]:
    return ([count] for count in visibility.key_counts())


@command("time")
def time(context: CommandContext) -> Reply:
    """Returns the server time."""
    seconds, milliseconds = divmod(context.server.clock(), 1000)
    return [b"%d" % seconds, b"%d" % (milliseconds * 1000)]


@command("role")
def role(context: CommandContext) -> Reply:
    """Returns the replication role."""
    cluster = context.server.cluster
    if cluster is not None and cluster.is_replica:
        return [b"slave", cluster.master.host.encode(), cluster.master.port, b"connected", 0]
    if context.server.is_replica:
        # The master is a Spark query, which has no address.
        return [b"slave", b"spark", 0, b"connected", 0]
    replicas = () if cluster is None else cluster.topology.replicas(cluster.myself)
    return [b"master", 0, [[replica.host.encode(), b"%d" % replica.port, b"0"] for replica in replicas]]


@command("lastsave")
def lastsave(context: CommandContext) -> Reply:
    """Returns the Unix timestamp of the last successful save to disk."""
    return last_save_s(context)


def last_save_s(context: CommandContext) -> int:
    """Return when the newest visible epoch was committed, in Unix seconds; without one, when the server started."""
    newest_ms = None
    for _, snapshot in context.jobs.snapshots():
        applied = snapshot.applied
        if applied.epoch >= 0 and (newest_ms is None or applied.clock_ms > newest_ms):
            newest_ms = applied.clock_ms
    return (context.server.process.started_ms if newest_ms is None else newest_ms) // 1000


@command("lolwut")
def lolwut(context: CommandContext, *ignored: bytes) -> Reply:
    """Displays computer art and the Redis version"""
    return Verbatim(f"{ART}\nRedis ver. {REDIS_VERSION}\n".encode())


@command("monitor")
def monitor(context: CommandContext) -> Reply:
    """Listens for all requests received by the server in real-time."""
    if isinstance(context, PinnedContext):
        raise GenericError("MONITOR isn't allowed for DENY BLOCKING client")
    context.server.observation.monitors.add(context.session)
    if context.server.workers is None:
        return OK
    pending = Pending(GATHER_S_MAX, lambda: OK)
    context.server.observation.monitors.announce(lambda: pending.resolve(lambda: OK))
    return pending


@worker_query(ANNOUNCE_MONITORS)
def set_remote_monitors(server: ServerContext, nothing: None) -> None:
    """Forward this process's requests to monitors at other processes from now on."""
    server.observation.monitors.set_remote(True)


@worker_query(RELAY_LINES)
def relay_lines(server: ServerContext, lines: Sequence[Sequence[Any]]) -> int:
    """Send another process's requests to the monitors here that may see them; return the number of monitors here."""
    server.observation.monitors.take([MonitorLine.from_json(each) for each in lines])
    return len(server.observation.monitors)


@worker_query(CUT_MONITORS)
def cut_monitors(server: ServerContext, nothing: None) -> int:
    """Disconnect the monitors here, because another process could not forward all requests."""
    server.observation.monitors.cut()
    return len(server.observation.monitors)


@command("module|list")
def module_list(context: CommandContext) -> Reply:
    """Returns all loaded modules."""
    return []


@command("script|exists")
def script_exists(context: CommandContext, *digests: OneOrMore) -> Reply:
    """Determines whether server-side Lua scripts exist in the script cache."""
    return [0 for _ in digests]
