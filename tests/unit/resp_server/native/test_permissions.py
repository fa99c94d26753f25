"""The compiled core matches keys with users' patterns as Python does, which tests compare with redis-server."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from compat.examples import examples
from resp_server.native import permissions
from resp_server.protocol.glob import matcher

pytestmark = pytest.mark.compiled

PATTERNS = st.lists(
    st.sampled_from(
        [b"*", b"?", b"[", b"]", b"^", b"-", b"\\", b"a", b"b", b"c", b"[a-c]", b"[^b]", b"\xff", b"\0", b""]
    ),
    max_size=12,
).map(b"".join)
TEXTS = st.lists(st.sampled_from([b"a", b"b", b"c", b"-", b"]", b"^", b"\\", b"*", b"\xff", b"\0"]), max_size=10).map(
    b"".join
)


@settings(max_examples=examples(300), deadline=None)
@given(PATTERNS, TEXTS)
@example(b"[", b"[")
@example(b"[^", b"a")
@example(b"[a-", b"-")
@example(b"a\\", b"a\\")
@example(b"[\\", b"\\")
@example(b"[c-a]", b"b")
@example(b"[\xff-a]", b"\0")
@example(b"[a-\xff]", b"\x80")
def test_patterns_match_as_in_python(pattern: bytes, text: bytes) -> None:
    assert permissions.glob_matches(pattern, text) == bool(matcher(pattern)(text))
