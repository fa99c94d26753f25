"""RQ: jobs that succeed, fail, retry, depend on others and start later, with workers in processes of their own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis
from rq import Queue, Retry
from rq.command import send_shutdown_command
from rq.job import Job
from rq.registry import FailedJobRegistry, ScheduledJobRegistry
from rq.worker import Worker

from compat.swap_programs.scripts import rq_jobs
from compat.swap_programs.scripts.checks import CHECK_S_MAX, main, process
from compat.waiting import eventually


def queue_at(url: str, name: str) -> Queue:
    """Return a queue."""
    return Queue(name, connection=redis.Redis.from_url(url))


def work(url: str, queue: Queue) -> None:
    """Run a worker until its queue is empty."""
    with process("rq", "worker", "--burst", "--quiet", "--url", url, queue.name) as worker:
        worker.wait(CHECK_S_MAX)


def status(job: Job) -> Any:
    """Return a job's status, result and error."""
    job.refresh()
    error = job.latest_result()
    text = (error.exc_string or "").strip().splitlines()[-1:] if error else []
    return [str(job.get_status()), job.return_value(), text]


def results(url: str) -> Any:
    queue = queue_at(url, "results")
    jobs = [queue.enqueue(rq_jobs.add, number, 1) for number in range(5)]
    before = len(queue)
    work(url, queue)
    return [before, [status(job) for job in jobs], len(queue)]


def failures(url: str) -> Any:
    queue = queue_at(url, "failures")
    job = queue.enqueue(rq_jobs.fail)
    work(url, queue)
    return [status(job), FailedJobRegistry(queue=queue).count]


def retries(url: str) -> Any:
    queue = queue_at(url, "retries")
    with TemporaryDirectory() as folder:
        job = queue.enqueue(rq_jobs.fail_once, str(Path(folder) / "ran"), retry=Retry(max=2))
        work(url, queue)
        return status(job)


def dependencies(url: str) -> Any:
    queue = queue_at(url, "dependencies")
    first = queue.enqueue(rq_jobs.add, 1, 2)
    second = queue.enqueue(rq_jobs.add, 3, 4, depends_on=first)
    before = str(second.get_status())
    work(url, queue)
    return [before, status(first), status(second)]


def scheduled(url: str) -> Any:
    queue = queue_at(url, "scheduled")
    job = queue.enqueue_in(timedelta(seconds=1), rq_jobs.add, 5, 6)
    before = ScheduledJobRegistry(queue=queue).count
    with process("rq", "worker", "--with-scheduler", "--quiet", "--url", url, queue.name):
        eventually(lambda: job.get_status() == "finished", timeout_s=CHECK_S_MAX)
    return [before, status(job)]


def shutdown(url: str) -> Any:
    """A worker that waits for jobs hears a command, which RQ sends by PUBLISH."""
    queue = queue_at(url, "shutdown")
    with process("rq", "worker", "--quiet", "--name", "listening", "--url", url, queue.name) as worker:
        eventually(lambda: [each.name for each in Worker.all(queue.connection)] == ["listening"], timeout_s=CHECK_S_MAX)
        eventually(lambda: b"rq:pubsub:listening" in queue.connection.pubsub_channels(), timeout_s=CHECK_S_MAX)
        send_shutdown_command(queue.connection, "listening")
        return worker.wait(CHECK_S_MAX)


CHECKS = {
    "jobs and their results": results,
    "a job that fails": failures,
    "a job that is tried again": retries,
    "a job that waits for another": dependencies,
    "a job that starts later": scheduled,
    "a command to a worker": shutdown,
}

if __name__ == "__main__":
    main(CHECKS)
