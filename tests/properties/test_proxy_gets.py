"""GETs that are cut out of buffers in one go are those that a parser finds in them; anything else is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resp_server.protocol.requests import RequestParser
from resp_server.router.frames import bulks_of, pack
from resp_server.router.gets import START_BYTES, UPPER, ends_of, is_part, keys_in
from resp_server.router.mgets import pieces_of

keys = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from([b"\r\n*2\r\n$3\r\nGET\r\n$1\r\n", b"*", b"{tag}key", b"x" * 1000, b"\r\n$3\r\n"]),
)
gets = st.lists(st.lists(keys, min_size=1, max_size=4), min_size=1, max_size=4)


def cut(buffers: list[bytes]) -> tuple[list[bytes], list[int] | None]:
    pieces = b"".join(buffers)[START_BYTES:-2].split(UPPER.separator)
    return pieces, ends_of(pieces, buffers)


def parsed(buffer: bytes) -> list[list[bytes]] | None:
    parser = RequestParser()
    found = parser.feed(buffer)
    return None if parser.error is not None or parser.buffered_bytes else [list(each) for each in found]


@given(asked=gets)
def test_keys_without_a_star_are_found_each_with_its_client(asked: list[list[bytes]]) -> None:
    asked = [[key.replace(b"*", b"-") for key in some] for some in asked]
    pieces, ends = cut([b"".join(pack((b"GET", key)) for key in some) for some in asked])
    assert ends is not None
    starts = [0, *ends[:-1]]
    assert [[piece.partition(b"\r\n")[2] for piece in pieces[a:b]] for a, b in zip(starts, ends, strict=True)] == asked


@given(asked=gets, data=st.data())
def test_whatever_is_found_is_what_a_parser_finds(asked: list[list[bytes]], data: st.DataObject) -> None:
    whole = b"".join(pack((b"GET", key)) for some in asked for key in some)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole = whole[:at] + data.draw(st.sampled_from([b"", b"*", b"\r\n", b"1"])) + whole[at + 1 :]
    bounds = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=3)))
    buffers = [whole[a:b] for a, b in zip([0, *bounds], [*bounds, len(whole)], strict=True)]
    pieces, ends = cut(buffers)
    if ends is None:
        return
    for buffer, start, end in zip(buffers, [0, *ends[:-1]], ends, strict=True):
        assert parsed(buffer) == [[b"GET", piece.partition(b"\r\n")[2]] for piece in pieces[start:end]]


@given(asked=st.lists(keys, min_size=1, max_size=6), name=st.sampled_from([b"MGET", b"mget"]))
def test_an_mget_is_cut_into_its_keys_or_left_alone(asked: list[bytes], name: bytes) -> None:
    pieces = pieces_of(pack((name, *asked)))
    if pieces is None:
        assert any(b"\r\n$" in b"\r\n" + key for key in asked)  # a key stands behind a line end
    else:
        assert list(keys_in(pieces)) == asked


@given(asked=st.lists(keys, min_size=1, max_size=4), data=st.data())
def test_what_is_found_in_an_mget_is_what_a_parser_finds(asked: list[bytes], data: st.DataObject) -> None:
    whole = pack((b"MGET", *asked)) + data.draw(st.sampled_from([b"", b"*1\r\n$4\r\nPING\r\n", b"\r\n"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole = whole[:at] + data.draw(st.sampled_from([b"", b"*", b"\r\n", b"1", b"$"])) + whole[at + 1 :]
    pieces = pieces_of(whole)
    if pieces is not None:
        assert parsed(whole) == [[b"MGET", *keys_in(pieces)]]


@given(key=keys, data=st.data())
def test_the_beginning_of_a_get_is_told_from_a_whole_one(key: bytes, data: st.DataObject) -> None:
    whole = pack((b"GET", key))
    assert not is_part(whole)
    assert is_part(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert not is_part(whole + b"*")


@given(values=st.lists(st.one_of(st.none(), st.binary(max_size=20), st.just(b"a\r\n$1\r\nb")), min_size=1, max_size=8))
def test_bulk_strings_are_cut_as_they_were_sent_or_not_at_all(values: list[bytes | None]) -> None:
    sent = [b"$-1\r\n" if each is None else b"$%d\r\n%b\r\n" % (len(each), each) for each in values]
    whole = b"".join(sent)
    for end in (len(whole), len(whole) - 1):
        found = bulks_of(whole[:end])
        if found is not None:
            frames, rest = found
            assert frames == sent[: len(frames)]
            assert b"".join(frames) + rest == whole[:end]
