"""The tasks of celery_checks, which a worker imports. REDIS_URL is the broker and the result store."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

app = Celery("checks", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_track_started=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)


def add(one: int, other: int) -> int:
    """Return a sum."""
    return one + other


def total(numbers: list[int]) -> int:
    """Return a sum."""
    return sum(numbers)


def fail() -> None:
    """Fail."""
    raise ValueError("as told")


def try_again(self: Any) -> int:
    """Fail twice, and return the number of retries."""
    if self.request.retries < 2:
        raise self.retry(countdown=0.1, max_retries=3)
    return int(self.request.retries)


add_task, total_task, fail_task = app.task(add), app.task(total), app.task(fail)
try_again_task = app.task(try_again, bind=True)
