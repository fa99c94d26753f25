"""A packed map is a dictionary of bytes, whatever the bytes are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from state_backend.codec import packed_map

# Texts that look like parts of the layout as often as not.
TEXTS = st.binary(max_size=20) | st.lists(
    st.sampled_from((b"$1\r\na\r\n", b"a", b"$0\r\n\r\n", b"$", b"\r\n", b"1", b"\x00\x01")), max_size=4
).map(b"".join)


@settings(deadline=None)
@given(st.dictionaries(TEXTS, TEXTS, max_size=30), st.lists(TEXTS, max_size=10))
def test_every_field_is_found_and_no_other(pairs: dict[bytes, bytes], others: list[bytes]) -> None:
    packed = packed_map.pack(pairs.items())
    assert packed_map.count(packed) == len(pairs)
    assert list(packed_map.pairs(packed)) == list(pairs.items())
    for name in [*pairs, *pairs.values(), *others]:
        assert packed_map.find(packed, name) == pairs.get(name)


@settings(deadline=None)
@given(st.dictionaries(TEXTS, TEXTS, max_size=30))
def test_body_is_pairs_as_length_prefixed_texts(pairs: dict[bytes, bytes]) -> None:
    packed = packed_map.pack(pairs.items())
    assert packed_map.body(packed) == b"".join(
        b"$%d\r\n%b\r\n" % (len(each), each) for pair in pairs.items() for each in pair
    )
