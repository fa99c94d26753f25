"""A server's jobs, for metrics and health. No command: `exporter` asks one of the server's processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resp_server.acl.visibility import VisibleJob
from resp_server.command.handler import worker_query
from resp_server.commands.job_facts import row_of
from resp_server.pipeline.context import ServerContext
from state_backend.model.slots import SLOTS
from state_backend.store.keyspace import Job
from state_backend.store.store import Snapshot

# The state of a query's progress, which is one hash, `job:_progress` (see `spark_hooks.publish.progress`).
PROGRESS = "_progress"


@worker_query("jobs")
def jobs_query(server: ServerContext, nothing: None) -> Mapping[str, Any]:
    """Return the rows of all jobs as JSON, as of the newest epochs."""
    server.renew_all()
    rows = [_row(job, snapshot, server.view.now_ms) for job, snapshot in server.view.snapshots()]
    return {
        "jobs": sorted(rows, key=lambda row: str(row["name"])),
        "unreadable": len(server.keyspace.unreadable),
        "is_loading": server.is_loading,
        "slots": SLOTS if server.cluster is None else len(server.cluster.slots),
        "topology_version": -1 if server.cluster is None else server.cluster.topology.version,
    }


def _row(job: Job, snapshot: Snapshot, now_ms: int) -> dict[str, Any]:
    """Return the row of STATE JOBS, and what only metrics have."""
    visible = VisibleJob(job, snapshot, job.states, {}, is_fully_visible=True)
    return row_of(visible, now_ms) | {
        "applied_epochs": job.applied_epochs,
        "apply_ns": job.apply_ns,
        "expired_keys": snapshot.applied.expired_keys,
        "store_free_bytes": visible.file_bytes[1],
        "record_delays": job.record_delays,
        "progress": _progress(job, snapshot),
    }


def _progress(job: Job, snapshot: Snapshot) -> dict[str, str]:
    """Return the hash of the query's progress; empty without one."""
    key = f"{job.name}:{PROGRESS}".encode()
    if not any(state.name == PROGRESS for state in job.states) or snapshot.key_info(key) is None:
        return {}
    return {name.decode(): value.decode("utf-8", "replace") for name, value in snapshot.map_pairs(key)}
