"""Starts an attachment that reads Spark's files: finds the requested states in a checkpoint, and validates them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from state_backend.attach.aggregates import PlannedFunction, planned_of
from state_backend.attach.attachment import (
    Attachment,
    FollowedCheckpoint,
    OnMismatch,
    QueryHooks,
    StateReader,
)
from state_backend.attach.columns import buffers_of, columns_of, is_aggregation, source_of, variable_of
from state_backend.attach.files_reader import FilesReader, FollowedFiles
from state_backend.attach.state_encoder import StateEncoder
from state_backend.attach.states import AttachedState, for_each, index_of
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.states import state_names
from state_backend.folder_watch import PAUSE_S
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S
from state_backend.log.filesystems import open_filesystem
from state_backend.model.descriptor import check_name, check_states
from state_backend.model.errors import CheckpointError, DescriptorError, PurgedVersionError, UnsupportedStateError

logger = logging.getLogger("sparkis.attach")

# Spark may purge a batch while its schemas are read. Then a newer batch is tried, at most this many in all.
TRIES_MAX = 3


def attach_files(
    location: str,
    states: Sequence[AttachedState] = (),
    *,
    job: str,
    log: str,
    on_mismatch: OnMismatch = "refuse",
    takeover: bool = False,
    catch_up_timeout_s: float | None = CATCH_UP_TIMEOUT_S,
    hooks: QueryHooks | None = None,
    reader: Callable[[Checkpoint, Sequence[StateEncoder]], StateReader] = FilesReader,
    functions: Sequence[Sequence[PlannedFunction]] = (),
    settings: Mapping[str, str] | None = None,
    is_ended: Callable[[], bool] = lambda: False,
    timeout_s: float = 0.0,
) -> Attachment:
    """Follow a checkpoint without Spark, in a thread of this process.

    Args:
        settings: Spark's settings of a query in Real-Time Mode, whose first batch may take minutes: its attachment
            begins when the schemas of the requested states are there. Others begin with the first committed batch.
        reader: Makes the reader, which may have a process of its own.
        functions: The functions of each aggregation of the query, if its plan is known.
        is_ended: Ends the wait for the first committed batch early.
        timeout_s: The longest wait. The other arguments are those of `sparkis.attach`.
    """
    check_name("job", job)
    checkpoint = Checkpoint.at(location)
    _check_log(checkpoint, log)
    followed = FollowedFiles(checkpoint)
    operators = {each.operator for each in states if each.operator is not None}
    wait_for_batch(
        followed, is_ended, timeout_s, lambda: settings is not None and _has_states(checkpoint, operators, settings)
    )
    bound = bind(checkpoint, job, states, functions, settings)
    for state in bound:
        if state.hint is not None:
            logger.warning("job %s, state %s: %s", job, state.descriptor.name, state.hint)
    hooks = hooks or QueryHooks()
    return Attachment(
        followed,
        reader(checkpoint, bound),
        job=job,
        log=log,
        on_mismatch=on_mismatch,
        takeover=takeover,
        catch_up_timeout_s=catch_up_timeout_s,
        hooks=replace(hooks, ends_of=followed.ends_of),
    )


def _has_states(checkpoint: Checkpoint, operators: Set[int], settings: Mapping[str, str]) -> bool:
    """Return whether the first batch has written the schemas of some operators; of any if they are none."""
    with suppress(CheckpointError):  # Spark is writing them
        found = {state.operator for state in checkpoint.batch_stores(0, settings).states}
        return bool(found) and operators <= found
    return False


def wait_for_batch(
    checkpoint: FollowedCheckpoint,
    is_ended: Callable[[], bool],
    timeout_s: float,
    is_ready: Callable[[], bool] = lambda: False,
) -> int | None:
    """Return the last committed batch; wait for the first one, because operators have no readable state before.

    Args:
        is_ready: Ends the wait before that; None is returned.
    """
    deadline = time.monotonic() + timeout_s
    while (newest := checkpoint.newest()) is None and not is_ready():
        if is_ended():
            raise CheckpointError(f"{checkpoint.location} has no committed micro-batch")
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{checkpoint.location} has no committed micro-batch after {timeout_s:g} s; attach when the query has "
                f"finished one"
            )
        time.sleep(PAUSE_S)
    return newest


def bind(
    checkpoint: Checkpoint,
    job: str,
    requested: Sequence[AttachedState],
    functions: Sequence[Sequence[PlannedFunction]] = (),
    settings: Mapping[str, str] | None = None,
) -> list[StateEncoder]:
    """Return the requested states as of the last batch; all states that can be read if none is requested.

    A state that sparkis does not read is left out with a warning. UnsupportedStateError if it is requested, or if no
    other state is there.

    Args:
        functions: Of each aggregation of the query, in the order of their operators' numbers, if its plan is known.
        settings: As for `attach_files`.
    """
    for _ in range(TRIES_MAX):
        batch = checkpoint.newest_batch()
        if batch is None and settings is None:
            raise CheckpointError(f"{checkpoint.location} has no committed micro-batch any more")
        try:
            batch_stores = checkpoint.batch_stores(batch or 0, settings if batch is None else None)
            break
        except PurgedVersionError:
            if checkpoint.newest_batch() == batch:
                raise
    else:
        raise CheckpointError(f"{checkpoint.location}: Spark removes batches faster than they can be read")
    batch_stores.check()
    found = batch_stores.states
    for unread in batch_stores.unread:
        if any(
            not each.is_for_all and each.operator == unread.operator and each.variable in (None, unread.variable)
            for each in requested
        ):
            raise UnsupportedStateError(str(unread))
        logger.warning("job %s: a state is left out, because sparkis does not read it: %s", job, unread)
    if not found:
        raise DescriptorError(
            f"the query of {checkpoint.location} has no state that can be read, so there is nothing to attach to"
        )
    planned = planned_of({state.operator: buffers_of(state) for state in found if is_aggregation(state)}, functions)
    columns = []
    for state, name in zip(found, state_names(found), strict=True):
        try:
            columns.append(columns_of(state, name, planned.get(state.operator)))
        except UnsupportedStateError as error:  # a part of its key has no text
            if len(found) == 1 or any(
                not each.is_for_all and each.matches(state.operator, variable_of(state)) for each in requested
            ):
                raise
            logger.warning("job %s: a state is left out: %s", job, error)
    origins = [(column.state.operator, variable_of(column.state)) for column in columns]
    sources = [f"{source_of(each.state)}, named {each.name!r}" for each in columns]
    chosen = (
        [(columns[index_of(sources, origins, each)], each) for each in requested]
        if (of_each := for_each(requested)) is None
        else [(column, of_each) for column in columns]
    )
    bound = [StateEncoder.of(each, request, job) for each, request in chosen]
    check_states(job, [state.descriptor for state in bound])
    return bound


def _check_log(checkpoint: Checkpoint, log: str) -> None:
    root = open_filesystem(log).root
    if f"{root.rstrip('/')}/".startswith(f"{checkpoint.location.rstrip('/')}/"):
        raise DescriptorError(
            f"the log {root} is inside of the checkpoint {checkpoint.location}, where only Spark may write; give "
            f"another folder with log= (--log)"
        )
