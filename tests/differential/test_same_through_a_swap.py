"""Random commands at a Redis alone, and at the same Redis through a proxy beside keys of states: equal bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.wire import Words
from tests.differential.through_a_swap import CUTS, OF_STATES, raw, replies_after, replies_of_both, words
from tests.server.swap import Swap


@given(
    pipeline=st.lists(words(), min_size=1, max_size=25),
    before=st.lists(words(), max_size=25),
    cuts=CUTS,
    between=st.lists(st.tuples(st.integers(0, 25), st.sampled_from(OF_STATES)), max_size=6),
    is_new=st.booleans(),
)
@checked(400)
def test_commands_through_the_proxy_are_answered_as_by_the_upstream_alone_to_the_byte(
    swap: Swap,
    pipeline: list[Words],
    before: list[Words],
    cuts: list[int],
    between: list[tuple[int, tuple[Words, bytes]]],
    is_new: bool,
) -> None:
    alone, through = replies_of_both(swap, pipeline, cuts, before=before, is_new=is_new)
    assert raw(through) == raw(alone)

    # Once more with requests about states between them.
    mixed, expected = list(pipeline), raw(alone)
    for place, (request, reply) in sorted(between, key=lambda row: row[0], reverse=True):
        at = min(place, len(pipeline))
        mixed.insert(at, request)
        expected.insert(at, reply)
    assert raw(replies_after(swap, swap.proxy.port, before, mixed, cuts, is_new=is_new)) == expected
