"""Plain Python to RESP2 and RESP3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resp_server.protocol.errors import WrongTypeError
from resp_server.protocol.replies import (
    NULL_ARRAY,
    STEP_BYTES_MAX,
    DoubleText,
    FirstOf,
    Frames,
    LongBulk,
    LongItems,
    LongPair,
    PackedItems,
    PackedPairs,
    Pairs,
    Pending,
    Push,
    ReplySet,
    Sliced,
    SlicedEncoder,
    Verbatim,
    encode,
)
from state_backend.codec import packed_map

pytestmark = pytest.mark.pure

CASES: list[tuple[Any, bytes, bytes]] = [
    (None, b"$-1\r\n", b"_\r\n"),
    (b"", b"$0\r\n\r\n", b"$0\r\n\r\n"),
    (b"a\r\n", b"$3\r\na\r\n\r\n", b"$3\r\na\r\n\r\n"),
    ("OK", b"+OK\r\n", b"+OK\r\n"),
    (-5, b":-5\r\n", b":-5\r\n"),
    (True, b":1\r\n", b"#t\r\n"),
    (False, b":0\r\n", b"#f\r\n"),
    (1.5, b"$3\r\n1.5\r\n", b",1.5\r\n"),
    (3.0, b"$1\r\n3\r\n", b",3\r\n"),
    (float("-inf"), b"$4\r\n-inf\r\n", b",-inf\r\n"),
    ([], b"*0\r\n", b"*0\r\n"),
    ([b"a", None, 1, [b"b"]], b"*4\r\n$1\r\na\r\n$-1\r\n:1\r\n*1\r\n$1\r\nb\r\n", None),  # type: ignore[list-item]
    ([None], b"*1\r\n$-1\r\n", b"*1\r\n_\r\n"),
    ({b"a": 1}, b"*2\r\n$1\r\na\r\n:1\r\n", b"%1\r\n$1\r\na\r\n:1\r\n"),
    ({}, b"*0\r\n", b"%0\r\n"),
    (ReplySet(["x", b"y"]), b"*2\r\n+x\r\n$1\r\ny\r\n", b"~2\r\n+x\r\n$1\r\ny\r\n"),
    (Push([b"a"]), b"*1\r\n$1\r\na\r\n", b">1\r\n$1\r\na\r\n"),
    (Verbatim(b"hi"), b"$2\r\nhi\r\n", b"=6\r\ntxt:hi\r\n"),
    ((b"a",), b"*1\r\n$1\r\na\r\n", b"*1\r\n$1\r\na\r\n"),
    ("\udcff", b"+\xff\r\n", b"+\xff\r\n"),
    (NULL_ARRAY, b"*-1\r\n", b"_\r\n"),
    (DoubleText(b"1.50"), b"$4\r\n1.50\r\n", b",1.50\r\n"),
    (Frames(b"+a\r\n:1\r\n"), b"+a\r\n:1\r\n", b"+a\r\n:1\r\n"),
    (
        Pairs([(b"a", 1.0), (b"b", None)]),
        b"*4\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n$-1\r\n",
        b"*2\r\n*2\r\n$1\r\na\r\n,1\r\n*2\r\n$1\r\nb\r\n_\r\n",
    ),
    (PackedItems(1, b"$1\r\na\r\n"), b"*1\r\n$1\r\na\r\n", b"*1\r\n$1\r\na\r\n"),
    (PackedItems(1, b"$1\r\na\r\n", ReplySet), b"*1\r\n$1\r\na\r\n", b"~1\r\n$1\r\na\r\n"),
    (ReplySet([None]), b"*1\r\n$-1\r\n", b"~1\r\n_\r\n"),
    (Push([None]), b"*1\r\n$-1\r\n", b">1\r\n_\r\n"),
    ({"a": {}}, b"*2\r\n+a\r\n*0\r\n", b"%1\r\n+a\r\n%0\r\n"),
    (
        [WrongTypeError(), 1],
        b"*2\r\n-WRONGTYPE Operation against a key holding the wrong kind of value\r\n:1\r\n",
        b"*2\r\n-WRONGTYPE Operation against a key holding the wrong kind of value\r\n:1\r\n",
    ),
]


@pytest.mark.parametrize(("reply", "resp2", "resp3"), CASES)
def test_reply_is_lowered_to_either_protocol(reply: object, resp2: bytes, resp3: bytes | None) -> None:
    assert encode(reply, 2) == resp2
    if resp3 is not None:
        assert encode(reply, 3) == resp3


def test_packed_map_is_sent_as_it_lies() -> None:
    packed = packed_map.pack([(b"a", b"1"), (b"b", b"22")])
    reply = PackedPairs(packed_map.count(packed), packed_map.body(packed))
    for protocol in (2, 3):
        assert encode(reply, protocol) == encode({b"a": b"1", b"b": b"22"}, protocol)


def test_value_that_is_no_reply_is_named_bug() -> None:
    with pytest.raises(TypeError, match="bytearray"):
        encode(bytearray(b"x"), 2)


def steps_of(sliced: Sliced, protocol: int = 2) -> list[bytes]:
    encoder = SlicedEncoder(sliced, protocol)
    steps = []
    while not encoder.is_done:
        steps.append(encoder.step())
    return steps


def test_sliced_reply_of_known_count_is_sent_as_it_is_made() -> None:
    steps = steps_of(Sliced(iter([[b"a"], [b"b"]]), lambda: None, count=2))
    assert steps == [b"*2\r\n$1\r\na\r\n", b"$1\r\nb\r\n", b""]


def test_sliced_reply_of_unknown_count_is_sent_at_end() -> None:
    steps = steps_of(Sliced(iter([[b"a"], [], [b"b"]]), lambda: None))
    assert steps == [b"", b"", b"", b"*2\r\n", b"$1\r\na\r\n$1\r\nb\r\n"]


def test_buffered_sliced_reply_is_sent_in_steps() -> None:
    parts = [[b"x" * 10_000] for _ in range(100)]
    steps = steps_of(Sliced(iter(parts), lambda: None))
    assert b"".join(steps) == encode([b"x" * 10_000] * 100, 2)
    assert max(map(len, steps)) <= STEP_BYTES_MAX + 10_100


def test_long_item_is_sent_chunk_by_chunk() -> None:
    def part() -> LongItems:
        return LongItems([b"a", LongBulk(5, iter([b"12", b"345"])), None, LongBulk(0, iter([])), b"b"])

    expected = encode([b"a", b"12345", None, b"", b"b", b"c"], 2)
    steps = steps_of(Sliced(iter([part(), [b"c"]]), lambda: None, count=6))
    assert b"".join(steps) == expected
    assert b"12" in steps
    assert b"".join(steps_of(Sliced(iter([[], part()]), lambda: None, FirstOf))) == encode(b"a", 2)
    nested = Sliced(iter([LongItems([b"0", part(), b"end"])]), lambda: None, count=3)
    assert b"".join(steps_of(nested)) == encode([b"0", [b"a", b"12345", None, b"", b"b"], b"end"], 2)


def test_first_item_may_be_long() -> None:
    steps = steps_of(Sliced(iter([LongItems([LongBulk(5, iter([b"12", b"345"]))])]), lambda: None, FirstOf))
    assert steps == [b"$5\r\n", b"12", b"345", b"\r\n"]


def test_count_of_sliced_reply_may_take_steps() -> None:
    steps = steps_of(Sliced(iter([[b"a"]]), lambda: None, count=iter([3, -1, -1])))
    assert steps == [b"", b"", b"", b"", b"*1\r\n$1\r\na\r\n", b""]


def test_sliced_map_counts_pairs() -> None:
    flat = [[b"a", b"1", b"b", b"2"], [b"c", b"3"]]
    assert b"".join(steps_of(Sliced(iter(flat), lambda: None, dict, 3), 3)) == encode(
        {b"a": b"1", b"b": b"2", b"c": b"3"}, 3
    )
    assert b"".join(steps_of(Sliced(iter(flat), lambda: None, dict), 2)) == encode(
        {b"a": b"1", b"b": b"2", b"c": b"3"}, 2
    )


def test_sliced_numbers_are_added_up() -> None:
    assert b"".join(steps_of(Sliced(iter([[1, True], [2]]), lambda: None, int))) == b":4\r\n"


def test_empty_sliced_reply_still_has_its_first_line() -> None:
    assert steps_of(Sliced(iter([]), lambda: None, count=0)) == [b"*0\r\n"]


def test_sliced_reply_that_breaks_its_promise_is_bug() -> None:
    with pytest.raises(RuntimeError, match="announced 3"):
        steps_of(Sliced(iter([[b"a"]]), lambda: None, count=3))


def test_sliced_pairs_are_nested_in_resp3_only() -> None:
    pairs = [(b"a", 1.5), (b"b", 2.5), (b"c", 3.5)]
    for protocol in (2, 3):
        for count in (3, None):
            sliced = Sliced(iter([Pairs(pairs[:1]), Pairs(), Pairs(pairs[1:])]), lambda: None, Pairs, count)
            assert b"".join(steps_of(sliced, protocol)) == encode(Pairs(pairs), protocol)
        long = LongItems([LongPair([LongBulk(1, iter([b"a"])), 1.5]), LongPair([b"b", 2.5])])
        sliced = Sliced(iter([long, Pairs(pairs[2:])]), lambda: None, Pairs, 3)
        assert b"".join(steps_of(sliced, protocol)) == encode(Pairs(pairs), protocol)


def test_sliced_set_is_set() -> None:
    for protocol in (2, 3):
        sliced = Sliced(iter([[b"a"], [None]]), lambda: None, ReplySet, 2)
        assert b"".join(steps_of(sliced, protocol)) == encode(ReplySet([b"a", None]), protocol)


def test_sliced_map_may_have_long_values() -> None:
    for protocol in (2, 3):
        part = LongItems([b"a", LongBulk(2, iter([b"x", b"y"])), b"b", None])
        sliced = Sliced(iter([part]), lambda: None, dict, 2)
        assert b"".join(steps_of(sliced, protocol)) == encode({b"a": b"xy", b"b": None}, protocol)


def test_sliced_frames_have_no_first_line() -> None:
    sliced = Sliced(iter([[Frames(b"+a\r\n")], [Frames(b":1\r\n")]]), lambda: None, Frames)
    assert steps_of(sliced) == [b"", b"", b"", b"+a\r\n:1\r\n"]


def test_first_item_of_nothing_is_nil() -> None:
    assert steps_of(Sliced(iter([[], []]), lambda: None, FirstOf)) == [b"", b"", b"$-1\r\n"]
    assert steps_of(Sliced(iter([]), lambda: None, FirstOf), 3) == [b"_\r\n"]
    assert steps_of(Sliced(iter([[], [None, b"a"]]), lambda: None, FirstOf), 3) == [b"", b"_\r\n"]


def test_long_items_are_sent_in_steps() -> None:
    items = [b"x" * 10_000] * 100
    steps = steps_of(Sliced(iter([LongItems(items)]), lambda: None, count=100))
    assert b"".join(steps) == encode(items, 2)
    assert max(map(len, steps)) <= STEP_BYTES_MAX + 10_100
    assert len(steps) < 20


def test_bytes_waiting_for_count_are_counted() -> None:
    encoder = SlicedEncoder(Sliced(iter([[b"a"], [b"bc"]]), lambda: None), 2)
    counted = [(encoder.step(), encoder.buffered_bytes)[1] for _ in range(2)]
    assert counted == [len(b"$1\r\na\r\n"), len(b"$1\r\na\r\n$2\r\nbc\r\n")]
    assert not encoder.has_started


def test_silent_reply_is_computed_and_not_sent() -> None:
    parts = iter([[b"a"], [b"b"]])
    assert b"".join(steps_of(Sliced(parts, lambda: None, count=2, is_suppressed=True))) == b""
    assert next(parts, None) is None


def test_reply_that_fails_before_its_first_line_may_still_be_error() -> None:
    def parts() -> Iterator[list[bytes]]:
        yield []
        raise WrongTypeError

    encoder = SlicedEncoder(Sliced(parts(), lambda: None, count=1), 2)
    assert encoder.step() == b""
    with pytest.raises(WrongTypeError):
        encoder.step()
    assert not encoder.has_started
    other = SlicedEncoder(Sliced(iter([[b"a"]]), lambda: None, count=1), 2)
    other.step()
    assert other.has_started and other.pins_epoch


def test_end_of_sliced_reply_releases_its_epoch_and_counts_its_time() -> None:
    calls: list[object] = []
    sliced = Sliced(iter([[b"a"]]), lambda: calls.append("released"), count=1, on_finished=calls.append)
    encoder = SlicedEncoder(sliced, 2)
    encoder.step()
    encoder.close()
    released, nanoseconds = calls
    assert released == "released"
    assert isinstance(nanoseconds, int) and nanoseconds > 0


def test_pending_chunk_is_awaited_and_is_item() -> None:
    pending = Pending(1.0, lambda: b"late")
    encoder = SlicedEncoder(Sliced(iter([[b"a"], pending, [b"c"]]), lambda: None), 2)
    sent = [encoder.step(), encoder.step()]
    assert encoder.pending is pending and not encoder.is_done
    pending.resolve(lambda: b"b")
    while not encoder.is_done:
        sent.append(encoder.step())
        assert encoder.pending is None
    assert b"".join(sent) == encode([b"a", b"b", b"c"], 2)


def test_first_resolution_of_pending_reply_counts() -> None:
    woken: list[str] = []
    pending = Pending(2.5, lambda: b"late")
    pending.when_resolved(lambda: woken.append("woken"))
    assert pending.seconds_max == 2.5 and not pending.is_resolved and pending.make() == b"late"
    pending.resolve(lambda: b"first")
    pending.resolve(lambda: b"second")
    assert pending.is_resolved and pending.make() == b"first" and woken == ["woken"]


def test_client_that_no_longer_waits_is_not_woken() -> None:
    woken: list[str] = []
    pending = Pending(2.5, lambda: b"late")
    pending.when_resolved(lambda: woken.append("woken"))
    pending.when_resolved(None)
    pending.resolve(lambda: b"first")
    assert pending.make() == b"first" and woken == []
