"""A packed map finds its fields and nothing else."""

from __future__ import annotations

import pytest

from state_backend.codec import packed_map
from state_backend.model.errors import ChangeError


def test_value_is_not_found_as_field() -> None:
    inner = b"$1\r\nb\r\n"
    packed = packed_map.pack([(b"a", inner + inner), (b"c", b"b"), (b"d", b"x\r\n$1\r\nb\r\n$1\r\ny\r\n")])
    assert packed_map.find(packed, b"b") is None


def test_field_after_value_with_its_name_is_found() -> None:
    packed = packed_map.pack([(b"a", b"$1\r\nb\r\n"), (b"c", b"b"), (b"b", b"right")])
    assert packed_map.find(packed, b"b") == b"right"
    assert packed_map.find(packed, b"c") == b"b"


def test_field_that_begins_like_another_is_not_taken_for_it() -> None:
    packed = packed_map.pack([(b"ab", b"1"), (b"a", b"2"), (b"", b"3")])
    assert [packed_map.find(packed, name) for name in (b"a", b"ab", b"", b"abc")] == [b"2", b"1", b"3", None]


def test_body_is_pairs_as_server_sends_them() -> None:
    packed = packed_map.pack([(b"f", b"v1"), (b"\xff", b"")])
    assert packed_map.body(packed) == b"$1\r\nf\r\n$2\r\nv1\r\n$1\r\n\xff\r\n$0\r\n\r\n"
    assert packed_map.count(packed) == 2


def test_empty_map_has_no_pairs() -> None:
    assert packed_map.pack([]) == packed_map.EMPTY
    assert list(packed_map.pairs(packed_map.EMPTY)) == []
    assert packed_map.find(packed_map.EMPTY, b"a") is None


def test_map_of_too_many_fields_is_refused_with_alternative() -> None:
    with pytest.raises(ChangeError, match=r"65536 fields .* a CLEAR of its key and a PUT per field"):
        packed_map.pack((b"%d" % number, b"") for number in range(65_536))


@pytest.mark.parametrize("size", [1, 255, 256, 65_535])
def test_map_of_any_size_that_count_can_hold_comes_back_in_order(size: int) -> None:
    given = [(b"f%d" % number, b"%d" % number) for number in range(size)]
    packed = packed_map.pack(given)
    assert packed_map.count(packed) == size
    assert list(packed_map.pairs(packed)) == given
    assert packed_map.find(packed, b"f%d" % (size - 1)) == b"%d" % (size - 1)
