"""How a writer takes a job over: it claims the next term, voids older terms that never began, and begins (see `terms`).

    claim   the first of several writers gets the term. From then on the commits of older writers fail
    seal    older terms that have not begun become void, so that no older term can begin later
    begin   the term is in charge for readers; fails if a newer writer has sealed it

Each creates one file if it does not exist (`seal`: one file for each older term). So a writer can pause between any two
of them, for an hour or for ever.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

from state_backend.log.identity import ensure_identity
from state_backend.log.terms import Claim, Term, TermReason, Terms
from state_backend.model.clock import now_ms
from state_backend.model.errors import FencedWriterError, JobInUseError

# A writer counts as stopped after so many missed heartbeats (guess).
HEARTBEATS_MISSED_MAX = 3
POLL_INTERVAL_S = 0.1


def new_candidate(query_id: str, checkpoint: str = "", heartbeat_interval_s: float = 0.0) -> Claim:
    """Return the claim of a new writer in this process, without a term; `claim` sets the term."""
    return Claim(
        0, uuid.uuid4().hex, query_id, checkpoint, socket.gethostname(), os.getpid(), now_ms(), heartbeat_interval_s
    )


def claim(terms: Terms, candidate: Claim, *, is_forced: bool = False) -> Claim:
    """Claim the next term; JobInUseError if another query's writer has the last one and is alive.

    The same query on the same checkpoint takes over at once; any query does if `is_forced`.
    """
    for folder in ("terms", "heartbeats"):
        terms.filesystem.make_folder(f"{terms.job}/{folder}")
    ensure_identity(terms.filesystem)
    while True:
        last = terms.last_claim()
        if last is not None and not is_forced and not _is_same_query(last, candidate):
            _check_not_alive(terms, last)
        mine = replace(candidate, term=last.term + 1 if last else 1)
        if terms.filesystem.create(terms.claim_path(mine.term), mine.to_bytes()):
            return mine


def succeed(terms: Terms, claimed: Claim) -> Claim:
    """Claim the next term for the same writer; FencedWriterError if another writer has it."""
    mine = replace(claimed, term=claimed.term + 1)
    if not terms.filesystem.create(terms.claim_path(mine.term), mine.to_bytes()):
        check_in_charge(terms, claimed)
    return mine


def seal(terms: Terms, claimed: Claim) -> Term | None:
    """Make all older terms void that have not begun; return the last term that has begun, or None.

    The result is final: no older term can begin any more.
    """
    begun = set(terms.numbers(".json"))
    for number in range(claimed.term - 1, 0, -1):
        if number not in begun:
            terms.filesystem.create(terms.path(number), Term(number, TermReason.VOID, claimed.writer).to_bytes())
    return terms.last_before(claimed.term)


def begin(terms: Terms, term: Term, claimed: Claim) -> None:
    """Put a term in charge; FencedWriterError if a newer writer has sealed it."""
    if not terms.filesystem.create(terms.path(term.term), term.to_bytes()):
        check_in_charge(terms, claimed)


def check_in_charge(terms: Terms, claimed: Claim) -> None:
    """Raise FencedWriterError if another writer has a newer claim."""
    newer = terms.claim(claimed.term + 1)
    if newer is not None and newer.writer != claimed.writer:
        newest = terms.newest()
        if newest is not None and newest.is_dropped:
            change = "dropped" if newest.renamed_to is None else f"renamed to {newest.renamed_to!r}"
            raise FencedWriterError(
                f"job {terms.job!r} in the log {terms.filesystem.root} was {change} while query {claimed.query_id} "
                f"wrote it; start the query again, under the job's new name if it was renamed"
            )
        newer = terms.last_claim() or newer
        raise FencedWriterError(
            f"job {terms.job!r} in the log {terms.filesystem.root} is now written by query {newer.query_id}, term "
            f"{newer.term} ({_process_text(newer)}); this writer (query {claimed.query_id}, term {claimed.term}) "
            f"stops. Two queries with one name, or two drivers on one checkpoint, cannot share a log: stop one, rename "
            f"one (queryName or job=), or give it another log"
        )


def _is_same_query(last: Claim, candidate: Claim) -> bool:
    return (last.query_id, last.checkpoint) == (candidate.query_id, candidate.checkpoint)


def _check_not_alive(terms: Terms, last: Claim) -> None:
    """Wait until a writer has missed enough heartbeats, by this process's clock; JobInUseError if one comes.

    A pause between two looks counts as one interval at most: a paused machine pauses the writer, too.
    """
    interval_s, waited_s = last.heartbeat_interval_s, 0.0
    if not interval_s:
        return
    heartbeat = terms.heartbeat(last.term)
    while heartbeat.get("is_running", True) and waited_s < HEARTBEATS_MISSED_MAX * interval_s:
        looked_s = time.monotonic()
        time.sleep(POLL_INTERVAL_S)
        before, heartbeat = heartbeat, terms.heartbeat(last.term)
        waited_s += min(time.monotonic() - looked_s, interval_s)
        if heartbeat != before and heartbeat.get("is_running", True):
            raise JobInUseError(
                f"job {terms.job!r} in the log {terms.filesystem.root} is being written by query {last.query_id} "
                f"({_process_text(last)}). Stop that query, or give this one another name (queryName or job=) or "
                f"another log; to take the job over anyway, pass takeover=True (commands: --force)"
            )


def _process_text(claimed: Claim) -> str:
    since = datetime.fromtimestamp(claimed.since_ms / 1000, UTC).isoformat(timespec="seconds")
    checkpoint = f", checkpoint {claimed.checkpoint}" if claimed.checkpoint else ""
    return f"host {claimed.host}, pid {claimed.pid}, since {since}{checkpoint}"
