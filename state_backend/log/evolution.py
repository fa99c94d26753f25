"""The rules for changes of a job's states between two starts of its query with the same checkpoint.

    added      the state begins with the keys that change from then on
    left out   the next epoch removes the state's keys
    changed    allowed if the keys stay the same, and no value mixes two meanings. Old values stay until their key
               changes; a note says so if clients can see the difference
    refused    DescriptorError: another kind, other keys or fields, another reduction; or a probable rename

Pure functions: no files are read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from state_backend.codec.reductions import Reduction, reduction_of
from state_backend.model.descriptor import PLACEHOLDER, Reduce, StateDescriptor
from state_backend.model.errors import DescriptorError

# A key column may change between these types: equal values have equal texts, so the keys stay the same.
SAME_TEXT = re.compile(r"tinyint|smallint|int|bigint|string.*|char\(.*|varchar\(.*")

# Columns of these types have the same orders.
INTEGERS = ("tinyint", "smallint", "int", "bigint")

REMEDY = (
    "give the state another name (then the old keys are removed, and the new state has the keys that change from now "
    "on), or start the query with a new checkpoint"
)


def check_evolution(
    job: str,
    before: Sequence[StateDescriptor],
    ever: Sequence[StateDescriptor],
    now: Sequence[StateDescriptor],
    *,
    rewrites_states: bool = False,
) -> list[str]:
    """Return notes for the user about changed states; DescriptorError for a change that is refused.

    All are as the log stores them (`StateDescriptor.for_job`).

    Args:
        ever: `before` and the states that were left out earlier.
        rewrites_states: Each state is written again in full, so that no old keys remain.
    """
    names = {state.name for state in now}
    old = {state.name: state for state in ever}
    for state in now:
        if state.name in old:
            _check_same(job, old[state.name], state, rewrites_states=rewrites_states)
    removed = [state for state in before if state.name not in names]
    for state in now:
        if state.name not in old and not rewrites_states:
            _check_no_rename(job, state, removed)
    notes = [f"the state {state.name!r} is left out, and its keys are removed" for state in removed]
    current = {state.name: state for state in before}
    for state in now:
        if state.name in current and not rewrites_states:
            notes += (f"the state {state.name!r}: {note}" for note in _notes(current[state.name], state))
    return notes


def _check_same(job: str, before: StateDescriptor, now: StateDescriptor, *, rewrites_states: bool) -> None:
    """Refuse changes after which some old keys or fields would never be written again, or values mix two meanings."""
    changes = [
        f"{part} was {_quoted(old)} in this log and is now {_quoted(new)}"
        for part, old, new in (
            ("its kind", before.kind, now.kind),
            ("its key", before.key_format, now.key_format),
            ("its field", before.field, now.field),
            ("its member", before.member, now.member),
            ("its time_format", before.time_format, now.time_format),
        )
        if old != new and not (rewrites_states and part in ("its field", "its member", "its time_format"))
    ]
    if not changes and _reduction(before) != _reduction(now):
        changes.append(f"its reduction was {_reduction_text(before)} in this log and is now {_reduction_text(now)}")
    if not changes and (before.by, before.by_columns, _types(before)) != (now.by, now.by_columns, _types(now)):
        changes.append(f"its order was {_order_text(before)} in this log and is now {_order_text(now)}")
    named = (
        () if rewrites_states else (*PLACEHOLDER.findall(now.key_format or ""), *filter(None, [now.field, now.member]))
    )
    for column in named:
        old, new = before.columns.get(column), now.columns.get(column)
        if old is None or new is None or old == new or (SAME_TEXT.fullmatch(old) and SAME_TEXT.fullmatch(new)):
            continue
        changes.append(f"the type of its column {column!r} was {old} in this log and is now {new}, with other keys")
    if changes:
        raise DescriptorError(f"job {job!r}: the state {now.name!r} has changed: {'; '.join(changes)}; {REMEDY}")


def _check_no_rename(job: str, state: StateDescriptor, removed: Sequence[StateDescriptor]) -> None:
    """Refuse a new state that looks like a renamed one: the keys of the old name would be lost without an error."""
    for other in removed:
        if _without_name(other, job) == _without_name(state, job):
            raise DescriptorError(
                f"job {job!r}: the state {other.name!r} is now called {state.name!r}, and its keys contain its name: "
                f"they would all be removed, and keys that do not change would be missing under the new name. Keep the "
                f"name {other.name!r}; or start the query with a new checkpoint; or, to begin {state.name!r} with the "
                f"keys that change from now on, run one micro-batch with neither state first"
            )


def _without_name(state: StateDescriptor, job: str) -> StateDescriptor:
    """Return a state without its name, to compare it with another."""
    prefix = f"{job}:{state.name}:"
    form = state.key_format or ""
    return replace(state, name="_", key_format=form.replace(prefix, "_", 1) if form.startswith(prefix) else form)


def _notes(before: StateDescriptor, now: StateDescriptor) -> Iterator[str]:
    """Iterate over the differences between values written before and values written now."""
    if before.value != now.value:
        yield (
            f"its value was {_quoted(before.value)} and is now {_quoted(now.value)}; a key has the new value from its "
            f"next change on"
        )
    if before.score != now.score:
        yield (
            f"its score was {_quoted(before.score)} and is now {_quoted(now.score)}; a member has the new score from "
            f"its next change on"
        )
    if before.json_decimals != now.json_decimals:
        yield (
            f"its json_decimals was {before.json_decimals} and is now {now.json_decimals}, for each value from its "
            f"next change on"
        )
    if before.encoding != now.encoding:
        yield f"its encoding was {before.encoding} and is now {now.encoding}, for each value from its next change on"
    for column in now.value:
        old, new = before.columns.get(column), now.columns.get(column)
        if old is not None and new is not None and old != new:
            yield f"the column {column!r} was {old} and is now {new}, for each value from its next change on"
    if before.where != now.where:
        yield (
            f"where= was {before.where!r} and is now {now.where!r}; keys that only the earlier condition selected stay "
            f"as they are"
        )


def _reduction(state: StateDescriptor) -> tuple[Reduce, Reduction] | None:
    reduction = reduction_of(state)
    return None if state.reduce is None or reduction is None else (state.reduce, reduction)


def _reduction_text(state: StateDescriptor) -> str:
    if _reduction(state) is None:
        return "nothing"
    column_type = f" of {state.columns.get(state.value[0])}" if state.value else ""
    return f"reduce={str(state.reduce)!r}{column_type}"


def _types(state: StateDescriptor) -> tuple[str | None, ...]:
    """Return the types of the columns that order the rows of all micro-batches: the stored orders depend on them."""
    kinds = [state.columns.get(column) for column in state.by_columns]
    return tuple("bigint" if kind in INTEGERS else kind for kind in kinds)


def _order_text(state: StateDescriptor) -> str:
    if state.by is None:
        return "nothing"
    columns = (f"{column} {state.columns.get(column, '')}".strip() for column in state.by_columns)
    return f"{state.by}={', '.join(columns)!r}"


def _quoted(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(repr, value))
    return "nothing" if value is None else repr(str(value))
