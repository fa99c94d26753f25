"""Random transactions at a Redis alone, and at the same Redis through a proxy, also with reads of states among them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.wire import Reply, Words
from tests.differential.through_a_swap import CUTS, KEYS, OF_STATES, raw, replies_after, replies_of_both, words
from tests.server.swap import Swap

LINES = (
    "MULTI|MULTI|MULTI|EXEC|EXEC|EXEC|DISCARD|UNWATCH|MULTI x|EXEC x|DISCARD x|WATCH|PING|ECHO hello|INCR n|INCR n|"
    "LPUSH l a|OBJECT NOPE K|OBJECT|NOSUCH 1|PING 1 2"
)
READS_OF_STATES = [row for row in OF_STATES if row[1][:1] != b"-"]


@st.composite
def transaction_words(draw: st.DrawFn) -> Words:
    """Draw a request of a transaction, or one that watches keys."""
    if draw(st.integers(0, 3)) == 0:
        return [b"WATCH", *(key.encode() for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)))]
    return [part.encode() for part in draw(st.sampled_from(LINES.split("|"))).split(" ")]


def with_reads_of_states(
    pipeline: Sequence[Words], replies: Sequence[Reply], between: Sequence[tuple[int, tuple[Words, bytes]]]
) -> tuple[list[Words], list[bytes]]:
    """Return the pipeline with reads of states between its requests, and the replies that are expected then."""
    mixed: list[Words] = []
    expected: list[bytes] = []
    queued: list[bytes | None] | None = None  # of the transaction: the replies to reads of states, None for others
    for at in range(len(pipeline) + 1):
        for place, (request, reply) in between:
            if min(place, len(pipeline)) == at:
                mixed.append(request)
                expected.append(reply if queued is None else b"+QUEUED\r\n")
                if queued is not None:
                    queued.append(reply)
        if at == len(pipeline):
            break
        mixed.append(pipeline[at])
        found = replies[at]
        name = pipeline[at][0]
        if found.raw == b"+QUEUED\r\n" and queued is not None:
            queued.append(None)
        elif name == b"MULTI" and found.raw == b"+OK\r\n":
            queued = []
        elif queued is not None and name == b"EXEC" and found.type == "*" and found.value is not None:
            own = iter(found.value)
            items = [next(own).raw if each is None else each for each in queued]
            expected.append(b"*%d\r\n" % len(items) + b"".join(items))
            queued = None
            continue
        elif name in (b"EXEC", b"DISCARD") and not found.raw.startswith(b"-ERR"):
            queued = None
        expected.append(found.raw)
    return mixed, expected


@given(
    pipeline=st.lists(st.one_of(words(), transaction_words(), transaction_words()), min_size=1, max_size=40),
    before=st.lists(words(), max_size=10),
    cuts=CUTS,
    between=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(READS_OF_STATES)), max_size=6),
    is_new=st.booleans(),
)
@checked(150)
def test_transactions_through_the_proxy_are_answered_as_by_the_upstream_alone_to_the_byte(
    swap: Swap,
    pipeline: list[Words],
    before: list[Words],
    cuts: list[int],
    between: list[tuple[int, tuple[Words, bytes]]],
    is_new: bool,
) -> None:
    alone, through = replies_of_both(swap, pipeline, cuts, before=before, is_new=is_new)
    assert raw(through) == raw(alone)

    mixed, expected = with_reads_of_states(pipeline, alone, between)
    assert raw(replies_after(swap, swap.proxy.port, before, mixed, cuts, is_new=is_new)) == expected
