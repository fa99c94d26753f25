"""`sparkis attach`: follows a checkpoint, or lists the states in the checkpoint.

With `--reader files` it needs no Spark and no JVM, and imports neither. The server of `--serve` is a child process.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from spark_hooks.attach.options import described, follow, list_all, log_of, states_of
from spark_hooks.command_process import EndSignal
from spark_hooks.serving import endpoints
from state_backend import log_lines
from state_backend.attach.attachment import Attachment, QueryHooks
from state_backend.attach.start import attach_files, bind
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.model.errors import CheckpointError, DescriptorError, SparkisError
from state_backend.process_memory import retain_free_memory

# How long to wait for the query's first committed micro-batch.
FIRST_BATCH_TIMEOUT_S = 60.0


def run(options: argparse.Namespace) -> int:
    """Run the command until a signal or an error; return the exit code."""
    ended = EndSignal()
    log_lines.set_up("info", "text")
    try:
        if options.reader == "spark":
            # Imported here, because the other reader needs no Spark.
            from spark_hooks.attach.spark_command import run_with_spark

            run_with_spark(options, ended)
        elif options.master is not None or options.conf:
            raise DescriptorError("--master and --conf are settings of Spark, which is used with --reader spark")
        elif options.list:
            list_all(options, CheckpointFiles.at, partial(_list, options))
        else:
            follow(options, ended, partial(_attach, options, ended), CheckpointFiles.at)
    except SparkisError as error:
        print(f"sparkis attach: {error}", file=sys.stderr)
        return 1
    return 0


def _list(options: argparse.Namespace, location: str, job: str) -> None:
    checkpoint = Checkpoint.at(location)
    batch = checkpoint.newest_batch()
    if batch is None:
        raise CheckpointError(
            f"{checkpoint.location} has no committed micro-batch: has the query finished a micro-batch?"
        )
    bound = bind(checkpoint, job, states_of(options))
    print(f"{checkpoint.location}: query {checkpoint.query_id}, batch {batch}")
    for state in bound:
        names = state.columns.names
        for line in described(names.source, names.all, state.descriptor, job, state.hint):
            print(line)


def _attach(options: argparse.Namespace, ended: EndSignal, location: str, job: str) -> Attachment:
    retain_free_memory()
    root = log_of(options)
    hooks = QueryHooks(announce=partial(endpoints.announce, root), wait=partial(endpoints.wait, root))
    return attach_files(
        location,
        states_of(options),
        job=job,
        log=root,
        on_mismatch=options.on_mismatch,
        catch_up_timeout_s=options.catch_up_timeout,
        hooks=hooks,
        is_ended=ended.is_set,
        timeout_s=FIRST_BATCH_TIMEOUT_S,
    )
