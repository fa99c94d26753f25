"""The facts about each job of a change log, for `sparkis inspect LOG`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from state_backend.log.change_log import ChangeLog, JobLog
from state_backend.log.time_travel import readable_epochs
from state_backend.model.clock import iso_text
from state_backend.model.errors import SparkisError


def is_log(location: str) -> bool:
    """Return whether a path or address is the root of a log with jobs; False for one that cannot be read."""
    try:
        log = ChangeLog(location)
        return log.filesystem.size("metadata") is None and bool(log.jobs())  # a checkpoint has a file of this name
    except SparkisError:
        return False


def facts_of_log(location: str, job: str | None) -> list[dict[str, Any]]:
    """Return the facts about each job of a log, or about one job; LogError for an unknown job."""
    log = ChangeLog(location)
    jobs = log.jobs()
    if job is not None and job not in jobs:
        raise log.no_such_job(job)
    return [facts_of(log.job(name)) for name in jobs if job in (None, name)]


def facts_of(job: JobLog) -> dict[str, Any]:
    """Return the facts about a job; a damaged file is an `error` among them."""
    facts: dict[str, Any] = {"job": job.job}
    try:
        current = job.visible()
        if current is None:
            return facts | {"error": "the job was dropped"}
        # Of the shown generation's writer; another one may write a generation that is held back.
        claim, heartbeat = job.terms.claim(current.term), job.terms.heartbeat(current.term)
        facts |= {
            "generation": current.generation,
            "term": current.term,
            "held_back": current.held_back,
            "writer": None if claim is None else f"host {claim.host}, pid {claim.pid}",
            "checkpoint": None if claim is None else claim.checkpoint,
            "is_running": bool(heartbeat.get("is_running")),
        }
        description = job.description(current.generation)
        facts["states"] = [
            {"name": state.name, "kind": str(state.kind), "key_format": state.format_for(job.job).text}
            for state in description.states
        ]
        numbers = job.numbers(current.generation)
        facts["epochs"] = {"first": numbers[0], "last": numbers[-1], "count": len(numbers)} if numbers else None
        facts["snapshots"] = [
            {"epoch": each.epoch, "changes": each.rows, "bytes": each.change_bytes} for each in job.snapshots(current)
        ]
        readable = readable_epochs(job)
        if readable is not None:
            first = readable.first
            facts["readable_from"] = {"epoch": first.epoch, "committed_at": iso_text(first.clock_ms)}
        newest = job.newest(current)
        if newest is not None:
            facts["last_epoch"] = {
                "committed_at": iso_text(newest.clock_ms),
                "changes": newest.rows,
                "bytes": newest.change_bytes,
            }
            facts["bytes_of_all_changes"] = newest.log_bytes
    except SparkisError as error:
        facts["error"] = str(error)
    return facts


def lines_of(facts: dict[str, Any]) -> Iterator[str]:
    """Return the lines that show the facts of a job."""
    yield f"job {facts['job']}"
    if "generation" in facts:
        held_back = f"; {facts['held_back']} is held back" if facts["held_back"] else ""
        yield f"  generation  {facts['generation']}, term {facts['term']}{held_back}"
        runs = "running at its last heartbeat" if facts["is_running"] else "stopped, or without heartbeats"
        yield f"  writer      {facts['writer'] or 'unknown'}: {runs}"
        if facts["checkpoint"]:
            yield f"  checkpoint  {facts['checkpoint']}"
    for state in facts.get("states", ()):
        yield f"  state       {state['name']}, {state['kind']}, {state['key_format']}"
    if facts.get("epochs"):
        yield f"  epochs      {facts['epochs']['first']} to {facts['epochs']['last']}"
    if "readable_from" in facts:
        yield f"  readable    from epoch {facts['readable_from']['epoch']} on, {facts['readable_from']['committed_at']}"
    if "last_epoch" in facts:
        last = facts["last_epoch"]
        yield f"  all changes {facts['bytes_of_all_changes']} bytes since the beginning of the log"
        yield f"  last epoch  {last['committed_at']}, {last['changes']} changes in {last['bytes']} bytes"
    for snapshot in facts.get("snapshots", ()):
        yield f"  snapshot    epoch {snapshot['epoch']}, {snapshot['changes']} changes in {snapshot['bytes']} bytes"
    if "error" in facts:
        yield f"  error       {facts['error']}"
