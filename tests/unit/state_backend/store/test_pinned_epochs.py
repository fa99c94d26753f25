"""Which epochs stay readable, how long, and that a reader of one keeps it."""

from __future__ import annotations

from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore
from state_backend.store.pinned_epochs import EPOCHS_MAX, IDLE_MS_MAX, PINNED_MS_MAX, PinnedEpochs, TermEpoch
from state_backend.store.store import Snapshot
from tests.builders import apply_epoch

STATES = [StateDescriptor("n", key="k", value="v")]
KEY = b"job:n:a"


class Scene:
    """A keyspace with jobs, their pinned epochs, and the clock."""

    def __init__(self, *jobs: str) -> None:
        self.keyspace = Keyspace()
        self.pinned = PinnedEpochs(self.keyspace)
        self.now_ms = 1_000
        self.stores = {job: self.show(job, "g1") for job in jobs}

    def show(self, job: str, generation: str) -> MemoryStore:
        store = MemoryStore(generation)
        self.keyspace.put(Job(job, generation, STATES, store))
        return store

    def publish(self, epoch: int, job: str = "job", term: int = 1) -> None:
        changes = [Change("n", Op.PUT, f"{job}:n:a".encode(), value=b"%d" % epoch)]
        apply_epoch(self.stores[job], STATES, changes, epoch, term=term)
        self.pinned.update(job, self.now_ms)

    def take(self, clock_ms: int = 0, **epochs: TermEpoch) -> dict[str, Snapshot] | None:
        return self.pinned.snapshots_at(epochs, clock_ms, self.now_ms)


def value(taken: dict[str, Snapshot] | None) -> bytes | None:
    assert taken is not None
    return taken["job"].value(KEY)


def test_epochs_are_pinned_only_some_time_after_request() -> None:
    scene = Scene("job")
    scene.publish(0)
    scene.publish(1)
    assert scene.pinned.epochs() == {}
    assert scene.take(job=(1, 0)) is None
    assert scene.pinned.epochs() == {"job": [(1, 1)]}
    scene.publish(2)
    assert scene.pinned.epochs() == {"job": [(1, 1), (1, 2)]}
    scene.now_ms += IDLE_MS_MAX
    scene.pinned.release_unused(scene.now_ms)
    assert scene.pinned.epochs() == {}


def test_newest_epochs_are_pinned_and_older_ones_for_a_time() -> None:
    scene = Scene("job")
    scene.publish(0)
    scene.take(job=(1, 0))
    for epoch in range(1, 2 * EPOCHS_MAX):
        scene.now_ms += 1
        scene.publish(epoch)
    assert scene.pinned.epochs() == {"job": [(1, epoch) for epoch in range(EPOCHS_MAX, 2 * EPOCHS_MAX)]}
    for epoch in range(EPOCHS_MAX, 2 * EPOCHS_MAX):
        assert value(scene.take(job=(1, epoch))) == b"%d" % epoch
    scene.now_ms += PINNED_MS_MAX - 2
    scene.publish(2 * EPOCHS_MAX)
    assert len(scene.pinned.epochs()["job"]) == 5
    scene.now_ms += PINNED_MS_MAX + 1
    scene.publish(2 * EPOCHS_MAX + 1)
    newest = [(1, 2 * EPOCHS_MAX), (1, 2 * EPOCHS_MAX + 1)]
    assert scene.pinned.epochs() == {"job": newest}
    scene.now_ms += 100 * PINNED_MS_MAX
    scene.take(job=(1, 0))
    assert scene.pinned.epochs() == {"job": newest}


def test_epoch_is_read_for_as_long_as_its_job_is_held_there() -> None:
    scene = Scene("job")
    scene.publish(0)
    scene.pinned.keep(scene.now_ms)
    scene.pinned.update("job", scene.now_ms)
    view = scene.keyspace.view(scene.now_ms)
    scene.publish(1)
    view.renew(scene.now_ms)
    assert view.at(KEY).value(KEY) == b"1"
    snapshot_at = scene.pinned.snapshots_of("job", (1, 0))
    assert snapshot_at is not None
    assert scene.pinned.snapshots_of("job", (1, 7)) is scene.pinned.snapshots_of("other", (1, 0)) is None
    view.hold("job", snapshot_at)
    assert view.at(KEY).value(KEY) == b"1"  # until the end of this round
    for _ in range(3):
        view.renew(scene.now_ms)
        assert view.at(KEY).value(KEY) == b"0"
    scene.publish(2)
    view.release("job")
    view.renew(scene.now_ms)
    assert view.at(KEY).value(KEY) == b"2"
    view.close()


def test_held_job_is_read_in_new_generation_then_released() -> None:
    scene = Scene("job")
    scene.publish(0)
    scene.take(job=(1, 0))
    view = scene.keyspace.view(scene.now_ms)
    snapshot_at = scene.pinned.snapshots_of("job", (1, 0))
    assert snapshot_at is not None
    view.hold("job", snapshot_at)
    view.renew(scene.now_ms)
    assert view.at(KEY).value(KEY) == b"0"
    scene.stores["job"] = scene.show("job", "g2")
    scene.publish(7)
    for _ in range(2):
        view.renew(scene.now_ms)
        assert view.at(KEY).value(KEY) == b"7"
        view.release("job")
    view.close()


def test_reader_keeps_its_epoch_after_it_is_no_longer_pinned() -> None:
    scene = Scene("job")
    scene.publish(0)
    one, other = scene.take(job=(1, 0)), scene.take(job=(1, 0))
    scene.publish(1)
    scene.pinned.close()
    assert value(one) == value(other) == b"0"
    assert one is not None and other is not None
    one["job"].close()
    assert value(other) == b"0"
    other["job"].close()
    assert scene.take(job=(1, 0)) is None


def test_all_jobs_have_to_be_named_and_no_others() -> None:
    scene = Scene("job", "other")
    scene.publish(3)
    scene.publish(4, "other", term=2)
    assert scene.take(job=(1, 3)) is None
    assert scene.take(job=(1, 3), other=(1, 4)) is None
    assert scene.take(job=(1, 3), other=(2, 4), third=(1, 1)) is None
    taken = scene.take(job=(1, 3), other=(2, 4))
    assert taken is not None and taken["other"].value(b"other:n:a") == b"4"
    scene.keyspace.remove("other")
    assert scene.take(job=(1, 3)) is not None


def test_another_generation_is_not_read_beside_one_before() -> None:
    scene = Scene("job")
    scene.publish(5)
    assert scene.take(job=(1, 5)) is not None
    scene.stores["job"] = scene.show("job", "g2")
    scene.publish(0)
    assert scene.take(job=(1, 5)) is None
    assert scene.pinned.epochs() == {"job": [(1, 0)]}


def test_replaced_store_leaves_earlier_epochs_readable() -> None:
    scene = Scene("job")
    scene.publish(0)
    scene.take(job=(1, 0))
    scene.publish(1)
    scene.stores["job"] = scene.show("job", "g1")
    scene.publish(1)
    assert scene.pinned.epochs() == {"job": [(1, 0), (1, 1)]}
    scene.publish(2)
    assert [value(scene.take(job=(1, epoch))) for epoch in range(3)] == [b"0", b"1", b"2"]
