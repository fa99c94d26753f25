from __future__ import annotations

from state_backend.codec.packed_list import bulk_strings, count, elements, has, pack

ELEMENTS = [b"first", b"", b"a\r\nb", b"last"]
PACKED = pack(ELEMENTS)


def test_unpacked_list_has_packed_elements() -> None:
    assert (count(PACKED), elements(PACKED)) == (4, ELEMENTS)


def test_elements_of_range_end_before_stop() -> None:
    assert [elements(PACKED, start, stop) for start, stop in ((0, 1), (1, 3), (2, 4), (2, 2))] == [
        [b"first"],
        [b"", b"a\r\nb"],
        [b"a\r\nb", b"last"],
        [],
    ]


def test_bulk_strings_of_range_end_before_stop() -> None:
    assert bulk_strings(PACKED, 0, 1) == b"$5\r\nfirst\r\n"
    assert bulk_strings(PACKED, 1, 3) == b"$0\r\n\r\n$4\r\na\r\nb\r\n"
    assert bulk_strings(PACKED, 3, 4) == b"$4\r\nlast\r\n"
    assert bulk_strings(PACKED, 2, 2) == bulk_strings(PACKED, 3, 1) == b""


def test_has_finds_whole_elements_only() -> None:
    assert has(PACKED, b"last") and has(PACKED, b"")
    assert not has(PACKED, b"las") and not has(PACKED, b"b")
