"""Starts an attachment that reads Spark's files: finds the requested states in a checkpoint, and validates them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from state_backend.attach.attachment import POLL_INTERVAL_LOCAL_S, Attachment, OnMismatch, QueryHooks
from state_backend.attach.columns import columns_of, source_of, variable_of
from state_backend.attach.files_reader import FilesReader, FollowedFiles
from state_backend.attach.rows import BoundState
from state_backend.attach.states import AttachedState, matching
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.states import state_names
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S
from state_backend.log.filesystems import open_filesystem
from state_backend.model.descriptor import check_name, check_states
from state_backend.model.errors import CheckpointError, DescriptorError, PurgedVersionError

# Spark may remove a batch while its schemas are read. Then a newer one is read: this many batches are tried.
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
    is_ended: Callable[[], bool] = lambda: False,
    timeout_s: float = 0.0,
) -> Attachment:
    """Follow a checkpoint without Spark, in a thread of this process.

    is_ended: tells whether to give up the wait for the first committed batch, which takes at most `timeout_s`. The
    other arguments are those of `sparkis.attach`.
    """
    check_name("job", job)
    checkpoint = Checkpoint.at(location)
    _check_log(checkpoint, log)
    deadline = time.monotonic() + timeout_s
    while checkpoint.newest_batch() is None:
        if is_ended() or time.monotonic() >= deadline:
            raise _without_batch(checkpoint)
        time.sleep(POLL_INTERVAL_LOCAL_S)
    bound = bind(checkpoint, job, states)
    followed = FollowedFiles(checkpoint)
    hooks = hooks or QueryHooks()
    return Attachment(
        followed,
        FilesReader(checkpoint, bound),
        job=job,
        log=log,
        on_mismatch=on_mismatch,
        takeover=takeover,
        catch_up_timeout_s=catch_up_timeout_s,
        hooks=replace(hooks, ends_of=followed.ends_of),
    )


def bind(checkpoint: Checkpoint, job: str, requested: Sequence[AttachedState]) -> list[BoundState]:
    """Return the requested states as of the last batch; all states if none is requested."""
    for _ in range(TRIES_MAX):
        batch = checkpoint.newest_batch()
        if batch is None:
            raise _without_batch(checkpoint)
        try:
            found = checkpoint.layout(batch).states
            break
        except PurgedVersionError:
            if checkpoint.newest_batch() == batch:
                raise
    else:
        raise CheckpointError(f"{checkpoint.location}: Spark removes batches faster than they can be read")
    if not found:
        raise DescriptorError(
            f"the query of {checkpoint.location} has no state that can be read, so there is nothing to attach to"
        )
    columns = [columns_of(state, name) for state, name in zip(found, state_names(found), strict=True)]
    places = [(state.operator, variable_of(state)) for state in found]
    sources = [source_of(state) for state in found]
    chosen = (
        [(columns[matching(sources, places, each)], each) for each in requested]
        if requested
        else [(each, AttachedState()) for each in columns]
    )
    bound = [BoundState.of(each, asked, job) for each, asked in chosen]
    check_states(job, [state.descriptor for state in bound])
    return bound


def _without_batch(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.location} has no committed micro-batch: the query has not finished its first one"
    )


def _check_log(checkpoint: Checkpoint, log: str) -> None:
    root = open_filesystem(log).root
    if f"{root.rstrip('/')}/".startswith(f"{checkpoint.location.rstrip('/')}/"):
        raise DescriptorError(
            f"the log {root} is inside of the checkpoint {checkpoint.location}, where only Spark may write; give "
            f"another folder with log= (--log)"
        )
