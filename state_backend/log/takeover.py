"""How a writer takes a job over: it claims the next term, voids older terms that never began, and begins (see `terms`).

    claim   the first of several writers gets the term. From then on commits of older writers are not acknowledged
    seal    older terms that have not begun become void, so that no older term can begin later
    begin   the term is in charge for readers; fails if a newer writer has sealed it

Each is a create-if-absent of one file (`seal`: one for each term), so a writer can be stopped between any two of them,
for an hour or for ever.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

from state_backend.log.terms import Claim, Term, Terms
from state_backend.model.clock import now_ms
from state_backend.model.errors import FencedWriterError, JobInUseError

# A writer that misses so many signs of life has stopped (guess).
BEATS_MISSED = 3
POLL_INTERVAL_S = 0.1


def this_process(query_id: str, checkpoint: str = "", beats_every_s: float = 0.0) -> Claim:
    """Return the claim of a new writer in this process, still without a term."""
    return Claim(0, uuid.uuid4().hex, query_id, checkpoint, socket.gethostname(), os.getpid(), now_ms(), beats_every_s)


def claim(terms: Terms, who: Claim, *, is_forced: bool = False) -> Claim:
    """Claim the next term; JobInUseError if another query's writer has the last one and is alive.

    The same query on the same checkpoint takes over at once; any query does if `is_forced`.
    """
    for folder in ("terms", "alive"):
        terms.filesystem.make_folder(f"{terms.job}/{folder}")
    while True:
        held = terms.last_claim()
        if held is not None and not is_forced and not _is_same_query(held, who):
            _check_not_alive(terms, held)
        mine = replace(who, term=held.term + 1 if held else 1)
        if terms.filesystem.create(terms.claim_path(mine.term), mine.to_bytes()):
            return mine


def succeed(terms: Terms, claimed: Claim) -> Claim:
    """Claim the next term for the same writer; FencedWriterError if another writer has it."""
    mine = replace(claimed, term=claimed.term + 1)
    if not terms.filesystem.create(terms.claim_path(mine.term), mine.to_bytes()):
        check_in_charge(terms, claimed)
    return mine


def seal(terms: Terms, claimed: Claim) -> Term | None:
    """Make all older terms void that have not begun; return the last begun one, or None.

    The result is final: no older term can begin any more.
    """
    begun = set(terms.numbers(".json"))
    for number in range(claimed.term - 1, 0, -1):
        if number not in begun:
            terms.filesystem.create(terms.path(number), Term(number, "void", claimed.writer).to_bytes())
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
            what = "dropped" if newest.renamed_to is None else f"renamed to {newest.renamed_to!r}"
            raise FencedWriterError(
                f"job {terms.job!r} in the log {terms.filesystem.root} was {what} while query {claimed.query_id} wrote "
                f"it; start the query again, under the job's new name if it was renamed"
            )
        newer = terms.last_claim() or newer
        raise FencedWriterError(
            f"job {terms.job!r} in the log {terms.filesystem.root} is now written by query {newer.query_id}, term "
            f"{newer.term} ({_place(newer)}); this writer (query {claimed.query_id}, term {claimed.term}) stops. "
            f"Two queries with one name, or two drivers on one checkpoint, cannot share a log: stop one, rename one "
            f"(queryName or job=), or give it another log"
        )


def _is_same_query(held: Claim, who: Claim) -> bool:
    return (held.query_id, held.checkpoint) == (who.query_id, who.checkpoint)


def _check_not_alive(terms: Terms, held: Claim) -> None:
    """Poll a writer's sign of life, by this process's own clock; JobInUseError if it changes."""
    if not held.beats_every_s:
        return
    ends_s = time.monotonic() + BEATS_MISSED * held.beats_every_s
    sign = terms.sign_of_life(held.term)
    while sign.get("is_running", True) and time.monotonic() < ends_s:
        time.sleep(POLL_INTERVAL_S)
        before, sign = sign, terms.sign_of_life(held.term)
        if sign != before and sign.get("is_running", True):
            raise JobInUseError(
                f"job {terms.job!r} in the log {terms.filesystem.root} is being written by query {held.query_id} "
                f"({_place(held)}). Stop that query, or give this one another name (queryName or job=) or another "
                f"log; to take the job over all the same, pass takeover=True (commands: --force)"
            )


def _place(held: Claim) -> str:
    since = datetime.fromtimestamp(held.since_ms / 1000, UTC).isoformat(timespec="seconds")
    checkpoint = f", checkpoint {held.checkpoint}" if held.checkpoint else ""
    return f"host {held.host}, pid {held.pid}, since {since}{checkpoint}"
