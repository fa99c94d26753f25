"""Followers and their real appliers: wanted slots are held, and the slots that are reported as held are readable."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from compat.processes import children_of
from compat.waiting import WAIT_S_MAX, eventually, eventually_async
from resp_server.serving import applier_process
from resp_server.serving import appliers as followers_module
from resp_server.serving.applier_process import STATES_LOGGED_MAX
from resp_server.serving.appliers import Appliers
from resp_server.serving.job_catalog import LocalJobCatalog
from state_backend.apply.applier import REST_MS_MIN
from state_backend.log.drop import drop
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.identity import identity_of
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import SlotLoadingError
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import Keyspace
from state_backend.store.store import Snapshot
from tests.builders import put_value, write_log
from tests.server.commands import Start

LOW, HIGH, QUARTER = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383"), SlotSet.parse("0-4095")
STATE = StateDescriptor("s", key="k", value="v")
NOW_MS = 1
HOUR_S = 3600.0
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has inotify")


def keys_of(job: str) -> list[bytes]:
    return [b"%b:s:%d" % (job.encode(), number) for number in range(300)]


class Log:
    """A log root with jobs in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writers: dict[str, LogWriter] = {}

    def publish(self, job: str, value: bytes) -> int:
        if job not in self._writers:
            self._writers[job] = LogWriter(self.root, job, [STATE.for_job(job)], f"query-of-{job}")
        return self._writers[job].publish([Change("s", Op.PUT, key, None, value) for key in keys_of(job)])

    def publish_one(self, job: str, value: bytes, expire_at_ms: int) -> int:
        return self._writers[job].publish([Change("s", Op.PUT, keys_of(job)[0], None, value, expire_at_ms)])

    def end(self, job: str) -> None:
        self._writers.pop(job).close()


class Scene:
    """Followers of a log in this process, and what they said: at each change, what is held must be there."""

    def __init__(self, log: Log, folder: Path, slots: SlotSet, **options: Any) -> None:
        self.log = log
        self.keyspace = Keyspace()
        self.appliers = Appliers(LocalJobCatalog(self.keyspace), [str(log.root)], folder, slots=slots, **options)
        self.appliers.on_change = self._changed
        self.owned_slots: list[SlotSet] = []
        self._change = asyncio.Event()
        self._untrue: list[str] = []

    def _changed(self) -> None:
        owned = self.appliers.owned_slots
        self.owned_slots.append(owned)
        for job in self.keyspace.jobs.values():
            with job.store.snapshot(NOW_MS) as snapshot:
                if owned - snapshot.owned_slots:
                    self._untrue.append(f"{owned} is owned, and {job.name} owns {snapshot.owned_slots}")
                seen, applied = self.appliers.visible.get(job.name), snapshot.applied
                if seen and (seen.term, seen.epoch) > (applied.term, applied.epoch):
                    self._untrue.append(f"{seen} is said to be visible, and {applied} is")
        self._change.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; it is looked at when a change is told, and only then."""
        while not is_so():
            self._change.clear()
            await asyncio.wait_for(self._change.wait(), WAIT_S_MAX)
        assert not self._untrue

    def stand_still_until(self, is_so: Callable[[Snapshot], bool]) -> None:
        """Hold this process up until the store of the only job is so."""
        (job,) = self.keyspace.jobs.values()
        with job.store.snapshot(NOW_MS) as snapshot:

            def renewed() -> Snapshot:
                snapshot.renew(NOW_MS)
                return snapshot

            eventually(renewed, is_so)

    async def notice(self, job: str, value: bytes) -> int:
        """Publish an epoch and tell of it."""
        epoch = self.log.publish(job, value)
        await self.appliers.notice(job)
        return epoch

    def read(self, job: str) -> dict[bytes, bytes | None]:
        """Return what can be read of a job's keys; those that cannot are left out."""
        view = self.keyspace.view(NOW_MS)
        found = {}
        for key in keys_of(job):
            try:
                found[key] = view.at(key).value(key)
            except SlotLoadingError:
                continue
        view.close()
        return found


def of(slots: SlotSet, job: str, value: bytes) -> dict[bytes, bytes]:
    return {key: value for key in keys_of(job) if slot_of(key) in slots}


@asynccontextmanager
async def epoch_feed(folder: Path, slots: SlotSet, *jobs: str, **options: Any) -> AsyncIterator[Scene]:
    """Follow a log with one epoch in each of some jobs; it has caught up."""
    log = Log(folder / "log")
    log.root.mkdir()
    for job in jobs:
        log.publish(job, b"0")
    scene = Scene(log, folder / "store", slots, **options)
    await scene.appliers.start()
    try:
        assert scene.appliers.owned_slots == NONE
        await scene.appliers.catch_up()
        yield scene
    finally:
        await scene.appliers.stop()


def scenario(body: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    def test(tmp_path: Path) -> None:
        asyncio.run(body(tmp_path))  # type: ignore[arg-type]

    return test


def applier_of(job: str) -> int:
    """Return the process id of a job's applier."""
    for child, line in children_of(os.getpid()).items():
        words = line.split(b"\0")
        if b"state_backend.apply.applier" in words and job.encode() in words:
            return child
    raise ProcessLookupError(job)


@scenario
async def test_held_and_visible_slots_are_known_once_jobs_can_be_read(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW, "a", "b") as scene:
        assert scene.appliers.owned_slots == LOW
        visible = scene.appliers.visible
        assert {name: seen[:3] for name, seen in visible.items()} == {
            name: (f"query-of-{name}.1", 1, 0) for name in ("a", "b")
        }
        assert all(seen.digest is not None and seen.log == str(tmp_path / "log") for seen in visible.values())
        assert scene.appliers.identities == {str(scene.log.root): identity_of(LocalFilesystem(scene.log.root))}
        assert scene.read("a") == of(LOW, "a", b"0")


@scenario
async def test_all_slots_are_held_by_default(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, ALL, "a") as scene:
        assert scene.appliers.owned_slots == ALL
        assert scene.read("a") == of(ALL, "a", b"0")
        assert b"--slots" not in Path(f"/proc/{applier_of('a')}/cmdline").read_bytes()


@scenario
async def test_server_without_jobs_has_all_its_desired_slots(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW) as scene:
        assert (scene.appliers.owned_slots, scene.appliers.visible) == (LOW, {})
        scene.appliers.set_desired_slots(HIGH)
        assert scene.appliers.owned_slots == HIGH
        await scene.notice("late", b"0")
        await scene.until(lambda: "late" in scene.appliers.visible)
        assert scene.read("late") == of(HIGH, "late", b"0")


@scenario
async def test_each_readable_epoch_is_reported(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW, "a") as scene:
        for number in (1, 2):
            assert await scene.notice("a", b"%d" % number) == number
            await scene.until(lambda number=number: scene.appliers.visible["a"].epoch == number)  # type: ignore[misc]
            assert scene.read("a") == of(LOW, "a", b"%d" % number)


@scenario
async def test_slots_are_gained_once_they_are_there_and_lost_at_once(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW, "a", "b") as scene:
        scene.appliers.set_desired_slots(ALL)
        assert scene.appliers.owned_slots == LOW
        await scene.until(lambda: scene.appliers.owned_slots == ALL)
        assert scene.read("a") == of(ALL, "a", b"0")
        scene.appliers.set_desired_slots(QUARTER)
        assert scene.appliers.owned_slots == QUARTER
        await scene.notice("b", b"1")
        await scene.until(lambda: scene.appliers.visible["b"].epoch == 1)
        assert scene.read("b") == of(QUARTER, "b", b"1")
        assert [each for each, _ in groupby(scene.owned_slots)] == [NONE, LOW, ALL, QUARTER]


@pytest.mark.parametrize(("after_s", "has_room"), [(1e9, False), (0.0, True)])
def test_formerly_full_store_is_relied_on_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, has_room: bool
) -> None:
    monkeypatch.setattr(applier_process, "ROOM_AFTER_S", after_s)

    async def body() -> None:
        async with epoch_feed(tmp_path, ALL, "a") as scene:
            assert scene.appliers.has_room
            applier = applier_of("a")
            _, hard = resource.prlimit(applier, resource.RLIMIT_FSIZE)
            resource.prlimit(applier, resource.RLIMIT_FSIZE, (16 << 10, hard))
            await scene.notice("a", b"1")
            await eventually_async(lambda: not scene.appliers.has_room)
            assert scene.read("a") == of(ALL, "a", b"0")
            resource.prlimit(applier, resource.RLIMIT_FSIZE, (hard, hard))
            await scene.notice("a", b"2")
            await scene.until(lambda: scene.appliers.visible["a"].epoch == 2)
            if has_room:  # the epoch is told of before the room is
                await eventually_async(lambda: scene.appliers.has_room)
            assert scene.appliers.has_room is has_room

    asyncio.run(body())


@scenario
async def test_slots_given_up_and_wanted_again_are_held_once_loaded_again(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW, "a") as scene:
        for pause_s in (0.0, 0.001, 0.01, 0.1, 0.0, 0.3):
            scene.appliers.set_desired_slots(QUARTER)
            await asyncio.sleep(pause_s)
            scene.appliers.set_desired_slots(LOW)
            assert scene.appliers.owned_slots == QUARTER
            await scene.until(lambda: scene.appliers.owned_slots == LOW)
            assert scene.read("a") == of(LOW, "a", b"0")


@scenario
async def test_reports_from_before_slots_were_given_up_do_not_count(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW, "a") as scene:
        await scene.notice("a", b"1")
        # Nothing that the applier says is heard here until the end of this.
        scene.stand_still_until(lambda snapshot: snapshot.applied.epoch == 1)
        scene.appliers.set_desired_slots(QUARTER)
        scene.stand_still_until(lambda snapshot: snapshot.owned_slots == QUARTER)
        scene.appliers.set_desired_slots(LOW)
        assert scene.appliers.owned_slots == QUARTER
        await scene.until(lambda: scene.appliers.owned_slots == LOW)
        assert scene.read("a") == of(LOW, "a", b"1")


@pytest.mark.kill
@scenario
async def test_restarted_applier_takes_newest_desired_slots(tmp_path: Path) -> None:
    async with epoch_feed(tmp_path, LOW, "a") as scene:
        os.kill(applier_of("a"), signal.SIGKILL)
        scene.appliers.set_desired_slots(ALL)
        assert scene.appliers.owned_slots == LOW  # its store can be read all the time
        assert scene.read("a") == of(LOW, "a", b"0")
        await scene.until(lambda: scene.appliers.owned_slots == ALL)
        os.kill(applier_of("a"), signal.SIGKILL)
        await asyncio.sleep(0.05)
        scene.appliers.set_desired_slots(HIGH)
        await scene.notice("a", b"1")
        await scene.until(lambda: scene.appliers.visible["a"].epoch == 1)
        assert scene.read("a") == of(HIGH, "a", b"1")


def test_job_that_turns_out_to_lack_keys_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that runs has opened the job before the query, with an older checkpoint, commits its first epoch."""

    async def follow() -> None:
        async with epoch_feed(tmp_path, ALL) as scene:
            writer = LogWriter(scene.log.root, "late", [STATE.for_job("late")], "query")
            await scene.appliers.notice("late")
            await scene.until(lambda: "late" in scene.appliers.visible)
            assert not scene.keyspace.jobs["late"].is_incomplete
            for epoch in (7, 8):
                writer.publish([Change("s", Op.PUT, b"late:s:1", None, b"v")], epoch)
                await scene.appliers.notice("late")
                await scene.until(lambda epoch=epoch: scene.appliers.visible["late"].epoch == epoch)
            assert scene.keyspace.jobs["late"].is_incomplete

    asyncio.run(follow())
    warned = [record for record in caplog.records if "job late: its log begins after the query did" in record.message]
    assert len(warned) == 1


@scenario
async def test_idle_jobs_have_no_process_until_there_is_work(folder: Path) -> None:
    async with epoch_feed(folder, ALL, "a", "b", rest_after_s=0.1) as scene:
        await eventually_async(lambda: sorted(scene.appliers.idle), lambda jobs: jobs == ["a", "b"])
        assert (scene.read("a"), scene.read("b")) == (of(ALL, "a", b"0"), of(ALL, "b", b"0"))
        epoch = scene.log.publish("a", b"1")  # nobody tells the server
        assert await scene.appliers.wait("a", epoch, WAIT_S_MAX)
        assert scene.read("a") == of(ALL, "a", b"1")
        assert "b" in scene.appliers.idle
        await eventually_async(lambda: scene.appliers.idle, lambda jobs: "a" in jobs)
        scene.log.end("a")
        epoch = await scene.notice("a", b"2")  # by a new writer
        assert await scene.appliers.wait("a", epoch, WAIT_S_MAX)
        assert scene.read("a") == of(ALL, "a", b"2")


@scenario
async def test_job_at_rest_gets_slots_that_it_is_to_own(folder: Path) -> None:
    async with epoch_feed(folder, LOW, "a", rest_after_s=0.1) as scene:
        await eventually_async(lambda: scene.appliers.idle)
        scene.appliers.set_desired_slots(ALL)
        await scene.until(lambda: scene.appliers.owned_slots == ALL)
        assert scene.read("a") == of(ALL, "a", b"0")


@scenario
async def test_job_with_key_that_soon_expires_does_not_rest(folder: Path) -> None:
    async with epoch_feed(folder, ALL, "later", "soon", rest_after_s=0.1) as scene:
        for job, lifetime_ms in (("later", 3_600_000), ("soon", REST_MS_MIN // 2)):
            scene.log.publish_one(job, b"x", now_ms() + lifetime_ms)
            await scene.appliers.wait(job, 1, WAIT_S_MAX)
        await eventually_async(lambda: scene.appliers.idle, lambda jobs: jobs == ["later"])


@on_linux
@scenario
async def test_epoch_of_local_log_is_applied_without_poll(folder: Path) -> None:
    async with epoch_feed(folder, ALL, "a", "b", probe_interval_s=HOUR_S) as scene:
        for _ in range(3):
            epoch = scene.log.publish("a", b"1")
            await scene.until(lambda epoch=epoch: scene.appliers.visible["a"].epoch == epoch)  # type: ignore[misc]
        scene.log.end("a")
        writer = LogWriter(scene.log.root, "a", [STATE.for_job("a")], "another-query", holds_back=True)
        writer.publish([Change("s", Op.PUT, keys_of("a")[0], None, b"2")])
        await eventually_async(lambda: scene.keyspace.jobs["a"].held_back_epoch is not None)
        writer.promote("a test")
        await scene.until(lambda: scene.appliers.visible["a"].generation == writer.generation)
        epoch = writer.publish([Change("s", Op.PUT, keys_of("a")[0], None, b"3")])
        await scene.until(lambda: scene.appliers.visible["a"].epoch == epoch)


@pytest.fixture
def without_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers_module, "LISTING_S", HOUR_S)


@on_linux
@pytest.mark.usefixtures("without_listings")
@scenario
async def test_new_job_of_local_log_is_served_before_next_listing(folder: Path) -> None:
    async with epoch_feed(folder, ALL, "old") as scene:
        for name in ("waiting", "of-others"):
            (scene.log.root / name).mkdir()
        (scene.log.root / "of-others" / "metadata").touch()
        for job in ("a", "b", "waiting"):
            epoch = await asyncio.to_thread(scene.log.publish, job, b"1")
            await scene.until(lambda job=job, epoch=epoch: _reached(scene, job) == epoch)  # type: ignore[misc]
        scene.log.end("a")
        drop(scene.log.root, "a")
        await scene.appliers.notice("unknown")  # lists the jobs
        assert "a" not in scene.appliers.visible
        scene.log.publish("a", b"2")
        await scene.until(lambda: _reached(scene, "a") == 0)
        assert scene.read("a") == of(ALL, "a", b"2")


@scenario
async def test_emptied_log_keeps_identity_until_another_log_is_there(folder: Path) -> None:
    async with epoch_feed(folder, ALL, "job") as scene:
        root = str(scene.log.root)
        own = scene.appliers.identities[root]
        assert own
        mounted = scene.log.root.rename(folder / "mounted")
        scene.log.root.mkdir()
        await scene.appliers.notice("unknown")  # lists the jobs
        assert scene.appliers.identities[root] == own
        assert scene.read("job") == of(ALL, "job", b"0")
        other = Log(folder / "other")
        other.root.mkdir()
        other.publish("job", b"1")
        scene.log.root.rmdir()
        other.root.rename(scene.log.root)
        await scene.appliers.notice("unknown")
        assert scene.appliers.identities[root] not in (own, "")
        scene.log.root.rename(other.root)
        mounted.rename(scene.log.root)
        await scene.appliers.notice("unknown")
        assert scene.appliers.identities[root] == own
        for log in (scene.log, other):
            log.end("job")


def _reached(scene: Scene, job: str) -> int:
    return scene.appliers.visible[job].epoch if job in scene.appliers.visible else -1


@pytest.mark.usefixtures("without_listings")
@scenario
async def test_announced_job_is_served_before_next_listing(folder: Path) -> None:
    async with epoch_feed(folder, ALL) as scene:
        await scene.appliers.notice("unknown")
        for job in ("a", "b"):
            epoch = scene.log.publish(job, b"1")
            await scene.appliers.notice(job, epoch, 1)
            await scene.until(lambda job=job, epoch=epoch: _reached(scene, job) == epoch)  # type: ignore[misc]


def test_log_names_a_few_of_many_states(start: Start, tmp_path: Path) -> None:
    states = [StateDescriptor(f"s{number:04}", key="car", value="kmh") for number in range(3 * STATES_LOGGED_MAX)]
    write_log(tmp_path / "log", "job", states, [put_value("s0000", b"job:s0000:1", b"7")])
    server = start("serve", "--log", tmp_path / "log", "--store", tmp_path / "store", "--port", 0)
    line = server.wait_for(r"job job: serving generation \w+(\S*), (\d+) states: (.*)")
    named = ", ".join(state.name for state in states[:STATES_LOGGED_MAX])
    assert (line[2], line[3]) == (str(len(states)), f"{named}, ...")
