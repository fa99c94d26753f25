"""CLUSTER, ASKING, READONLY and READWRITE. A server outside a cluster replies that cluster support is disabled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resp_server.acl.visibility import Visibility
from resp_server.cluster import replies
from resp_server.cluster.node_view import NodeView
from resp_server.cluster.single_node import single_node
from resp_server.cluster.topology import Node
from resp_server.command.handler import command, integer
from resp_server.commands.sliced_reply import CHUNK_ITEMS_MAX, sliced_reply
from resp_server.pipeline.context import CommandContext
from resp_server.protocol.errors import GenericError, client_text, cluster_disabled
from resp_server.protocol.replies import OK, Reply, Verbatim
from state_backend.model.slots import HASH_BITS, SLOTS, slot_at, slot_of

# Keys of a slot that are read at once, if they are all: few first, as keys of other slots are read with them (guess:
# well below a millisecond).
KEYS_AT_ONCE = (4, 128)


def _node_view(context: CommandContext) -> NodeView:
    """Return this node's view of the cluster; GenericError outside a cluster, before arguments are checked."""
    if context.server.proxy.is_single_node:
        return single_node(context.session.local_address)
    if context.server.cluster is None:
        raise cluster_disabled()
    return context.server.cluster


@command("asking")
def asking(context: CommandContext) -> Reply:
    """Signals that a cluster client is following an -ASK redirect."""
    # No slot is ever migrating between nodes, so there is nothing to allow.
    _node_view(context)
    return OK


@command("readonly")
def readonly(context: CommandContext) -> Reply:
    """Enables read-only queries for a connection to a Redis Cluster replica node."""
    _node_view(context)
    context.session.set_readonly(True)
    return OK


@command("readwrite")
def readwrite(context: CommandContext) -> Reply:
    """Enables read-write queries for a connection to a Reids Cluster replica node."""
    _node_view(context)
    context.session.set_readonly(False)
    return OK


@command("cluster|slots")
def cluster_slots(context: CommandContext) -> Reply:
    """Returns the mapping of cluster slots to nodes."""
    return replies.slots(_node_view(context))


@command("cluster|shards")
def cluster_shards(context: CommandContext) -> Reply:
    """Returns the mapping of cluster slots to shards."""
    return replies.shards(_node_view(context))


@command("cluster|nodes")
def cluster_nodes(context: CommandContext) -> Reply:
    """Returns the cluster configuration for a node."""
    return Verbatim(replies.nodes(_node_view(context)).encode())


@command("cluster|info")
def cluster_info(context: CommandContext) -> Reply:
    """Returns information about the state of a node."""
    return Verbatim(replies.info(_node_view(context)).encode())


@command("cluster|myid")
def cluster_myid(context: CommandContext) -> bytes:
    """Returns the ID of a node."""
    return _node_view(context).myself.id.encode()


@command("cluster|myshardid")
def cluster_myshardid(context: CommandContext) -> bytes:
    """Returns the shard ID of a node."""
    return replies.shard_id(_node_view(context)).encode()


@command("cluster|links")
def cluster_links(context: CommandContext) -> Reply:
    """Returns a list of all TCP links to and from peer nodes."""
    _node_view(context)
    return []


@command("cluster|replicas")
def cluster_replicas(context: CommandContext, node_id: bytes) -> Reply:
    """Lists the replica nodes of a master node."""
    node_view = _node_view(context)
    node = _node(node_view, node_id)
    if node.is_replica:
        raise GenericError("The specified node is not a master")
    return [replies.node_line(node_view, replica).encode() for replica in node_view.topology.replicas(node)]


@command("cluster|slaves")
def cluster_slaves(context: CommandContext, node_id: bytes) -> Reply:
    """Lists the replica nodes of a master node."""
    return cluster_replicas(context, node_id)


@command("cluster|count-failure-reports")
def cluster_count_failure_reports(context: CommandContext, node_id: bytes) -> int:
    """Returns the number of active failure reports active for a node."""
    _node(_node_view(context), node_id)
    return 0


def _node(node_view: NodeView, node_id: bytes) -> Node:
    for node in node_view.topology.nodes:
        if node.id.encode() == node_id:
            return node
    raise GenericError(f"Unknown node {client_text(node_id)}")


@command("cluster|keyslot")
def cluster_keyslot(context: CommandContext, key: bytes) -> int:
    """Returns the hash slot for a key."""
    _node_view(context)
    return slot_of(key)


@command("cluster|countkeysinslot")
def cluster_countkeysinslot(context: CommandContext, slot: bytes) -> Reply:
    """Returns the number of keys in a hash slot."""
    _keys_are_here(context)
    number = integer(slot)
    if not 0 <= number < SLOTS:
        raise GenericError("Invalid slot")
    keys = _few_keys_in(context, number)
    if keys is not None:
        return len(keys)
    return sliced_reply(
        context, lambda view: ([len(keys)] for keys in _keys_in(context.visibility_of(view), number)), int
    )


@command("cluster|getkeysinslot")
def cluster_getkeysinslot(context: CommandContext, slot: bytes, count: bytes) -> Reply:
    """Returns the key names in a hash slot."""
    _keys_are_here(context)
    number, keys_max = integer(slot), integer(count)
    if not 0 <= number < SLOTS or keys_max < 0:
        raise GenericError("Invalid slot or number of keys")
    keys = _few_keys_in(context, number)
    if keys is not None:
        return keys[:keys_max]
    return sliced_reply(context, lambda view: _at_most(_keys_in(context.visibility_of(view), number), keys_max))


def _keys_are_here(context: CommandContext) -> None:
    _node_view(context)
    if context.server.proxy.is_single_node:
        raise GenericError("the keys of a slot are at the upstream; ask its nodes")


def _keys_in(visibility: Visibility, slot: int) -> Iterator[Sequence[bytes]]:
    """Iterate over the keys of a slot, in steps of bounded time; there are none in a slot that this server lacks."""
    cursor = slot << HASH_BITS
    while True:
        cursor, keys = visibility.scan(cursor, CHUNK_ITEMS_MAX)
        yield [key for key in keys if slot_of(key) == slot]
        if not cursor or slot_at(cursor) != slot:
            return


def _few_keys_in(context: CommandContext, slot: int) -> list[bytes] | None:
    """Return the keys of a slot if they are few, as in most slots; None: they have to be read in steps."""
    for keys_max in KEYS_AT_ONCE:
        cursor, keys = context.visibility.scan(slot << HASH_BITS, keys_max)
        if not cursor or slot_at(cursor) != slot:
            return [key for key in keys if slot_of(key) == slot]
    return None


def _at_most(parts: Iterator[Sequence[bytes]], count: int) -> Iterator[Sequence[bytes]]:
    for part in parts:
        if not count:
            return
        yield part[:count]
        count -= len(part[:count])


@command("cluster|help")
def cluster_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    _node_view(context)
    return context.server.table.help("cluster")
