"""For any request, every key has one owner, joined replies are unchanged, and a scan skips nothing."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.servers.min_epochs import MinEpochs
from resp_server.backends.servers.request_split import scan_reply_up_to_slot, split_by_slot
from resp_server.backends.servers.slot_map import SlotMap, runs_of
from resp_server.cluster.topology import Topology
from resp_server.commands import command_table
from resp_server.protocol.replies import ReplySet, encode
from resp_server.raw_replies.reply_splitter import ReplySplitter, items_of
from state_backend.model.slots import SLOTS, hash_position, slot_of
from tests.properties.steps import result_of

TABLE = command_table()
keys = st.one_of(st.binary(max_size=8), st.sampled_from([b"a{tag}", b"b{tag}", b"same", b"same"]))
# Texts that look like the protocol, that are cut one by one, and that are longer than those that are not.
UNUSUAL_ARGUMENTS = [b"\r\n$1\r\na\r\n", b"\r\n*2\r\n$", b"%1\r\n", b"\xff", b"$-1\r\n", b"\r\n", b"", b"x" * 5000]
texts = st.one_of(st.none(), st.binary(max_size=20), st.sampled_from(UNUSUAL_ARGUMENTS))
leaves = st.one_of(texts, st.integers(-(2**63), 2**63 - 1), st.booleans(), st.sampled_from(["OK", "PONG"]))
replies = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.binary(max_size=4), inner, max_size=4),
        st.lists(inner, max_size=4).map(ReplySet),
    ),
    max_leaves=12,
)
arrays = st.lists(texts, max_size=8)


@given(
    given=st.one_of(st.lists(replies, max_size=6), st.lists(st.one_of(texts, arrays, arrays), max_size=6)),
    protocol=st.sampled_from([2, 3]),
    data=st.data(),
)
def test_any_chunking_gives_same_early_replies(given: list[object], protocol: int, data: st.DataObject) -> None:
    sent = [encode(each, protocol) for each in given]
    as_bytes = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(as_bytes)), max_size=8)))
    frames = ReplySplitter(1 << 20)
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(as_bytes)], strict=True):
        found += frames.feed(as_bytes[start:end])
        assert len(found) == sum(each <= end for each in accumulate(map(len, sent)))
        assert frames.partial_bytes >= end - sum(map(len, found))
    assert found == sent


@given(given=st.one_of(st.lists(replies, max_size=6), arrays), protocol=st.sampled_from([2, 3]))
def test_items_of_array_are_as_they_were_sent(given: list[object], protocol: int) -> None:
    sent = encode(given, protocol)
    for reply in (sent, *ReplySplitter(1 << 20).feed(sent)):
        assert list(result_of(items_of(reply))) == [encode(each, protocol) for each in given]


@given(asked=st.lists(keys, min_size=1, max_size=30))
def test_split_request_asks_each_key_once_in_order(asked: list[bytes]) -> None:
    found = split_by_slot(TABLE.find([b"mget"]), [b"MGET", *asked])
    assert found is not None
    parts, merge = found
    assert len({part.target for part in parts}) == len(parts)
    assert all(slot_of(key) == part.target for part in parts for key in part.request[1:])
    assert Counter(key for part in parts for key in part.request[1:]) == Counter(asked)
    assert result_of(merge([encode([b"of " + key for key in part.request[1:]], 2) for part in parts])) == encode(
        [b"of " + key for key in asked], 2
    )


@given(asked=st.lists(keys, min_size=1, max_size=30))
def test_counts_of_split_request_are_added_up(asked: list[bytes]) -> None:
    found = split_by_slot(TABLE.find([b"exists"]), [b"EXISTS", *asked])
    assert found is not None
    parts, merge = found
    assert result_of(merge([encode(len(part.request) - 1, 2) for part in parts])) == encode(len(asked), 2)


@given(bounds=st.sets(st.integers(1, SLOTS - 1), max_size=6), owners=st.lists(st.sampled_from("abc"), min_size=7))
def test_every_slot_has_owner_that_topology_names(bounds: set[int], owners: list[str]) -> None:
    starts = [0, *sorted(bounds)]
    ends = [*(start - 1 for start in starts[1:]), SLOTS - 1]
    ranges = list(zip(starts, ends, owners, strict=False))
    slots = SlotMap()
    nodes = [
        {
            "host": name,
            "port": 1,
            "slots": ",".join(f"{first}-{last}" for first, last, owner in ranges if owner == name),
        }
        for name in "abc"
    ]
    assert slots.apply(Topology.of_json({"version": 1, "nodes": nodes}))
    assert not slots.apply(Topology.of_json({"version": 1, "nodes": nodes[:1]}))
    assert [slots.owners[slot] for first, last, _ in ranges for slot in range(first, last + 1)] == [
        f"{owner}:1" for first, last, owner in ranges for _ in range(first, last + 1)
    ]
    assert slots.is_complete
    assert sum(slots.counts.values()) == SLOTS
    for first, last in runs_of(slots.owners_of_version):
        assert {slots.last_of_run(first), slots.last_of_run(last)} == {last}
    slots.moved(0, "z")
    assert slots.owners[0] == "z" != slots.owners_of_version[0]


changes = st.tuples(st.booleans(), st.integers(0, SLOTS - 1), st.integers(1, 9), st.integers(1, 3))


@given(given=st.lists(changes, max_size=6))
def test_slots_of_run_have_one_owner_and_min_epochs_after_any_change(
    given: list[tuple[bool, int, int, int]],
) -> None:
    slots, min_epochs = SlotMap(), MinEpochs()
    for version, (has_moved, first, count, number) in enumerate(given):
        some = range(first, min(first + count, SLOTS))
        if not has_moved:
            min_epochs.raise_to(some, {"j": (1, number)})
        elif count == 9:
            node = {"host": "a", "port": number, "slots": f"{first}-{SLOTS - 1}"}
            assert slots.apply(Topology.of_json({"version": version, "nodes": [node]}))
        else:
            for slot in some:
                slots.moved(slot, f"b:{number}")
        for ends, values in ((slots.ends, slots.owners), (min_epochs.ends, min_epochs.by_slot)):
            assert ends[-1] == SLOTS
            for start, end in pairwise([0, *ends]):
                assert start < end
                assert values[start:end] == [values[start]] * (end - start)


@given(names=st.sets(st.binary(min_size=1, max_size=6), min_size=1, max_size=40), data=st.data())
def test_steps_of_scan_that_end_with_run_of_slots_find_each_key_once(names: set[bytes], data: st.DataObject) -> None:
    """The server's step may go on to its next run: keys from there are left for when the cursor is there."""
    bounds = [*sorted(data.draw(st.sets(st.integers(1, SLOTS - 1), max_size=4))), SLOTS]
    array_in_order = sorted(names, key=hash_position)
    found: list[bytes] = []
    cursor = 0
    for _ in range(2 * len(names) + len(bounds) + 1):
        behind = next(bound for bound in bounds if bound > cursor >> 32)
        # Of a server that owns every other run from this one on.
        own = bounds[bounds.index(behind) :: 2]
        firsts = {end: ([0, *bounds])[bounds.index(end)] for end in own}
        left = [key for key in array_in_order if hash_position(key) >= cursor]
        left = [key for key in left if any(firsts[end] <= slot_of(key) < end for end in own)]
        step = data.draw(st.integers(1, 5))
        place = hash_position(left[step - 1]) if len(left) >= step else 0
        taken = [key for key in left if not place or hash_position(key) <= place]
        rest = [key for key in left if place and hash_position(key) > place]
        reply = encode([b"%d" % (hash_position(rest[0]) if rest else 0), taken], 2)
        cursor_item, keys_item = result_of(items_of(scan_reply_up_to_slot(reply, behind - 1)))
        cursor = int(cursor_item.split(b"\r\n")[1])
        found += [item.split(b"\r\n", 1)[1][:-2] for item in result_of(items_of(keys_item))]
        if not cursor:
            break
    assert sorted(found) == sorted(names)
