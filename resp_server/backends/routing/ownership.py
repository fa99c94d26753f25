"""The owners of keys, by the key formats of all states that were ever seen, persisted in a file.

A job that was stopped or removed keeps its keys: the upstream may still have old copies, and clients must not read them
again. So formats are only added, until a user releases the job.

A format that is new, after the owners are known, is checked first: if the upstream has keys of it, they stay the
upstream's until a user confirms the job. So a new job cannot hide keys that a team still uses.

    owned      the format's keys are the state's
    checking   a new format, until the upstream was searched for keys of it
    waiting    the upstream has keys of it, so the format waits for a confirmation
    ruled      a new format whose keys a rule gives to the upstream
    released   the job was released: its keys are the upstream's, until the job is confirmed

Rules come before key formats: a key that a rule covers has the owner of the rule. A rule that covers a new format
decides about it, so the job needs no confirmation.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from resp_server.backends.routing.format_patterns import covers, key_pattern
from resp_server.backends.routing.key_matcher import UPSTREAMS, Decision, KeyMatcher, OwnedFormat
from resp_server.backends.routing.rules import Owner, Rule, Rules
from resp_server.backends.routing.rules_file import RulesFile
from resp_server.protocol.errors import client_text
from state_backend.model.descriptor import KeyFormat
from state_backend.model.errors import NewerFormatError, SparkisError
from state_backend.model.formats import WRITER, check_format

logger = logging.getLogger("sparkis.proxy")

FORMAT = 1
# The number of keys that a log line, or INFO, gives as examples.
EXAMPLES_MAX = 3

# By job and state: each format that the state has had.
Formats = dict[str, dict[str, list[str]]]


class OwnershipError(Exception):
    """The file of owners is invalid, or cannot be read."""


class UnknownJobError(SparkisError):
    """No state of a job of this name was ever seen."""


class NewFormat(NamedTuple):
    """A key format that is not owned yet."""

    job: str
    state: str
    text: str


class OwnershipChange(NamedTuple):
    """The owners of keys before and after a change."""

    before: KeyMatcher
    after: KeyMatcher

    def affects(self, key: bytes) -> bool:
        """Return whether a key has another owner now, in any database."""
        before, after = self.before, self.after
        if before.aliases != after.aliases:
            return True  # clients may know the key by another name
        databases = {*before.databases, *after.databases}
        return any(before.decider(database)(key) != after.decider(database)(key) for database in databases)


class JobOwnership(NamedTuple):
    """The key formats of a job.

    Args:
        examples: Keys of the upstream for which a format waits.
    """

    job: str
    status: str
    formats: Sequence[str]
    examples: Sequence[bytes] = ()


class Ownership:
    """The owners of keys.

    Attributes:
        is_known: The formats are complete enough to say that a key is the upstream's. Before that, no key may be
            answered.
        on_new: Called with formats to check; `settle` takes the result.
        on_changed: Called after each change of owners, also the first one.
    """

    def __init__(
        self, path: Path | None = None, *, checks_new: bool = True, rules_file: RulesFile | None = None
    ) -> None:
        """Read the files, if there are any; OwnershipError, RulesError.

        Args:
            path: The file of owners; None: nothing is persisted.
        """
        self._path = path
        self._checks_new = checks_new
        self.rules_file = rules_file
        self.rules: Rules = () if rules_file is None else rules_file.read()
        self._formats: Formats = {}
        self._released: set[str] = set()
        # The keys that the upstream has of each new format; None: it is being checked. Rules may decide instead.
        self._new: dict[NewFormat, Sequence[bytes] | None] = {}
        self._use_matcher(self._compiled())
        self.is_known = False
        self.error = ""
        self.on_new: Callable[[Sequence[NewFormat]], None] = lambda formats: None
        self.on_changed: Callable[[OwnershipChange], None] = lambda change: None
        if path is not None and path.exists():
            self._formats, self._released = _read(path)
            self._use_matcher(self._compiled())
            self.is_known = True

    @property
    def count(self) -> int:
        """The number of owned key formats."""
        return self.matcher.format_count

    def owner_of(self, key: bytes) -> str | None:
        """Return the state that owns a key, as `job:state`; None: the upstream owns it."""
        return self.matcher.owner_of(key)

    def owner_text(self, key: bytes, database: int = 0) -> str:
        """Return the owner of a key for messages."""
        return self.matcher.owner_text(key, database)

    def take_rules(self, rules: Rules) -> None:
        """Take other rules. New formats that a rule decided about, and none does any more, are checked."""
        were_ruled = {each for each in self._new if self._rule_of(each) is not None}
        self.rules = rules
        unchecked = [each for each in were_ruled if self._rule_of(each) is None]
        self._new |= dict.fromkeys(unchecked)
        given = [each for each in self._new if self._is_given_to_state(each)]
        if given:
            self._own(given)
        else:
            self._recompile()
        if unchecked:
            self.on_new(unchecked)

    def learn(self, formats: Mapping[str, Mapping[str, str]]) -> None:
        """Take the key formats of jobs' states: new ones are checked, or are written to the file before they count."""
        new = [
            NewFormat(job, state, text)
            for job, states in formats.items()
            for state, text in states.items()
            if text not in self._formats.get(job, {}).get(state, ())
        ]
        for each in new:
            KeyFormat.parse(each.text)  # raises before anything is changed
        released = [each for each in new if each.job in self._released]
        if released:  # a confirmation gives them to the states
            self._add(released)
            self._write()
        new = [each for each in new if each.job not in self._released]
        if self.is_known and self._checks_new:
            given = [each for each in new if self._is_given_to_state(each)]
            if given:
                self._own(given)
            unknown = [each for each in new if each not in self._new and each not in given]
            self._new |= dict.fromkeys(unknown)
            unchecked = [each for each in unknown if self._rule_of(each) is None]
            if unchecked:
                self.on_new(unchecked)
        elif new:
            self._own(new)

    def settle(self, new: NewFormat, found: Sequence[bytes]) -> None:
        """Take the keys of a new format that the upstream has: without any, the format is owned from now on."""
        if new not in self._new or self._rule_of(new) is not None:
            return  # confirmed, released or ruled meanwhile
        if not found:
            self._own([new])
            return
        if self._new[new] is None:
            logger.warning(
                "the state %s:%s is new, and the upstream has keys %s, such as %s: they stay the upstream's; to read "
                "the state instead: sparkis confirm %s",
                *(new.job, new.state, new.text, _listed(found), new.job),
            )
        self._new[new] = found

    def is_in_question(self, new: NewFormat) -> Callable[[bytes], bool]:
        """Return a function that tells whether a key of the upstream would change its owner if a format were owned."""
        fits = re.compile(key_pattern(KeyFormat.parse(new.text)), re.DOTALL).match
        return lambda key: fits(key) is not None and self.decide(key) == UPSTREAMS

    def confirm(self, job: str) -> Sequence[str]:
        """Give the keys of a waiting or released job to its states; return the formats; UnknownJobError."""
        new = [each for each in self._new if each.job == job]
        self._check_job(job)
        self._released.discard(job)
        self._own(new)
        return self._formats_of(job)

    def release(self, job: str) -> Sequence[str]:
        """Give a job's keys back to the upstream, until it is confirmed; return the formats; UnknownJobError."""
        self._check_job(job)
        self._add([each for each in self._new if each.job == job])
        self._released.add(job)
        logger.info("job %s is released: its keys %s belong to the upstream", job, ", ".join(self._formats_of(job)))
        self._change()
        return self._formats_of(job)

    def complete(self) -> None:
        """Declare the formats complete: all servers have reported their jobs, or the logs of all jobs were read."""
        if not self.is_known:
            self.is_known = True
            self._write()

    def jobs(self) -> Sequence[JobOwnership]:
        """Return the jobs with their key formats, by name; a job with new formats stands twice."""
        rows = [
            JobOwnership(job, "released" if job in self._released else "owned", self._formats_of(job))
            for job in {*self._formats, *self._released}
        ]
        new: dict[tuple[str, str], list[NewFormat]] = {}
        for each in self._new:
            new.setdefault((each.job, self._status_of(each)), []).append(each)
        for (job, status), formats in new.items():
            row = JobOwnership(job, status, [each.text for each in formats])
            if status == "waiting":
                row = row._replace(examples=[key for each in formats for key in self._new[each] or ()][:EXAMPLES_MAX])
            rows.append(row)
        return sorted(rows, key=lambda row: (row.job, row.status))

    def formats(self) -> Sequence[str]:
        """Return the key formats of all states that were ever seen."""
        owned = [text for states in self._formats.values() for texts in states.values() for text in texts]
        return [*owned, *(each.text for each in self._new)]

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""
        rows = self.jobs()
        return {
            "owned_key_formats": self.count,
            "ownership_known": int(self.is_known),
            "ownership_rules": len(self.rules),
            "ownership_waiting": ",".join(row.job for row in rows if row.status == "waiting"),
            "ownership_checking": ",".join(row.job for row in rows if row.status == "checking"),
            "ownership_released": ",".join(row.job for row in rows if row.status == "released"),
            "ownership_error": self.error,
        }

    def _rule_of(self, new: NewFormat) -> Rule | None:
        """Return the first rule that covers all keys of a new format."""
        key_format = KeyFormat.parse(new.text)
        deciding = (rule for rule in self.rules if not rule.database or rule.has_state_keys)
        return next((rule for rule in deciding if covers(rule.keys, key_format)), None)

    def _is_given_to_state(self, new: NewFormat) -> bool:
        rule = self._rule_of(new)
        return rule is not None and rule.owner is Owner.STATE

    def _status_of(self, new: NewFormat) -> str:
        if self._rule_of(new) is not None:
            return "ruled"
        return "checking" if self._new[new] is None else "waiting"

    def _check_job(self, job: str) -> None:
        known = {row.job for row in self.jobs()}
        if job not in known:
            raise UnknownJobError(
                f"no such job '{client_text(job.encode())}'; jobs: {', '.join(sorted(known)) or 'none'}"
            )

    def _formats_of(self, job: str) -> Sequence[str]:
        return [text for _, texts in sorted(self._formats.get(job, {}).items()) for text in texts]

    def _own(self, new: Sequence[NewFormat]) -> None:
        for job, state, text in new:
            logger.info("the keys %s belong to the state %s:%s from now on", text, job, state)
        self._add(new)
        self._change()

    def _add(self, new: Sequence[NewFormat]) -> None:
        for job, state, text in new:
            self._formats.setdefault(job, {}).setdefault(state, []).append(text)
        self._new = {each: found for each, found in self._new.items() if each not in new}

    def _change(self) -> None:
        """Write the file, then apply the change."""
        self._write()
        self._recompile()

    def _recompile(self) -> None:
        before = self.matcher
        self._use_matcher(self._compiled())
        self.on_changed(OwnershipChange(before, self.matcher))

    def _use_matcher(self, matcher: KeyMatcher) -> None:
        self.matcher = matcher
        # On the path of each request.
        self.decide: Callable[[bytes], Decision] = matcher.decide

    def _write(self) -> None:
        # A file alone makes a restarted proxy ready, so there is none before the formats are complete.
        if self._path is None or not self.is_known:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        content = {"format": FORMAT, **WRITER, "jobs": self._formats, "released": sorted(self._released)}
        try:
            with open(new, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
            self.error = ""
        except OSError as error:  # the owners apply, although the file lacks them; INFO and the log say so
            self.error = str(error)
            logger.error("the owners of keys cannot be written to %s: %s", self._path, error)

    def _compiled(self) -> KeyMatcher:
        return KeyMatcher(
            [
                OwnedFormat(text, f"{job}:{state}")
                for job, states in self._formats.items()
                for state, texts in states.items()
                for text in texts
                if job not in self._released
            ],
            self.rules,
        )


def _listed(keys: Sequence[bytes]) -> str:
    return ", ".join(f"'{client_text(key)}'" for key in keys[:EXAMPLES_MAX])


def _read(path: Path) -> tuple[Formats, set[str]]:
    try:
        found = json.loads(path.read_text("utf-8"))
        check_format(found, FORMAT, path)
        formats: Formats = found["jobs"]
        for states in formats.values():
            for texts in states.values():
                for text in texts:
                    KeyFormat.parse(text)
        return formats, {str(job) for job in found["released"]}
    except NewerFormatError as error:
        raise OwnershipError(str(error)) from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, SparkisError) as error:
        raise OwnershipError(f"{path} is no file of key owners: {error}") from None
