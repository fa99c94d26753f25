"""Any bytes of a server, in any chunks, give the same whole replies, up to the first byte that is no reply."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.wire import replies_in
from resp_server import native
from resp_server.raw_replies.reply_splitter import ReplySplitter, items_of
from tests.properties.steps import result_of

MANY_BYTES = 1 << 20

texts = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"\r\n$1\r\na\r\n", b"$", b"*2\r\n", b"\r\n", b"\xff", b"\r\n\xff$", b"x" * 5000]),
).map(lambda text: b"$%d\r\n%b\r\n" % (len(text), text))
nils = st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"_\r\n"])
lines = st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b":-7\r\n", b":0\r\n", b"#t\r\n", b",1.5\r\n", b"=5\r\ntxt:a\r\n"])
scalars = st.one_of(texts, texts, nils, lines)


def _arrays(items: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    marked = st.tuples(st.sampled_from(b"*~>"), st.lists(items, max_size=5))
    mapped = st.lists(st.tuples(items, items), max_size=3)
    return st.one_of(
        marked.map(lambda row: b"%c%d\r\n%b" % (row[0], len(row[1]), b"".join(row[1]))),
        mapped.map(lambda pairs: b"%%%d\r\n%b" % (len(pairs), b"".join(key + value for key, value in pairs))),
    )


replies = st.one_of(scalars, _arrays(texts), st.recursive(scalars, _arrays, max_leaves=8))
odd_bytes = st.sampled_from([b"", b"\r", b"\n", b"\r\n", b"-", b"0", b"1", b"$", b"*", b"%", b"a", b"+", b"\xff", b"_"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Return replies, most often with something else in one place."""
    sent = b"".join(draw(st.lists(replies, min_size=1, max_size=6)))
    at = draw(st.integers(0, len(sent) - 1))
    odd, cut = draw(odd_bytes), draw(st.integers(0, 2))
    return draw(st.sampled_from([sent, sent[:at] + odd + sent[at + cut :], sent[:at] + odd + sent[at + cut :]]))


def cut_up(sent: bytes, places: list[int]) -> tuple[list[bytes], bool]:
    frames = ReplySplitter(MANY_BYTES)
    ends = sorted({0, len(sent), *(place % (len(sent) + 1) for place in places)})
    found = [reply for start, end in pairwise(ends) for reply in frames.feed(sent[start:end])]
    return found, frames.error is not None


@given(sent=st.lists(replies, min_size=1, max_size=6), places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_replies_come_out_as_they_were_sent(sent: list[bytes], places: list[int]) -> None:
    assert cut_up(b"".join(sent), places) == (sent, False)


@given(sent=streams(), places=st.lists(st.integers(0, 1 << 16), max_size=6))
def test_chunks_of_input_may_end_anywhere(sent: bytes, places: list[int]) -> None:
    expected = cut_up(sent, [])
    assert cut_up(sent, places) == expected
    assert cut_up(sent, list(range(len(sent)))) == expected


@given(sent=streams())
def test_encoded_record_is_value_that_client_reads(sent: bytes) -> None:
    found, _ = cut_up(sent, [])
    assert [reply.raw for reply in replies_in(b"".join(found))] == found


@given(items=st.lists(st.recursive(scalars, _arrays, max_leaves=4), max_size=6), places=st.lists(st.integers(0, 999)))
def test_array_is_taken_apart_into_its_items(items: list[bytes], places: list[int]) -> None:
    sent = b"*%d\r\n%b" % (len(items), b"".join(items))
    found, _ = cut_up(sent, places)
    assert [list(result_of(items_of(each))) for each in found] == [items]


def test_number_has_at_most_one_sign_and_is_of_64_bits() -> None:
    assert cut_up(b":--7\r\n", []) == cut_up(b":-\r\n", []) == cut_up(b":%d\r\n" % -(10**19), []) == ([], True)
    assert cut_up(b":%d\r\n" % -(2**63), []) == ([b":-9223372036854775808\r\n"], False)


@pytest.mark.compiled
@given(sent=streams(), places=st.lists(st.integers(0, 1 << 16), max_size=4))
def test_compiled_core_finds_same_replies(sent: bytes, places: list[int]) -> None:
    compiled = cut_up(sent, places)
    with patch.object(native, "core", None):
        assert cut_up(sent, places) == compiled
