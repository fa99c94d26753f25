"""A random log's past equals a model's: the state as of each epoch, and the history of each key."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compat.examples import examples
from state_backend.apply.compact import compact_log
from state_backend.apply.replay import read_snapshot
from state_backend.apply.temporary_store import past_snapshot
from state_backend.history.difference import differences
from state_backend.history.key_history import history_of
from state_backend.history.whole_values import WholeValue, whole_value
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.log.time_travel import AsOf, moment_of, readable_epochs
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.store import Snapshot

VALUE = StateDescriptor("value", key_format="v:<k>", value="v")
FIELDS = StateDescriptor("fields", key_format="f:<k>", field="f", value="v")
STATES = [VALUE, FIELDS]
START_MS = 1_700_000_000_000
STEP_MS = 1_000

Model = dict[bytes, WholeValue]

KEYS = st.sampled_from([b"1", b"2", b"3"])
# (key, field or None for the value state, value or None to delete, epochs until it expires or None)
CHANGES = st.tuples(
    KEYS,
    st.sampled_from([None, b"x", b"y"]),
    st.sampled_from([None, b"a", b"b"]),
    st.one_of(st.none(), st.integers(1, 3)),
)
# An epoch's changes, and what happens after it: nothing, a snapshot that sweeps, one that does not.
EPOCHS = st.lists(
    st.tuples(
        st.lists(CHANGES, max_size=4, unique_by=lambda each: (each[0], each[1])),
        st.sampled_from(["", "", "sweep", "snapshot"]),
    ),
    min_size=1,
    max_size=7,
)


def apply(
    model: dict[tuple[bytes, bytes | None], tuple[bytes, int | None]], changes: list, number: int
) -> list[Change]:
    """Apply an epoch's changes to a model; return them as the log takes them."""
    made = []
    for key, field, value, epochs in changes:
        state = VALUE if field is None else FIELDS
        full_key = (b"v:" if field is None else b"f:") + key
        expire_at_ms = None if epochs is None or value is None else START_MS + (number + epochs) * STEP_MS
        if value is None:
            model.pop((full_key, field), None)
        else:
            model[full_key, field] = value, expire_at_ms
        made.append(Change(state.name, Op.DELETE if value is None else Op.PUT, full_key, field, value, expire_at_ms))
    for name, (_, expire_at_ms) in list(model.items()):
        if expire_at_ms is not None and expire_at_ms <= START_MS + number * STEP_MS:
            del model[name]
    return made


def whole(model: dict[tuple[bytes, bytes | None], tuple[bytes, int | None]]) -> Model:
    found: Model = {}
    for (key, field), (value, _) in sorted(model.items(), key=lambda item: (item[0][0], item[0][1] or b"")):
        if field is None:
            found[key] = value
        else:
            fields = found.setdefault(key, {})
            assert isinstance(fields, dict)
            fields[field] = value
    return found


def content(snapshot: Snapshot) -> Model:
    cursor, found = -1, []
    while cursor:
        cursor, keys = snapshot.scan(max(cursor, 0), 10)
        found += keys
    infos = [info for info in map(snapshot.key_info, found) if info is not None]
    return {info.key: whole_value(snapshot, info) for info in infos}


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EPOCHS)
def test_each_epoch_that_can_be_read_is_that_of_model(epochs: list) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        model: dict[tuple[bytes, bytes | None], tuple[bytes, int | None]] = {}
        models: list[Model] = []
        for number, (changes, what) in enumerate(epochs):
            made = apply(model, changes, number)
            with LogWriter(root, "job", STATES, "q") as writer:
                writer.publish(made, clock_ms=START_MS + number * STEP_MS)
            models.append(whole(model))
            if what:
                compact_log(str(root), "job", retention_ms=0 if what == "sweep" else 10**12)
        log = ChangeLog(root)
        job = log.job("job")
        readable = readable_epochs(job)
        assert readable is not None and readable.last.epoch == len(epochs) - 1
        for number in range(readable.first.epoch, len(epochs)):
            at_ms = START_MS + number * STEP_MS
            assert moment_of(job, AsOf(at_ms=at_ms + STEP_MS - 1)).epoch == number
            with past_snapshot(log, "job", moment_of(job, AsOf(number))) as snapshot:
                assert content(snapshot) == models[number]
            with read_snapshot(root, "job", number, at_ms) as snapshot:
                assert content(snapshot) == models[number]
        begin, end = readable.first.epoch, len(epochs) - 1
        for old, new in ((begin, end), (end, begin), (begin, (begin + end) // 2)):
            with (
                past_snapshot(log, "job", moment_of(job, AsOf(old))) as before_it,
                past_snapshot(log, "job", moment_of(job, AsOf(new))) as after_it,
            ):
                differing = {each.key: each.change for each in differences(before_it, after_it)}
            changes_of = {True: "removed", False: "changed"}
            assert differing == {
                key: "added" if key not in models[old] else changes_of[key not in models[new]]
                for key in models[old].keys() | models[new].keys()
                if models[old].get(key) != models[new].get(key)
            }
        for key in sorted({key for each in models for key in each}):
            expected = []
            before: WholeValue | None = None
            for number in range(readable.first.epoch, len(epochs)):
                if (value := models[number].get(key)) != before:
                    is_oldest = number == readable.first.epoch and not readable.starts_at_first_epoch
                    expected.append((number, value, is_oldest))
                before = value
            found = [(each.epoch, each.value, each.is_oldest) for each in history_of(job, key, 100)]
            assert found == expected[::-1]
            assert [each.epoch for each in history_of(job, key, 2)] == [epoch for epoch, *_ in expected[::-1][:2]]
