"""Random subscriptions and messages at a Redis alone, and at the same Redis through a proxy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.wire import Words
from compat.waiting import eventually
from tests.differential.through_a_swap import CUTS, replies_after, replies_read
from tests.server.swap import Swap

# C is a channel, P a pattern. UNSUBSCRIBE without names is left out: its replies come in the order of a hash table.
LINES = (
    """
SUBSCRIBE C|SUBSCRIBE C C C|UNSUBSCRIBE C|UNSUBSCRIBE C C|PSUBSCRIBE P|PSUBSCRIBE P P|PUNSUBSCRIBE P
SSUBSCRIBE C|SUNSUBSCRIBE C|SUBSCRIBE|PUBLISH C x|PUBLISH C x|SPUBLISH C x|PUBSUB NUMSUB C C
PUBSUB SHARDNUMSUB C|PING|PING x|GET k|SET k 1|RPUSH l message|LRANGE l 0 -1|RESET|NOSUCH|MGET k l|BLPOP none 0.001
""".strip()
    .replace("\n", "|")
    .split("|")
)
CHANNELS, PATTERNS = ["a", "b", "ab", "job:speed:1", "message"], ["a*", "*", "?", "job:*"]
MESSAGES = (b"message", b"pmessage", b"smessage")


@st.composite
def words(draw: st.DrawFn) -> Words:
    """Draw a request."""
    chosen = {"C": st.sampled_from(CHANNELS), "P": st.sampled_from(PATTERNS)}
    parts = draw(st.sampled_from(LINES)).split(" ")
    return [(draw(chosen[part]) if part in chosen else part).encode() for part in parts]


def wait_until_nobody_listens(swap: Swap) -> None:
    """Wait until the upstream has noticed that the clients before have left."""
    with swap.upstream.connect() as connection:
        for asked in ("CHANNELS", "SHARDCHANNELS", "NUMPAT"):
            eventually(lambda asked=asked: connection.call("PUBSUB", asked).plain, lambda found: not found)


@given(
    pipeline=st.lists(words(), min_size=1, max_size=30),
    cuts=CUTS,
    is_new=st.booleans(),
)
@checked(150)
def test_subscriptions_through_the_proxy_are_answered_as_by_the_upstream_alone(
    swap: Swap, pipeline: list[Words], cuts: list[int], is_new: bool
) -> None:
    """A client's own message comes before or after the reply to its PUBLISH, so messages are compared apart."""
    found = []
    wait_until_nobody_listens(swap)
    alone = replies_after(swap, swap.upstream.port, (), pipeline, is_new=is_new)
    wait_until_nobody_listens(swap)
    with swap.upstream.connect() as connection:
        connection.call("FLUSHALL")
    through = replies_read(swap.proxy.port, pipeline, cuts, len(alone), is_new=is_new)
    for replies in (alone, through):
        # In RESP2 no message can come: a subscriber may not publish.
        messages = [each.raw for each in replies if each.type == ">" and each.value[0].value in MESSAGES]
        found.append((messages, [each.raw for each in replies if each.raw not in messages]))
    assert found[1] == found[0]
