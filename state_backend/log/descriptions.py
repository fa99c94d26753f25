"""The description of a job's states for the next term of its query, after that of the term before (see `evolution`)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from state_backend.log.change_log import ChangeLog, JobLog
from state_backend.log.evolution import check_evolution
from state_backend.log.terms import Description, Term
from state_backend.model.errors import DescriptorError, LogCorruptError, NewerFormatError

logger = logging.getLogger("sparkis.log")


def next_description(log: JobLog, base: Term | None, mine: Description, *, rewrites_states: bool) -> Description:
    """Return the description for a new term: that of the query's last term, or a new version.

    Args:
        base: The query's last term; None if the query begins.
        rewrites_states: Whether an epoch has the full content of each state that it changes.
    """
    if base is None or base.description is None:
        return mine
    theirs = base.description
    is_completed = rewrites_states and theirs.incomplete
    if (theirs.states, theirs.source) == (mine.states, mine.source) and not is_completed:
        return theirs
    for note in check_description(theirs, mine, rewrites_states=rewrites_states):
        logger.warning("job %s: %s", mine.job, note)
    names = {state.name for state in mine.states}
    return replace(
        mine,
        version=theirs.version + 1,
        dropped=tuple(state for state in theirs.all_states if state.name not in names),
        incomplete=() if rewrites_states else _incomplete_states(log, base.generation, theirs, mine),
        renamed_from=theirs.renamed_from,
    )


def check_description(theirs: Description, mine: Description, *, rewrites_states: bool) -> list[str]:
    """Return notes for the user about changed states; DescriptorError for a change that is refused."""
    return check_evolution(mine.job, theirs.states, theirs.all_states, mine.states, rewrites_states=rewrites_states)


def _incomplete_states(log: JobLog, generation: str, before: Description, mine: Description) -> tuple[str, ...]:
    """Return the states that began in the middle of the query; warn about new ones, except sparkis' own."""
    if not log.numbers(generation):
        return ()
    old = {state.name for state in before.states}
    new = [state.name for state in mine.states if state.name not in old and not state.name.startswith("_")]
    for name in new:
        logger.warning(
            "job %s: the state %r begins in the middle of the query: keys that do not change from now on are "
            "missing in it; start the query with a new checkpoint to have them all",
            mine.job,
            name,
        )
    return tuple(state.name for state in mine.states if state.name in new or state.name in before.incomplete)


def check_not_renamed(log: JobLog, before: Term | None, query_id: str, siblings: Collection[str]) -> None:
    """Raise DescriptorError if the log has the query's state under another job's name: the query was renamed.

    If this job has no epoch of the query, the terms of every other job are read.

    Args:
        siblings: The writers of other jobs that the same run of the query publishes.
    """
    if before is not None and log.numbers(before.generation):
        return
    job, root = log.job, log.filesystem.root
    whole_log = ChangeLog(log.filesystem)
    for name in whole_log.jobs():
        other = whole_log.job(name)
        try:
            current = other.current()
        except (LogCorruptError, NewerFormatError):
            continue  # another job's damage is no error of this job
        description = current.description if current is not None else None
        if name == job or description is None or description.query_id != query_id:
            continue
        assert current is not None
        if current.writer not in siblings and other.numbers(current.generation):
            raise DescriptorError(
                f"job {job!r} would begin in the middle of its query: the log {root} has the query's state as job "
                f"{name!r}. If the query was renamed, run: sparkis rename --log {root} {name} {job}. If it is another "
                f"query, start it with another checkpoint or another log"
            )
