"""The key formats of a state cluster's jobs, as its servers report them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from resp_server.session.epochs import REMOVED, JobEpoch
from state_backend.model.descriptor import KeyFormat
from state_backend.store.keyspace import UNREADABLE


class JobKeys:
    """The jobs of one state cluster. A job's name is known when a server announces it, its key formats soon after.

    A job has the keys `job:...`, and the keys of its states' key formats. The formats are not complete while a server
    reports a job that it cannot read: its keys are unknown.
    """

    def __init__(self) -> None:
        self._terms: dict[str, int] = {}  # by job
        self._formats: dict[str, Sequence[KeyFormat]] = {}
        self._format_terms: dict[str, int] = {}  # the term at which each job's formats were reported
        self._pattern: re.Pattern[bytes] | None = None
        self._pattern_jobs: list[str] = []
        self.has_formats = False

    @property
    def names(self) -> Sequence[str]:
        """The names of all jobs."""
        return list(self._terms)

    @property
    def is_complete(self) -> bool:
        """Return whether the key formats of all jobs are known."""
        return self.has_formats and self._terms.items() <= self._format_terms.items()

    def epoch_reported(self, job: str, reached: JobEpoch) -> bool:
        """Handle a server's report of a job's epoch; return whether the job's key formats have to be requested."""
        if reached == REMOVED:
            if self._terms.get(job) == UNREADABLE[0] and job not in self._format_terms:
                self.remove(job)  # no client has seen an epoch of it
            return False
        if reached[0] <= self._terms.get(job, -1):
            return False
        self._terms[job] = reached[0]
        return True

    def set_formats(self, formats: Mapping[str, Sequence[str]]) -> None:
        """Set the key formats of one server's jobs."""
        self.has_formats = True
        for job, texts in formats.items():
            self._formats[job] = [KeyFormat.parse(text) for text in texts]
            self._format_terms[job] = self._terms.setdefault(job, 0)
        self._compile()

    def remove(self, job: str) -> None:
        """Remove a job."""
        for by_job in (self._terms, self._formats, self._format_terms):
            by_job.pop(job, None)
        self._compile()

    def _compile(self) -> None:
        rows = [
            (job, key_format)
            for job, formats in self._formats.items()
            for key_format in formats
            if not key_format.prefix.startswith(f"{job}:".encode())
        ]
        groups = [b"(" + key_format.pattern() + b")" for _, key_format in rows]
        self._pattern = re.compile(b"|".join(groups), re.DOTALL) if groups else None
        self._pattern_jobs = [job for job, _ in rows]

    def job_of(self, key: bytes) -> str | None:
        """Return the job of this state cluster that a key belongs to, or None."""
        head, colon, _ = key.partition(b":")
        name = head.decode("utf-8", "replace")
        if colon and name in self._terms:
            return name
        match = self._pattern.match(key) if self._pattern is not None else None
        return self._pattern_jobs[match.lastindex - 1] if match and match.lastindex else None
