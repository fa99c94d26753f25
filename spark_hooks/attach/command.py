"""`sparkis attach`: follows a checkpoint with its own Spark, or lists the states in the checkpoint."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from spark_hooks.attach.rows import BoundState
from spark_hooks.attach.start import attach, bind, reading_session
from spark_hooks.checkpoint import Checkpoint
from spark_hooks.own_spark import EndSignal, start_spark
from spark_hooks.serving import serve
from state_backend.attach.states import AttachedState
from state_backend.model.descriptor import Kind
from state_backend.model.errors import CheckpointError, DescriptorError, SparkisError

REDIS_TYPES = {Kind.VALUE: "string", Kind.MAP: "hash", Kind.LIST: "list"}
# The pause between two checks of the attachment for an error.
POLL_INTERVAL_S = 0.5


def run(options: argparse.Namespace) -> int:
    """Run the command until a signal or an error; return the exit code."""
    ended = EndSignal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if not options.list and (options.job is None or options.log is None):
            raise DescriptorError("--job and --log are required, except with --list")
        with _session(_pairs("--conf", options.conf), options.master) as spark:
            ended.install()
            if options.list:
                _list(spark, options)
            else:
                _follow(spark, options, ended)
    except SparkisError as error:
        print(f"sparkis attach: {error}", file=sys.stderr)
        return 1
    return 0


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse the NAME=VALUE arguments of an option."""
    pairs = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise DescriptorError(f"{option} takes NAME=VALUE, not {each!r}")
        pairs[name] = value
    return pairs


@contextmanager
def _session(settings: dict[str, str], master: str) -> Iterator[SparkSession]:
    spark = start_spark("sparkis attach", master, settings)
    spark.sparkContext.setLogLevel("OFF")  # errors are raised here as exceptions
    try:
        yield spark
    finally:
        spark.stop()


def _list(spark: SparkSession, options: argparse.Namespace) -> None:
    session = reading_session(spark)
    checkpoint = Checkpoint(session, options.checkpoint)
    batch = checkpoint.newest()
    if batch is None:
        raise CheckpointError(
            f"{checkpoint.location} has no committed micro-batch: is it a query's checkpoint, and has the query "
            "finished a micro-batch?"
        )
    print(f"{checkpoint.location}: query {checkpoint.query_id()}, batch {batch}")
    for state in bind(session, checkpoint, batch, options.job or "JOB", []):
        for line in described(state, options.job or "JOB"):
            print(line)


def described(state: BoundState, job: str) -> Iterator[str]:
    """Yield the lines that describe a state: its operator, its columns, and its keys for Redis clients."""
    result = state.descriptor
    value = ", ".join(result.value)
    field = f"{result.field} -> " if result.field is not None else ""
    yield f"{state.source}"
    yield f"  columns  {', '.join(state.names)}"
    yield f"  {REDIS_TYPES[result.kind]:<7}  {result.format_for(job).text}  {field}{value}"


def _follow(spark: SparkSession, options: argparse.Namespace, ended: EndSignal) -> None:
    endpoint = serve.serve(spark, log=options.log, port=options.port, linger=0) if options.serve else None
    given = _state_of(options)
    states = [AttachedState(options.state, **given)] if given or options.state else []
    attachment = attach(
        checkpoint=options.checkpoint,
        states=states,
        job=options.job,
        log=options.log,
        on_mismatch=options.on_mismatch,
    )
    with attachment:
        names = ", ".join(f"{state.key_format} ({REDIS_TYPES[state.kind]})" for state in attachment.states)
        print(f"attached: {names}; log {attachment.log}", flush=True)
        while not (ended.is_set() or attachment.wait(timeout_s=POLL_INTERVAL_S)):
            pass
        if endpoint is not None and not ended.is_set():
            print(f"redis-cli -u {endpoint.url}", flush=True)
        while not ended.wait(POLL_INTERVAL_S):
            if attachment.error is not None:
                raise SparkisError(str(attachment.error))
    if endpoint is not None:
        endpoint.stop()


def _state_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the single state on the command line."""
    given: dict[str, Any] = {}
    for name in ("operator", "variable", "key", "key_format", "field", "value", "kind", "encoding", "length_max"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.column:
        given["columns"] = _pairs("--column", options.column)
    return given
