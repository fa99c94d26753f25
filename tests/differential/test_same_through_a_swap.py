"""Random commands at a Redis alone, and at the same Redis through a proxy beside keys of states: equal bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.servers import sparkis_server
from compat.conformance.wire import Reply, Words
from compat.waiting import eventually
from tests.differential.through_a_swap import (
    CUTS,
    LINES,
    OF_CONNECTIONS,
    OF_STATES,
    raw,
    replies_after,
    replies_of_both,
    words,
)
from tests.server.swap import Swap

# Names of states' keys that are not their own, reads that are compared behind clients, and cached replies.
RULES = """
[[rule]]
keys = "car/<car>"
owner = "state"
state_key = "job:speed:<car>"

[[rule]]
keys = "s"
owner = "shadow"

[[rule]]
keys = "<any>h"
owner = "shadow"

[[rule]]
keys = "n"
owner = "upstream"
cache = "tracking"

[[rule]]
keys = "l"
owner = "upstream"
cache = "1h"
"""
OF_NAMES: list[tuple[Words, bytes]] = [
    ([b"GET", b"car/3"], b"$2\r\n30\r\n"),
    ([b"MGET", b"car/3", b"job:speed:4", b"car/5"], b"*3\r\n$2\r\n30\r\n$2\r\n40\r\n$2\r\n50\r\n"),
    ([b"EXISTS", b"car/absent", b"car/1"], b":1\r\n"),
    ([b"SET", b"car/3", b"1"], b"-ERR key 'car/3' is owned by state job:speed\r\n"),
]
Mixed = Sequence[tuple[int, tuple[Words, bytes]]]


def mixtures(of_states: Sequence[tuple[Words, bytes]]) -> st.SearchStrategy[Mixed]:
    """Draw requests about states, with their replies, and their places in a pipeline."""
    return st.lists(st.tuples(st.integers(0, 25), st.sampled_from(of_states)), max_size=6)


def mixed(pipeline: Sequence[Words], alone: Sequence[Reply], between: Mixed) -> tuple[list[Words], list[bytes]]:
    """Return a pipeline with requests about states between its own, and the replies."""
    found, expected = list(pipeline), raw(alone)
    for place, (request, reply) in sorted(between, key=lambda row: row[0], reverse=True):
        at = min(place, len(pipeline))
        # Other databases have no keys of states.
        if any(words[0] == b"SELECT" and each == b"+OK\r\n" for words, each in zip(found[:at], expected, strict=False)):
            continue
        found.insert(at, request)
        expected.insert(at, reply)
    return found, expected


pipelines = st.lists(words(), min_size=1, max_size=25)
befores = st.lists(words(), max_size=25)


@given(
    pipeline=st.lists(words([*LINES, *OF_CONNECTIONS]), min_size=1, max_size=25),
    before=befores,
    cuts=CUTS,
    between=mixtures(OF_STATES),
    is_new=st.booleans(),
)
@checked(150)
def test_commands_through_the_proxy_are_answered_as_by_the_upstream_alone_to_the_byte(
    swap: Swap, pipeline: list[Words], before: list[Words], cuts: list[int], between: Mixed, is_new: bool
) -> None:
    alone, through = replies_of_both(swap, pipeline, cuts, before=before, is_new=is_new)
    assert raw(through) == raw(alone)

    # Once more with requests about states between them.
    found, expected = mixed(pipeline, alone, between)
    assert raw(replies_after(swap, swap.proxy.port, before, found, cuts, is_new=is_new)) == expected


@pytest.fixture(scope="module", params=["a proxy with rules", "sparkis serve"])
def other_port(swap: Swap, request: pytest.FixtureRequest) -> Iterator[int]:
    """Another program with the same upstream and the same states: its port."""
    with ExitStack() as stack:
        url, folder = f"redis://127.0.0.1:{swap.upstream_port}", swap.folder
        rules = folder / "rules.toml"
        rules.write_text(RULES)
        if request.param == "sparkis serve":
            options = ("--upstream", url, "--ownership", str(folder / "served.json"), "--routes", str(rules))
            program = stack.enter_context(sparkis_server(folder / "served", swap.log, *options))
        else:
            program = swap.start_at(url, "--routes", str(rules))
        with program.connect() as client:
            for words, reply in (OF_NAMES[0], OF_STATES[0]):
                eventually(lambda words=words: client.call(*words).raw, lambda found, is_=reply: found == is_)  # type: ignore[misc]
            eventually(lambda: not client.call("EXISTS", "other").is_error)
        yield program.port


@given(
    pipeline=pipelines,
    before=befores,
    cuts=CUTS,
    between=mixtures([*OF_STATES, *OF_NAMES]),
    is_new=st.booleans(),
)
@checked(60)
def test_commands_beside_rules_are_answered_as_by_the_upstream_alone_to_the_byte(
    swap: Swap,
    other_port: int,
    pipeline: list[Words],
    before: list[Words],
    cuts: list[int],
    between: Mixed,
    is_new: bool,
) -> None:
    alone = replies_after(swap, swap.upstream.port, before, pipeline, is_new=is_new)
    found, expected = mixed(pipeline, alone, between)
    assert raw(replies_after(swap, other_port, before, found, cuts, is_new=is_new)) == expected
