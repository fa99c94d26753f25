"""A key is looked up in the one job that can have made it, and a scan over many jobs returns each key once."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError, JobLoadingError, StoreError
from state_backend.model.records import Change, Op
from state_backend.model.slots import hash_position
from state_backend.store.keyspace import Job, Keyspace, KeyspaceView
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch

NOW_MS = 1_000


def job_of(name: str, keys: list[bytes] | None = None, key_format: str | None = None, generation: str = "g") -> Job:
    state = StateDescriptor("s", key="k" if key_format is None else (), value="v", key_format=key_format)
    store = MemoryStore(generation)
    changes = [Change("s", Op.PUT, key, None, name.encode()) for key in keys or []]
    apply_epoch(store, [state], changes, 0, clock_ms=NOW_MS)
    return Job(name, generation, [state], store, committed_epoch=0)


def keyspace_of(*jobs: Job) -> Keyspace:
    keyspace = Keyspace()
    for job in jobs:
        keyspace.put(job)
    return keyspace


def drawn_from(view: KeyspaceView) -> bytes | None:
    return next(filter(None, view.random_keys()), None)


def test_key_of_default_format_is_looked_up_in_its_job() -> None:
    view = keyspace_of(job_of("a", [b"a:s:1"]), job_of("b", [b"b:s:1"])).view(NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") == b"a"
    assert view.at(b"b:s:1").value(b"b:s:1") == b"b"
    assert view.at(b"c:s:1").value(b"c:s:1") is None


def test_key_of_custom_format_is_looked_up_in_its_job() -> None:
    view = keyspace_of(
        job_of("a", [b"plane/\n1"], "plane/<k>"),
        job_of("b", [b"x1.end"], "x<k>.end"),
        job_of("c", [b"x1.fin"], "x<k>.fin"),
    ).view(NOW_MS)
    assert view.at(b"plane/\n1").value(b"plane/\n1") == b"a"
    assert view.at(b"x1.end").value(b"x1.end") == b"b"
    assert view.at(b"x1.fin").value(b"x1.fin") == b"c"


@pytest.mark.parametrize("key", [b"", b":", b"a", b"\xff:s:1", b"plane", b"a:"])
def test_key_of_no_job_reads_as_missing(key: bytes) -> None:
    view = keyspace_of(job_of("a", [b"a:s:1"]), job_of("b", key_format="plane/<k>")).view(NOW_MS)
    assert view.at(key).value(key) is None


def test_single_job_is_looked_up_for_every_key() -> None:
    view = keyspace_of(job_of("a", [b"", b"\xff\xfe", b"other:s:1"], "<k>")).view(NOW_MS)
    assert [view.at(key).value(key) for key in (b"", b"\xff\xfe", b"other:s:1")] == [b"a"] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [("<k>", None), ("b:s:<k>", None), ("b<k>", None), ("x/<k>", "x<k>"), ("<k>/x", "y<k>"), ("x<k>1", "x<k>1")],
)
def test_jobs_that_could_make_one_key_are_refused_and_both_named(one: str, other: str | None) -> None:
    keyspace = keyspace_of(job_of("a", key_format=one))
    with pytest.raises(DescriptorError, match=re.escape("'b' is not served") + ".*'a'"):
        keyspace.put(job_of("b", key_format=other))
    assert list(keyspace.jobs) == ["a"]


def test_job_takes_its_own_place_in_new_generation() -> None:
    keyspace = keyspace_of(job_of("a", [b"a:s:1"]))
    view = keyspace.view(NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") == b"a"
    keyspace.put(job_of("a", [], generation="g2"))
    view.renew(NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") is None


def test_removed_job_is_missing_from_next_renewal_on() -> None:
    keyspace = keyspace_of(job_of("a", [b"a:s:1"]), job_of("b", [b"b:s:1"]))
    view = keyspace.view(NOW_MS)
    keyspace.remove("a")
    assert view.at(b"a:s:1").value(b"a:s:1") == b"a"
    view.renew(NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") is None
    assert view.key_count() == 1


def test_view_stays_at_its_epoch_until_it_is_renewed() -> None:
    job = job_of("a", [b"a:s:1"])
    view = keyspace_of(job).view(NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") == b"a"
    change = Change("s", Op.PUT, b"a:s:1", None, b"new")
    apply_epoch(job.store, job.states, [change], 1, clock_ms=NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") == b"a"
    view.renew(NOW_MS)
    assert view.at(b"a:s:1").value(b"a:s:1") == b"new"


@pytest.mark.parametrize("count", [1, 2, 7, 10_000])
def test_scan_over_several_jobs_returns_each_key_once_in_slot_order(count: int) -> None:
    random = Random(1)
    keys = {name: [b"%s:s:%d" % (name, n) for n in random.sample(range(1000), 50)] for name in (b"a", b"b", b"c")}
    view = keyspace_of(*(job_of(name.decode(), of_job) for name, of_job in keys.items()), job_of("empty")).view(NOW_MS)
    found = []
    cursor, some = view.scan(0, count)
    found += some
    while cursor:
        last = cursor
        cursor, some = view.scan(cursor, count)
        assert not cursor or cursor > last
        found += some
    everything = {key for of_job in keys.values() for key in of_job}
    assert len(found) == len(everything)
    assert set(found) == everything
    assert view.key_count() == 150
    assert sorted(hash_position(key) for key in found) == [
        hash_position(key) for key in sorted(everything, key=hash_position)
    ]


def test_any_entry_of_any_job_can_be_drawn() -> None:
    keyspace = keyspace_of(job_of("a", [b"a:s:1"]), job_of("b", [b"b:s:1", b"b:s:2"]), job_of("c"))
    view = keyspace.view(NOW_MS)
    drawn = {key for _ in range(200) if (key := drawn_from(view)) is not None}
    assert drawn == {b"a:s:1", b"b:s:1", b"b:s:2"}
    assert drawn_from(keyspace_of(job_of("c")).view(NOW_MS)) is None
    assert drawn_from(Keyspace().view(NOW_MS)) is None


def test_lag_counts_committed_epochs_that_are_not_readable() -> None:
    job = job_of("a")
    job.committed_epoch = 3
    assert job.lag_epochs(job.store.applied) == 3
    job.committed_epoch = -1
    assert job.lag_epochs(job.store.applied) == 0


def test_keys_of_job_that_cannot_be_read_are_error_and_not_missing() -> None:
    keyspace = keyspace_of(job_of("a", [b"a:s:1"]))
    view = keyspace.view(NOW_MS)
    keyspace.refuse("b", "its log is damaged")
    keyspace.refuse("a", "a job that is shown stays")
    view.renew(NOW_MS)
    assert view.at(b"a:s:1").key_info(b"a:s:1") is not None
    with pytest.raises(StoreError, match="job 'b' cannot be read: its log is damaged"):
        view.at(b"b:s:1")
    # Its key formats are unknown.
    with pytest.raises(StoreError, match="job 'b' cannot be read, and the key may be one of its keys: its log is dam"):
        view.at(b"c:s:1")
    for listed in (view.key_count, lambda: view.scan(0, 10), lambda: next(view.random_keys())):
        with pytest.raises(StoreError, match="job 'b' cannot be read, and its keys can be neither counted nor listed"):
            listed()
    keyspace.refuse("b", None)
    view.renew(NOW_MS)
    with pytest.raises(JobLoadingError, match="job 'b' is being opened"):
        view.at(b"b:s:1")
    assert view.at(b"c:s:1").key_info(b"c:s:1") is None
    keyspace.put(job_of("b", [b"b:s:1"]))
    view.renew(NOW_MS)
    assert view.at(b"b:s:1").key_info(b"b:s:1") is not None


def test_renamed_job_replaces_its_former_name_with_same_keys() -> None:
    keyspace = keyspace_of(job_of("old", [b"plane/1"], "plane/<k>"), job_of("other", [b"other:s:1"]))
    view = keyspace.view(NOW_MS)
    assert view.at(b"plane/1").value(b"plane/1") == b"old"
    keyspace.put(replace(job_of("new", [b"plane/1"], "plane/<k>"), renamed_from="old"))
    view.renew(NOW_MS)
    assert view.at(b"plane/1").value(b"plane/1") == b"new"
    assert set(keyspace.jobs) == {"new", "other"}


def test_renamed_job_replaces_its_former_name_in_any_order_of_terms() -> None:
    keyspace = keyspace_of(job_of("old", [b"plane/1"], "plane/<k>", generation="q.3"))
    keyspace.put(replace(job_of("new", [b"plane/1"], "plane/<k>", generation="q.1"), renamed_from="old"))
    assert set(keyspace.jobs) == {"new"}


def test_another_query_may_take_name_that_became_free() -> None:
    renamed = replace(job_of("new", [b"new:s:1"], generation="q.1"), renamed_from="old")
    keyspace = keyspace_of(renamed, job_of("old", [b"old:s:1"], generation="other.1"))
    keyspace.put(renamed)
    assert set(keyspace.jobs) == {"new", "old"}
