"""Which fresh values are shown: by run, batch and applied epoch, in layers that several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_backend.fresh.values import FreshValues, folder_of
from state_backend.model.errors import StoreError, StoreFullError
from state_backend.model.records import runs_of
from state_backend.model.slot_set import ALL, SlotSet
from tests.builders import put_value, value_state

STATES = [value_state("v")]


@pytest.fixture
def values(tmp_path: Path) -> Iterator[FreshValues]:
    made = FreshValues(folder_of(tmp_path, "server"), "g", 1 << 20)
    yield made
    made.close()


def put(
    values: FreshValues, run: str, batch: int, rows: dict[bytes, bytes], applied: int = -1, slots: SlotSet = ALL
) -> None:
    changes = [put_value("v", key, value) for key, value in rows.items()]
    values.put(run, batch, list(runs_of(changes, ["v"])), STATES, applied, 1_000 + batch, slots)


def value_of(values: FreshValues, key: bytes, applied: int = -1) -> bytes | None:
    """Return the value that a reader finds, as a view does: the layer with the newer batches answers first."""
    with ExitStack() as stack:
        layers = [stack.enter_context(each) for each in values.snapshots(0)]
        for layer in sorted(layers, key=lambda each: -each.batch):
            if layer.batch > applied and layer.has(key):
                return layer.value(key)
    return None


def test_last_row_of_key_is_shown_until_its_epoch(values: FreshValues) -> None:
    values.open_batch("run", -1)
    put(values, "run", 0, {b"a": b"1", b"b": b"1"})
    put(values, "run", 0, {b"a": b"2"})
    assert (value_of(values, b"a"), value_of(values, b"b"), value_of(values, b"c")) == (b"2", b"1", None)
    assert values.facts(-1) == ({"v": 2}, 0, 1_000, False)
    assert value_of(values, b"a", applied=0) is None  # also before the layer is cleared
    values.settle(0)
    assert value_of(values, b"a") is None
    assert values.facts(0) == ({}, None, None, False)


def test_later_batch_is_shown_before_earlier_one_and_outlives_it(values: FreshValues) -> None:
    values.open_batch("run", -1)
    put(values, "run", 0, {b"a": b"1", b"b": b"1"})
    put(values, "run", 1, {b"a": b"2"})
    assert (value_of(values, b"a"), value_of(values, b"b")) == (b"2", b"1")
    values.settle(0)
    assert (value_of(values, b"a"), value_of(values, b"b")) == (b"2", None)


def test_third_batch_joins_second_while_first_epoch_is_late(values: FreshValues) -> None:
    values.open_batch("run", -1)
    for batch in range(3):
        put(values, "run", batch, {b"a": b"%d" % batch, b"of %d" % batch: b"x"})
    put(values, "run", 1, {b"late": b"x"})
    values.settle(0)
    put(values, "run", 1, {b"later": b"x"}, applied=0)
    assert (value_of(values, b"a"), value_of(values, b"of 0"), value_of(values, b"of 1")) == (b"2", None, b"x")
    assert value_of(values, b"late") == value_of(values, b"later") == b"x"
    values.settle(2)
    assert values.facts(2).keys == 0


def test_run_that_opens_batch_voids_rows_of_other_runs(values: FreshValues) -> None:
    values.open_batch("first", -1)
    put(values, "first", 4, {b"a": b"1"})
    values.open_batch("second", -1)
    assert value_of(values, b"a") is None
    put(values, "first", 4, {b"a": b"1"})
    put(values, "second", 4, {b"b": b"2"})
    assert (value_of(values, b"a"), value_of(values, b"b")) == (None, b"2")


def test_replaced_run_opens_no_batch(values: FreshValues) -> None:
    for run in ("first", "second", "third"):
        values.open_batch(run, -1)
    put(values, "third", 4, {b"a": b"3"})
    for run in ("first", "second"):
        with pytest.raises(StoreError, match=f"run {run} of the query has been replaced"):
            values.open_batch(run, -1)
    put(values, "third", 4, {b"b": b"3"})
    assert (value_of(values, b"a"), value_of(values, b"b")) == (b"3", b"3")


def test_slots_that_come_back_bring_no_values_of_before(values: FreshValues) -> None:
    half = SlotSet.of([(0, 8191)])
    values.open_batch("run", -1)
    put(values, "run", 0, {b"a": b"1", b"b": b"1"})
    put(values, "run", 0, {b"b": b"2"}, slots=half)
    assert (value_of(values, b"a"), value_of(values, b"b")) == (b"1", b"2")
    put(values, "run", 0, {b"b": b"3"})
    assert (value_of(values, b"a"), value_of(values, b"b")) == (None, b"3")
    put(values, "run", 0, {b"a": b"4"})
    assert (value_of(values, b"a"), value_of(values, b"b")) == (b"4", b"3")


def test_rows_of_applied_batch_come_too_late(values: FreshValues) -> None:
    values.open_batch("run", 4)
    put(values, "run", 4, {b"a": b"1"}, applied=4)
    assert values.facts(4).keys == 0


def test_batch_without_room_shows_nothing_and_next_one_does(values: FreshValues) -> None:
    values.open_batch("run", -1)
    put(values, "run", 0, {b"a": b"1"})
    with pytest.raises(StoreFullError, match="batch 0"):
        put(values, "run", 0, {b"large": bytes(1 << 20)})
    assert value_of(values, b"a") is None
    assert values.facts(-1) == ({}, None, None, True)
    with pytest.raises(StoreFullError, match="batch 0"):
        put(values, "run", 0, {b"a": b"1"})
    put(values, "run", 1, {b"a": b"2"})
    assert value_of(values, b"a") == b"2"


def test_dropped_rows_make_batch_incomplete_until_its_epoch(values: FreshValues) -> None:
    values.open_batch("run", -1)
    put(values, "run", 3, {b"a": b"1"})
    values.set_incomplete("run", 3)
    assert values.facts(2).is_incomplete
    assert not values.facts(3).is_incomplete


def test_readers_find_keys_that_rows_and_clear_changed(values: FreshValues) -> None:
    values.open_batch("run", -1)
    put(values, "run", 0, {b"a": b"1"})
    with ExitStack() as stack:
        (layer,) = [each for each in map(stack.enter_context, values.snapshots(0)) if each.batch == 0]
        seen = layer.applied.epoch
        put(values, "run", 0, {b"b": b"1"})
        layer.renew(0)
        assert layer.changed_since(seen) == [b"b"]
        values.clear()
        layer.renew(0)
        assert sorted(layer.changed_since(seen + 1) or ()) == [b"a", b"b"]


def test_another_server_begins_without_values_and_removes_folder(tmp_path: Path) -> None:
    first = FreshValues(folder_of(tmp_path, "first"), "g", 1 << 20)
    first.open_batch("run", -1)
    put(first, "run", 0, {b"a": b"1"})
    first.close()
    again = FreshValues(folder_of(tmp_path, "first"), "g", 1 << 20)  # a process of the same server
    assert value_of(again, b"a") == b"1"
    again.close()
    second = FreshValues(folder_of(tmp_path, "second"), "g", 1 << 20)
    assert value_of(second, b"a") is None
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["fresh.second"]


KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(0, 2), st.dictionaries(KEYS, st.binary(min_size=1, max_size=2))),
        st.tuples(st.just("commit"), st.none(), st.none()),
        st.tuples(st.just("run"), st.none(), st.none()),
        st.tuples(st.just("clear"), st.none(), st.none()),
        st.tuples(st.just("settle"), st.none(), st.none()),
        st.tuples(st.just("zombie"), st.integers(0, 2), st.dictionaries(KEYS, st.binary(min_size=1, max_size=2))),
        st.tuples(st.just("restart"), st.none(), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_reads_give_newest_row_of_run_else_committed_value(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, dict[bytes, bytes]]]
) -> None:
    """A commit makes the last rows of its batch the committed values, also those that a restarted server has lost."""
    folder = tmp_path_factory.mktemp("store")
    values, starts = FreshValues(folder_of(folder, "0"), "g", 1 << 20), 0
    applied, run, newest = -1, 0, 0
    committed: dict[bytes, bytes] = {}
    rows: dict[int, dict[bytes, bytes]] = {}  # of batches of this run that are not applied, as this server got them
    spark: dict[int, dict[bytes, bytes]] = {}  # as Spark has them
    values.open_batch("0", applied)
    for step, ahead, sent in steps:
        if step == "rows":
            newest = max(newest, applied + 1, min(newest + ahead, applied + 4))
            values.open_batch(str(run), applied)
            put(values, str(run), newest, sent, applied)
            for each in (rows, spark):
                each.setdefault(newest, {}).update(sent)
        elif step == "commit":
            applied += 1
            committed |= spark.pop(applied, {})
            rows.pop(applied, None)
        elif step == "run":
            run, newest, rows, spark = run + 1, applied + 1, {}, {}
            values.open_batch(str(run), applied)
        elif step == "clear":
            values.clear()
            rows, spark, run, newest = {}, {}, run + 1, applied + 1
        elif step == "zombie":  # a task of the run before, which has outlived its driver
            put(values, str(run - 1), applied + 1 + ahead, sent, applied)
        elif step == "restart":
            values.close()
            values, starts, rows = FreshValues(folder_of(folder, f"{starts + 1}"), "g", 1 << 20), starts + 1, {}
        else:
            values.settle(applied)
        expected = dict(committed)
        for batch in sorted(rows):
            expected |= rows[batch]
        for key in (b"a", b"b", b"c", b"d"):
            found = value_of(values, key, applied)
            assert (committed.get(key) if found is None else found) == expected.get(key)
    values.close()
