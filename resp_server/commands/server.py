"""Commands about the server: time, size, role. INFO and CONFIG have files of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resp_server.cluster.view import PartView
from resp_server.commands.generic import sliced
from resp_server.commands.spec import OneOrMore, command
from resp_server.instance import Call
from resp_server.protocol.replies import Reply
from state_backend.keyspace import KeyspaceView


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


@command("module|list")
def module_list(call: Call) -> Reply:
    """Returns all loaded modules."""
    return []


@command("script|exists")
def script_exists(call: Call, *digests: OneOrMore) -> Reply:
    """Determines whether server-side Lua scripts exist in the script cache."""
    return [0 for _ in digests]
