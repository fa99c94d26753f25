"""Polls are frequent while an epoch is expected, and rare otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from resp_server.backends.servers import server_access
from state_backend.apply.poll_schedule import GAPS_MIN, PollSchedule
from state_backend.log.filesystems.local import LocalFilesystem

LONGEST_S, SHORTEST_S = 15.0, 0.02


class Job:
    """A job whose epochs are committed at given times, and a reader that looks as its schedule says."""

    def __init__(self, gap_s: Callable[[], float]) -> None:
        self.schedule = PollSchedule(1.0, LONGEST_S, SHORTEST_S)
        self.now_s = 0.0
        self._gap_s = gap_s
        self._commit_s = gap_s()

    def follow(self, epochs: int, *, announced: bool = False) -> tuple[list[float], int]:
        """Follow some epochs; return how late each one was found, and the number of looks that found none."""
        late, looks = [], 0
        while len(late) < epochs:
            pause_s = self.schedule.pause_s(self.now_s)
            is_announced = announced and self._commit_s <= self.now_s + pause_s
            self.now_s = self._commit_s if is_announced else self.now_s + pause_s
            if not is_announced:
                self.schedule.note_pause()
            found = 0
            while self._commit_s <= self.now_s:
                late.append(self.now_s - self._commit_s)
                found += 1
                self._commit_s += self._gap_s()
            looks += not found
            self.schedule.note_look(self.now_s, has_news=found > 0, epochs=found, was_announced=is_announced)
        return late, looks


@pytest.mark.parametrize(("shortest_s", "longest_s"), [(0.2, 1.0), (1.0, 1.1), (9.8, 10.2), (590.0, 610.0)])
def test_epoch_is_found_soon_once_its_rhythm_is_known(shortest_s: float, longest_s: float) -> None:
    late_s_max = max(0.02, (longest_s - shortest_s) / 10)
    chance = random.Random(1)
    job = Job(lambda: chance.uniform(shortest_s, longest_s))
    job.follow(20)
    late, _ = job.follow(200)
    late.sort()
    assert late[len(late) // 2] < late_s_max
    assert late[int(len(late) * 0.9)] < 3 * late_s_max


def test_job_committing_at_poll_interval_is_not_found_late_for_ever() -> None:
    job = Job(lambda: 1.0)
    job._commit_s = 0.3
    job.follow(40)
    late, _ = job.follow(20)
    assert max(late) < 3 * SHORTEST_S


def test_regular_job_is_polled_a_few_times_for_each_epoch() -> None:
    chance = random.Random(1)
    job = Job(lambda: chance.uniform(9.9, 10.1))
    job.follow(20)
    _, looks = job.follow(100)
    assert looks < 20 * 100


def test_job_that_announces_its_epochs_is_rarely_polled() -> None:
    job = Job(lambda: 10.0)
    job.follow(GAPS_MIN + 1, announced=True)
    late, looks = job.follow(100, announced=True)
    assert (max(late), looks) == (0.0, 0)


def test_lost_announcement_delays_epoch_by_one_gap() -> None:
    job = Job(lambda: 2.0)
    job.follow(50, announced=True)
    late, _ = job.follow(1)
    assert late[0] <= 2.0 + SHORTEST_S


def test_idle_job_is_polled_rarely() -> None:
    job = Job(lambda: 1.0)
    job.follow(20)
    job._gap_s = lambda: 86_400.0
    job.follow(1)  # the last epoch before the long pause
    _, looks = job.follow(1)
    assert looks < 86_400 / LONGEST_S + 200


def test_servers_that_only_poll_folder_find_epoch_well_within_proxys_wait() -> None:
    filesystem, chance = LocalFilesystem, random.Random(3)
    schedule = PollSchedule(
        filesystem.probe_interval_s, filesystem.probe_interval_s_max, filesystem.probe_interval_s_min
    )
    now_s, pauses = 0.0, []
    for _ in range(1_000):
        pauses.append(schedule.pause_s(now_s))
        now_s += pauses[-1]
        schedule.note_pause()
        found = chance.random() < 0.2
        schedule.note_look(now_s, has_news=found, epochs=int(found), was_announced=False)
    assert max(pauses) <= server_access.TIMEOUT_S / 4
