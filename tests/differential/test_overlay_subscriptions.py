"""Random subscriptions and messages at a Redis alone, and at the same Redis through a proxy."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.wire import LAST_COMMAND, LAST_REPLY, Connection, Reply, Words, replies_in, requests
from compat.waiting import eventually
from tests.server.overlay import Overlay

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
# Where a pipeline is cut into chunks.
CUTS = st.lists(st.integers(0, 100_000), max_size=4)


@st.composite
def words(draw: st.DrawFn) -> Words:
    """Draw a request."""
    chosen = {"C": st.sampled_from(CHANNELS), "P": st.sampled_from(PATTERNS)}
    parts = draw(st.sampled_from(LINES)).split(" ")
    return [(draw(chosen[part]) if part in chosen else part).encode() for part in parts]


def empty_upstream(overlay: Overlay) -> None:
    """Empty the upstream, and wait until it has noticed that the clients before have left."""
    with overlay.upstream.connect() as connection:
        connection.call("FLUSHALL")
        for asked in ("CHANNELS", "SHARDCHANNELS", "NUMPAT"):
            eventually(lambda asked=asked: connection.call("PUBSUB", asked).plain, lambda found: not found)


def send(connection: Connection, pipeline: Sequence[Words], cuts: Sequence[int], *, is_new: bool) -> int:
    """Send a pipeline in chunks, and a last request; return the number of frames before its replies. is_new: RESP3."""
    greeting: list[Words] = [[b"HELLO", b"3"]] if is_new else []
    data, at = requests([*greeting, *pipeline, (LAST_COMMAND,)]), 0
    for cut in [*sorted(cut % len(data) for cut in cuts), len(data)]:
        connection.send(data[at:cut])
        at = cut
    return len(greeting)


def replies_alone(overlay: Overlay, pipeline: Sequence[Words], *, is_new: bool) -> list[Reply]:
    """Return the frames that the upstream sends after a pipeline."""
    with overlay.upstream.connect() as connection:
        before = send(connection, pipeline, (), is_new=is_new)
        return replies_in(connection.read_to_end(LAST_REPLY).removesuffix(LAST_REPLY))[before:]


def replies_through(
    overlay: Overlay, pipeline: Sequence[Words], cuts: Sequence[int], count: int, *, is_new: bool
) -> list[Reply]:
    """Return the first `count` frames through the proxy: messages may come after the last reply, which must be one."""
    with overlay.proxy.connect() as connection:
        before = send(connection, pipeline, cuts, is_new=is_new)
        replies = [connection.read() for _ in range(before + count + 1)][before:]
    replies.remove(next(reply for reply in replies if reply.raw == LAST_REPLY))
    return replies


@given(pipeline=st.lists(words(), min_size=1, max_size=30), cuts=CUTS, is_new=st.booleans())
@checked(40)
def test_subscriptions_through_overlay_are_those_of_upstream(
    overlay: Overlay, pipeline: list[Words], cuts: list[int], is_new: bool
) -> None:
    """A client's own message comes before or after the reply to its PUBLISH, so messages are compared apart."""
    found = []
    empty_upstream(overlay)
    alone = replies_alone(overlay, pipeline, is_new=is_new)
    empty_upstream(overlay)
    through = replies_through(overlay, pipeline, cuts, len(alone), is_new=is_new)
    for replies in (alone, through):
        # In RESP2 no message can come: a subscriber may not publish.
        messages = [each.raw for each in replies if each.type == ">" and each.value[0].value in MESSAGES]
        found.append((messages, [each.raw for each in replies if each.raw not in messages]))
    assert found[1] == found[0]
