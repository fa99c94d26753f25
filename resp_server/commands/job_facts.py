"""The facts of a server's jobs, for metrics and health. No command: `exporter` asks one of the server's processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resp_server.command.handler import worker_query
from resp_server.commands.state import age_ms, lag_ms
from resp_server.pipeline.context import ServerContext
from state_backend.model.slots import SLOTS
from state_backend.store.keyspace import Job
from state_backend.store.store import Snapshot

# The state of a query's progress, which is one hash, `job:_progress` (see `spark_hooks.publish.progress`).
PROGRESS = "_progress"


@worker_query("job facts")
def job_facts(server: ServerContext, nothing: None) -> Mapping[str, Any]:
    """Return the facts of all jobs as JSON, as of the newest epochs."""
    server.renew_all()
    jobs = [_facts(job, snapshot, server.view.now_ms) for job, snapshot in server.view.snapshots()]
    return {
        "jobs": sorted(jobs, key=lambda facts: str(facts["name"])),
        "unreadable": len(server.keyspace.unreadable),
        "is_loading": server.is_loading,
        "slots": SLOTS if server.cluster is None else len(server.cluster.slots),
        "topology_version": -1 if server.cluster is None else server.cluster.topology.version,
    }


def _facts(job: Job, snapshot: Snapshot, now_ms: int) -> dict[str, Any]:
    applied = snapshot.applied
    epochs_per_minute, changes_per_minute = job.per_minute(now_ms)
    used_bytes, free_bytes = job.store.used_bytes()
    return {
        "name": job.name,
        "epoch": applied.epoch,
        "committed_epoch": job.committed_epoch,
        "lag_epochs": job.lag_epochs(applied),
        "lag_ms": lag_ms(job, applied),
        "age_ms": age_ms(applied, now_ms),
        "stale": job.is_stale,
        "incomplete": job.is_incomplete,
        "skipped_rows": job.skipped_rows,
        "source_lag_age_ms": None if job.source_lag is None else max(0, now_ms - job.source_lag["at_ms"]),
        "source_lags": {} if job.source_lag is None else job.source_lag["partitions"],
        "record_delays": job.record_delays,
        "held_back": job.held_back_epoch is not None,
        "failing": bool(job.error),
        "epochs_per_minute": epochs_per_minute,
        "changes_per_minute": changes_per_minute,
        "applied_epochs": job.applied_epochs,
        "apply_ns": job.apply_ns,
        "expired_keys": applied.expired_keys,
        "store_bytes": used_bytes,
        "store_free_bytes": free_bytes,
        "states": {state.name: applied.keys.get(state.name, 0) for state in job.states},
        "state_bytes": job.state_bytes,
        "progress": _progress(job, snapshot),
    }


def _progress(job: Job, snapshot: Snapshot) -> dict[str, str]:
    """Return the hash of the query's progress; empty without one."""
    key = f"{job.name}:{PROGRESS}".encode()
    if not any(state.name == PROGRESS for state in job.states) or snapshot.key_info(key) is None:
        return {}
    return {name.decode(): value.decode("utf-8", "replace") for name, value in snapshot.map_pairs(key)}
