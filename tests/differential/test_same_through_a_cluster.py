"""Random commands at a node of a Redis Cluster, and at the cluster through a proxy beside keys of states: equal bytes.

All keys are in one slot, as a node alone requires. What a proxy splits over slots is compared with a single Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.servers import Running
from compat.conformance.wire import Words
from compat.waiting import eventually
from tests.differential.through_a_swap import CUTS, KEYS, raw, replies_at, words
from tests.server.redis_cluster import RedisCluster
from tests.server.swap import Swap

TAG = b"{t}"
# About all masters, or about the client's own node.
LEFT_OUT = (b"PUBSUB", b"FUNCTION", b"LOLWUT")
NAMES = {*(key.encode() for key in KEYS), b"nokey"}

SPLIT = ("MGET", "EXISTS", "DEL", "UNLINK", "TOUCH", "MSET", "SET", "INCR", "GET", "LPUSH", "TYPE")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with ExitStack() as stack:
        yield RedisCluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture(scope="module")
def proxy(swap: Swap, cluster: RedisCluster) -> Running:
    seeds = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    proxy = swap.start_at(f"redis+cluster://{seeds}")
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        eventually(lambda: client.call("SET", "ready", "1").plain == b"OK")
    return proxy


def in_one_slot(request: Words) -> Words:
    """Return a request whose keys have the tag. Values that are names of keys have it as well, which does no harm."""
    return [request[0], *(TAG + word if word in NAMES else word for word in request[1:])]


@given(
    pipeline=st.lists(words().filter(lambda request: request[0] not in LEFT_OUT), min_size=1, max_size=25),
    cuts=CUTS,
    is_new=st.booleans(),
)
@checked(100)
def test_commands_are_answered_as_by_the_node_alone_to_the_byte(
    cluster: RedisCluster, proxy: Running, pipeline: list[Words], cuts: list[int], is_new: bool
) -> None:
    node = cluster.master_of("{t}")
    replies = []
    for port, chunks in ((node.port, []), (proxy.port, cuts)):
        cluster.call(node, "FLUSHALL")
        replies.append(raw(replies_at(port, [in_one_slot(each) for each in pipeline], chunks, is_new=is_new)))
    assert replies[1] == replies[0]


@st.composite
def split_requests(draw: st.DrawFn) -> Words:
    """Draw a request that is about one key, or is split over the slots of several."""
    keys = st.sampled_from([b"k%d" % number for number in range(12)])
    name = draw(st.sampled_from(SPLIT))
    if name in ("SET", "LPUSH"):
        return [name.encode(), draw(keys), draw(st.sampled_from([b"1", b"x"]))]
    if name == "MSET":
        return [b"MSET", *(word for key in draw(st.lists(keys, min_size=1, max_size=8)) for word in (key, b"5"))]
    count = 1 if name in ("INCR", "GET", "TYPE") else 8
    return [name.encode(), *draw(st.lists(keys, min_size=1, max_size=count))]


@given(
    pipeline=st.lists(split_requests(), min_size=1, max_size=25),
    cuts=CUTS,
    is_new=st.booleans(),
)
@checked(100)
def test_what_is_split_over_slots_is_answered_as_by_a_single_redis(
    swap: Swap, cluster: RedisCluster, proxy: Running, pipeline: list[Words], cuts: list[int], is_new: bool
) -> None:
    for node in (*cluster.nodes, swap.upstream):
        RedisCluster.call(node, "FLUSHALL")
    alone, split = (replies_at(port, pipeline, cuts, is_new=is_new) for port in (swap.upstream.port, proxy.port))
    assert raw(split) == raw(alone)
