"""The log of a registry, and what it says about reports: whether a state server serves this log or another one.

A path can lead to another log than meant: an unmounted folder, an old copy, a leftover server. Half of the keys would
have the values of the other log. So a registry refuses a server whose log has another identity (see
`state_backend.log.identity`), whose epoch has another digest than the same epoch of this log, or of another server.
A server that only lags behind contradicts nothing.

`read` reads the storage, in a thread. `refusal` only compares, on the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from resp_server.registry.report import Report
from resp_server.serving.applier_process import Visible
from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.filesystems import Filesystem
from state_backend.log.identity import identity_of
from state_backend.model.errors import LogCorruptError, NewerFormatError

# How long a server may not have found an identity that this registry has found: jobs in an object store are listed once
# a minute, and what a client of NFS knows of a folder may be as old.
UNSEEN_S_MAX = 120.0
# The time of one call of `read` for epochs; the next call goes on.
COMPARE_S_MAX = 1.0
# The storage may hang: a server is not kept waiting for longer.
AWAITED_S_MAX = 2.0
# Outcomes that are remembered: one for each server, job and term.
COMPARED_MAX = 100_000
# Epochs of a job that are remembered, to compare servers with each other: servers are rarely further apart (guess).
EPOCHS_MAX = 16

ADVICE = "give the server the registry's log with --log, or end it"


class _Witness(NamedTuple):
    """The first report of a server, with which others are compared."""

    value: int | str
    server: str
    address: str
    log: str


class _Outcome(NamedTuple):
    """How a server's epoch compares with this log.

    Args:
        contradiction: Empty for none.
        is_ahead: This log does not have the epoch. Storage may show it here later than to the server, so a server that
            agreed with this log before is not refused at once.
    """

    contradiction: str
    is_ahead: bool = False
    since_s: float = 0.0


SAME = _Outcome("")
# This log no longer has the epoch, or does not have the job.
UNKNOWN = SAME._replace(since_s=-1.0)


class OwnLog:
    """The registry's log, and what servers reported about theirs."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self._log = ChangeLog(filesystem)
        self._identity: str | None = None
        self._is_read = False
        self._may_be_unseen_until_s = 0.0
        # What was compared of a server, by (server, job, generation, term).
        self._compared: dict[tuple[str, str, str, int], _Outcome] = {}
        self._awaited: dict[tuple[str, str, str, int], float] = {}  # since when
        self._verified: set[tuple[str, str]] = set()  # servers, and jobs of which they had an epoch of this log
        # By job: the identity of its log, and the digests of its last epochs.
        self._identities: dict[str, _Witness] = {}
        self._digests: dict[str, dict[tuple[str, int, int], _Witness]] = {}

    @property
    def identity(self) -> str | None:
        """The identity of the log when it was last read; None: it had none."""
        return self._identity

    def read(self, reports: Iterable[Report]) -> None:
        """Read the identity, and the epochs of reports that were not compared yet; LogError. Blocks."""
        # No program removes an identity: without it, the folder that was mounted there is away.
        found = identity_of(self._filesystem) or self._identity
        if found != self._identity:
            if self._is_read:
                self._may_be_unseen_until_s = time.monotonic() + UNSEEN_S_MAX
            self._identity = found
            self._forget()
        self._is_read = True
        if len(self._compared) > COMPARED_MAX:
            self._forget()
        outcomes: dict[tuple[str, Visible], _Outcome] = {}
        ends_s = time.monotonic() + COMPARE_S_MAX
        for report in reports:
            for job, seen in self._own_jobs(report):
                place = (report.id, job, seen.generation, seen.term)
                # A contradiction is checked again: the server may have the right log by now.
                before = self._compared.get(place)
                if before == SAME or time.monotonic() > ends_s:
                    continue
                if (job, seen) not in outcomes:
                    outcomes[job, seen] = self._compare(job, seen)
                outcome = outcomes[job, seen]
                if before is not None and outcome.is_ahead:
                    outcome = outcome._replace(since_s=before.since_s)
                if outcome == SAME:
                    self._verified.add((report.id, job))
                self._compared[place] = outcome

    def awaits(self, report: Report) -> bool:
        """Return whether a job of a server is to be compared with this log by the next `read`, for a limited time."""
        now_s, is_awaited = time.monotonic(), False
        for job, seen in self._own_jobs(report):
            place = (report.id, job, seen.generation, seen.term)
            if place not in self._compared:
                is_awaited |= now_s < self._awaited.setdefault(place, now_s) + AWAITED_S_MAX
        return is_awaited

    def _forget(self) -> None:
        self._awaited.clear()
        self._compared.clear()
        self._verified.clear()

    def refusal(self, report: Report, is_member: Callable[[str], bool]) -> str:
        """Return why a server cannot be a member; empty: it can, and servers are compared with it from now on."""
        server = f"server {report.id[:8]} at {report.address}"
        identities = list(report.logs.values())
        if self._identity and identities and self._identity not in identities and None not in identities:
            if all(identities):
                return self._of_another_identity(server, report)
            if time.monotonic() >= self._may_be_unseen_until_s:
                return self._of_no_identity(server, report)
        for job, seen in self._own_jobs(report):
            outcome = self._compared.get((report.id, job, seen.generation, seen.term), SAME)
            is_tolerated = outcome.is_ahead and (report.id, job) in self._verified
            if is_tolerated and time.monotonic() < outcome.since_s + UNSEEN_S_MAX:
                continue
            if outcome.contradiction:
                return f"{server} serves another log than this registry's: {outcome.contradiction}; {ADVICE}"
        for job, seen in report.jobs.items():
            if difference := self._compare_servers(report, job, seen, is_member):
                return f"{server} {difference}"
        return ""

    def _compare_servers(self, report: Report, job: str, seen: Visible, is_member: Callable[[str], bool]) -> str:
        """Return how a server contradicts a member about a job; empty if it does not."""

        def contradicted(value: int | str, first: _Witness) -> bool:
            return first.value != value and first.server != report.id and is_member(first.server)

        def witness(value: int | str) -> _Witness:
            return _Witness(value, report.id, report.address, seen.log)

        if identity := report.logs.get(seen.log):
            first = self._identities.setdefault(job, witness(identity))
            if contradicted(identity, first):
                return (
                    f"serves job {job!r} from the log {seen.log} with the identity {identity}; server "
                    f"{first.server[:8]} at {first.address} serves it from {first.log} with {first.value}. Give both "
                    f"the same logs"
                )
            if first.value != identity:
                self._identities[job] = witness(identity)
        if seen.digest is not None:
            digests, epoch = self._digests.setdefault(job, {}), (seen.generation, seen.term, seen.epoch)
            first = digests.setdefault(epoch, witness(seen.digest))
            if contradicted(seen.digest, first):
                return (
                    f"has epoch {seen.epoch} of job {job!r}, term {seen.term}, with the digest {seen.digest}, from the "
                    f"log {seen.log}; server {first.server[:8]} at {first.address} has it with {first.value}, from "
                    f"{first.log}. Was a copy of the log written? End the servers of the copy"
                )
            if first.value != seen.digest:
                digests[epoch] = witness(seen.digest)
            while len(digests) > EPOCHS_MAX:
                del digests[next(iter(digests))]
        return ""

    def _of_another_identity(self, server: str, report: Report) -> str:
        logs = ", ".join(f"the log {root} with the identity {of}" for root, of in report.logs.items())
        return f"{server} serves {logs}; this registry's log {self._filesystem.root} has {self._identity}: {ADVICE}"

    def _of_no_identity(self, server: str, report: Report) -> str:
        root = next(root for root, of in report.logs.items() if not of)
        return (
            f"{server} serves the log {root}, which has no identity (log.json); this registry's log "
            f"{self._filesystem.root} has {self._identity}. Is the server's storage mounted? If it is, {ADVICE}"
        )

    def _own_jobs(self, report: Report) -> Iterator[tuple[str, Visible]]:
        """Iterate over the jobs of a report that are those of this log, as far as the report tells."""
        for job, seen in report.jobs.items():
            identity = report.logs.get(seen.log)
            if identity and self._identity:
                is_own = identity == self._identity
            else:
                is_own = len(report.logs) < 2 or seen.log == self._filesystem.root
            if is_own and seen.epoch >= 0:
                yield job, seen

    def _compare(self, job: str, seen: Visible) -> _Outcome:
        """Compare an epoch with this log's."""
        log = self._log.job(job)
        try:
            epoch = log.epoch(CurrentGeneration(seen.generation, seen.term), seen.epoch)
            if epoch is None:
                return self._compare_terms(log, seen)
        except (LogCorruptError, NewerFormatError):
            return UNKNOWN  # the servers report the damage
        where = f"epoch {seen.epoch} of job {job!r}, generation {seen.generation}, has"
        root = self._filesystem.root
        if epoch.term != seen.term:
            return _Outcome(f"{where} the term {seen.term} there, and {epoch.term} in {root}")
        if seen.digest not in (None, epoch.digest):
            return _Outcome(f"{where} the digest {seen.digest} there, and {epoch.digest} in {root}")
        return SAME

    def _compare_terms(self, log: JobLog, seen: Visible) -> _Outcome:
        """Compare an epoch that this log does not have: it was swept, the server is ahead, or has another log."""
        root, newest, term = self._filesystem.root, log.terms.newest(), log.terms.read(seen.term)
        if term is not None and term.generation not in ("", seen.generation):
            return _Outcome(
                f"term {seen.term} of job {log.job!r} began the generation {seen.generation} there, and "
                f"{term.generation} in {root}"
            )
        if newest is None or newest.term > seen.term:
            return UNKNOWN
        if newest.term == seen.term and seen.epoch <= max(log.numbers(seen.generation), default=-1):
            return UNKNOWN
        return _Outcome(
            f"{root} does not have epoch {seen.epoch}, term {seen.term}, of job {log.job!r} (was a copy of "
            f"the log written?)",
            is_ahead=True,
            since_s=time.monotonic(),
        )
