"""The key formats of a cluster are complete when those of all jobs are known, also of jobs that cannot be read."""

from __future__ import annotations

from resp_server.backends.servers.job_keys import JobKeys
from resp_server.session.epochs import REMOVED
from state_backend.store.keyspace import UNREADABLE


def test_formats_are_not_complete_while_job_cannot_be_read() -> None:
    keys = JobKeys()
    keys.epoch_reported("damaged", UNREADABLE)
    keys.set_formats({"job": ["<k>"]})
    assert not keys.is_complete
    assert keys.job_of(b"damaged:s:1") == "damaged"
    assert keys.epoch_reported("damaged", (1, 0))
    keys.set_formats({"job": ["<k>"], "damaged": ["damaged:s:<k>"]})
    assert keys.is_complete


def test_job_that_was_never_readable_and_is_dropped_is_not_waited_for() -> None:
    keys = JobKeys()
    keys.epoch_reported("damaged", UNREADABLE)
    keys.set_formats({"job": ["<k>"]})
    keys.epoch_reported("damaged", REMOVED)
    assert keys.is_complete
    assert keys.names == ["job"]
