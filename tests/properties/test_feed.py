"""A copy that applies a feed's entries equals the state, from any epoch on, however the feed is read."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compat.examples import examples
from state_backend.apply.replay import read_snapshot
from state_backend.codec import keep_by_order, packed_list, packed_map, packed_sorted
from state_backend.history.feed import LAST_ID, Entry, Feed, Span
from state_backend.history.whole_values import value_in_json, whole_value
from state_backend.log.change_log import ChangeLog
from state_backend.log.feed_mark import NO_ENTRY, FeedId
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.store import Snapshot

STATES = [
    StateDescriptor("value", key="k", value="v"),
    StateDescriptor("map", key="k", value=("a", "b")),
    StateDescriptor("fields", key="k", field="f", value="v"),
    StateDescriptor("list", key="k", value="v", kind="list", length_max=3),
    StateDescriptor("set", key="k", member="m"),
    StateDescriptor("sorted", key="k", member="m", score="s"),
    StateDescriptor("sum", key="k", value="v", reduce="sum", columns={"v": "bigint"}),
    StateDescriptor("last", key="k", value="v", last_by="t"),
]
STATE_OF = {state.name: state for state in STATES}
CLOCK_MS = 1_700_000_000_000
TEXTS = st.sampled_from([b"1", b"2", b"33"])
KEYS = st.sampled_from([b"x", b"y", b"z"])


def change_of(state: str, op: Op, key: bytes, text: bytes, number: int) -> Change:
    """Return a valid change of a state that is like the one asked for."""
    key = b"job:%b:%b" % (state.encode(), key)
    if state == "sum":
        op = Op.DELETE if op is Op.DELETE else Op.FOLD
    if state == "last":
        return Change(state, Op.FOLD, key, None, keep_by_order.pack(text, b"v%d" % number))
    if op in (Op.DELETE, Op.CLEAR):
        has_field = op is Op.DELETE and number % 2 and state in ("fields", "set", "sorted")
        return Change(state, op, key, text if has_field else None)
    whole = {
        "map": packed_map.pack([(b"a", text), (b"b", b"%d" % number)]),
        "list": packed_list.pack([text] * (number % 5)),
        "set": packed_list.pack(sorted({text, b"%d" % number})),
        "sorted": packed_sorted.pack_members([(text, float(number))]),
    }
    if state == "list" and number % 3:
        return Change(state, Op.APPEND, key, None, text)
    if state in ("fields", "set", "sorted") and (state == "fields" or number % 2):
        return Change(state, Op.PUT, key, text, b"" if state == "set" else b"%d" % number)
    return Change(state, Op.FOLD if state == "sum" else Op.PUT, key, None, whole.get(state, text))


CHANGES = st.builds(
    change_of,
    st.sampled_from(sorted(STATE_OF)),
    st.sampled_from([Op.PUT, Op.PUT, Op.PUT, Op.DELETE, Op.CLEAR]),
    KEYS,
    TEXTS,
    st.integers(0, 20),
)
# The changes of an epoch, the states that it replaces, and what comes before it: nothing, a rewind of one epoch, or a
# new checkpoint.
EPOCHS = st.lists(
    st.tuples(
        st.lists(CHANGES, max_size=8),
        st.sampled_from([(), (), ("value",), ("list", "set")]),
        st.sampled_from(["", "", "", "rewind", "start"]),
    ),
    min_size=1,
    max_size=6,
)


def write(root: Path, epochs: list[Any]) -> None:
    """Write a log."""
    query, number = 0, 0
    for changes, replaces, before in epochs:
        query, number = (query + 1, 0) if before == "start" else (query, number)
        number -= before == "rewind" and number > 1
        with LogWriter(root, "job", STATES, f"q{query}", "truncate", sends_heartbeats=False, takeover=True) as writer:
            writer.publish(changes, number, replaces=replaces, clock_ms=CLOCK_MS)
        number += 1


class Copy:
    """A reader's own copy of the state. It reads a key again that was folded, or appended to."""

    def __init__(self, now: dict[bytes, Any]) -> None:
        self.values: dict[bytes, Any] = {}
        self._now = now

    def apply(self, entry: Entry) -> None:
        """Apply an entry."""
        fields = dict(zip(entry.fields[::2], entry.fields[1::2], strict=True))
        match fields[b"op"]:
            case b"reset":
                self.values.clear()
            case b"replace":
                mine = b"job:%b:" % fields[b"state"]
                self.values = {key: value for key, value in self.values.items() if not key.startswith(mine)}
            case b"put":
                self._put(fields, STATE_OF[fields[b"state"].decode()].kind)
            case b"append" | b"fold":
                self._set(fields[b"key"], self._now.get(fields[b"key"]))
            case _ if b"field" in fields:
                self._remove(fields[b"key"], fields[b"field"])
            case _:
                self.values.pop(fields[b"key"], None)

    def _put(self, fields: dict[bytes, bytes], kind: Kind) -> None:
        key, field = fields[b"key"], fields.get(b"field")
        if field is not None:
            value: Any = fields.get(b"value", b"1") if kind is not Kind.SORTED_SET else float(fields[b"value"])
            self.values[key] = self.values.get(key, {}) | {field.decode(): value}
        elif kind is Kind.MAP:
            self._set(key, {name[1:].decode(): value for name, value in fields.items() if name.startswith(b".")})
        elif kind is Kind.VALUE:
            self.values[key] = fields[b"value"]
        else:
            whole = json.loads(fields[b"value"])
            if kind is not Kind.LIST:
                whole = dict(whole) if kind is Kind.SORTED_SET else dict.fromkeys(whole, b"1")
            self._set(key, whole[-3:] if kind is Kind.LIST else whole)

    def _set(self, key: bytes, value: Any) -> None:
        self.values.pop(key, None)
        if value:
            self.values[key] = value

    def _remove(self, key: bytes, field: bytes) -> None:
        self._set(key, {name: value for name, value in self.values.get(key, {}).items() if name != field.decode()})


def content(snapshot: Snapshot) -> dict[bytes, Any]:
    """Return the state as a copy has it."""
    found: dict[bytes, Any] = {}
    for key in {change.key for change in snapshot.changes()}:
        info = snapshot.key_info(key)
        assert info is not None
        value: Any = whole_value(snapshot, info)
        if info.kind is Kind.MAP:
            value = {name.decode(): each for name, each in value.items()}
        elif info.kind is Kind.SORTED_SET:
            value = {name.decode(): score for name, score in value}
        elif info.kind is not Kind.VALUE:
            texts = value_in_json(value)["value"]
            value = texts if info.kind is Kind.LIST else dict.fromkeys(texts, b"1")
        found[key] = value
    return found


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EPOCHS, st.integers(1, 5))
def test_copy_equals_state_and_pages_have_each_entry_once(epochs: list[Any], count: int) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), epochs)
        log = ChangeLog(folder).job("job")
        current = log.visible()
        assert current is not None
        last = log.newest(current)
        assert last is not None
        feed, end = Feed(log, current), last.epoch
        entries = list(feed.entries(Span(NO_ENTRY, LAST_ID, end)))
        with read_snapshot(folder, "job", at_ms=CLOCK_MS) as snapshot:
            now = content(snapshot)
        copy = Copy(now)
        for entry in entries:
            copy.apply(entry)
        assert copy.values == now

        ids = [entry.id for entry in entries]
        assert ids == sorted(set(ids))
        facts = feed.facts(end)
        assert facts.length == len(entries) and (not entries or facts.last == ids[-1])
        assert list(feed.entries(Span(NO_ENTRY, LAST_ID, end), is_reversed=True)) == entries[::-1]
        paged: list[Entry] = []
        start = NO_ENTRY
        while page := list(islice(feed.entries(Span(start, LAST_ID, end)), count)):
            paged += page
            start = FeedId(page[-1].id.ms, page[-1].id.n + 1)
        assert paged == entries
        for state in STATE_OF:
            mine = [entry for entry in entries if b"state" not in entry.fields[:5] or entry.fields[5] == state.encode()]
            assert list(feed.entries(Span(NO_ENTRY, LAST_ID, end, state))) == mine
            assert feed.facts(end, state).length == len(mine)
