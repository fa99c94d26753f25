"""Celery with Redis as its broker and its result store: tasks, groups, chains, chords, and control of a worker."""

from __future__ import annotations

from typing import Any

from celery import chain, chord, group

from compat.swap_programs.scripts.celery_app import add_task, app, fail_task, total_task, try_again_task
from compat.swap_programs.scripts.checks import CHECK_S_MAX, error_text, main, process
from compat.waiting import eventually

WORKER = ("celery", "-A", "compat.swap_programs.scripts.celery_app", "worker", "--pool", "solo", "-l", "error")


def got(result: Any) -> Any:
    """Return a task's result, or its error."""
    try:
        return result.get(timeout=CHECK_S_MAX)
    except Exception as error:
        return error_text(error)


def results(url: str) -> Any:
    sent = [add_task.delay(number, 1) for number in range(10)]
    return [[got(each) for each in sent], sent[0].status, sent[0].ready()]


def polled(url: str) -> Any:
    """Read the state of a task as a web application does, without waiting for a message."""
    result = add_task.delay(1, 1)
    eventually(lambda: app.AsyncResult(result.id).state == "SUCCESS", timeout_s=CHECK_S_MAX)
    found = app.AsyncResult(result.id).result
    result.forget()
    return [found, app.AsyncResult(result.id).state]


def failures(url: str) -> Any:
    result = fail_task.delay()
    return [got(result), result.state]


def groups(url: str) -> Any:
    return got(group(add_task.s(number, number) for number in range(10))())


def chains(url: str) -> Any:
    return got(chain(add_task.s(1, 2), add_task.s(3), add_task.s(4))())


def chords(url: str) -> Any:
    return got(chord(add_task.s(number, 1) for number in range(10))(total_task.s()))


def later(url: str) -> Any:
    return got(add_task.apply_async((2, 3), countdown=0.5))


def retries(url: str) -> Any:
    return got(try_again_task.delay())


def inspected(url: str) -> Any:
    replies = app.control.inspect(timeout=3).ping() or {}
    return list(replies.values())


def revoked(url: str) -> Any:
    result = add_task.apply_async((2, 3), countdown=1)
    app.control.revoke(result.id, reply=True, timeout=3)
    return [got(result), result.state]


def purged(url: str) -> Any:
    for number in range(3):
        add_task.apply_async((number, 1), queue="nobody's")
    with app.connection_for_write() as connection:
        return connection.default_channel.queue_purge("nobody's")


CHECKS = {
    "tasks and their results": results,
    "a result that is polled and forgotten": polled,
    "a task that fails": failures,
    "group": groups,
    "chain": chains,
    "chord": chords,
    "a task that starts later": later,
    "a task that is tried again": retries,
    "inspect ping": inspected,
    "revoke": revoked,
    "purge": purged,
}

if __name__ == "__main__":
    with process(*WORKER):
        main(CHECKS)
