"""`sparkis attach --reader spark`: the command with a Spark of its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from pyspark.sql import SparkSession

from spark_hooks.attach.binding import bind, reading_session
from spark_hooks.attach.options import described, follow, list_all, log_of, states_of
from spark_hooks.attach.start import attach
from spark_hooks.checkpoint import SparkCheckpoint
from spark_hooks.command_process import EndSignal
from spark_hooks.serving.endpoints import ANNOUNCE_SETTING
from spark_hooks.sessions import start_spark
from state_backend.attach.attachment import Attachment
from state_backend.attach.states import pairs
from state_backend.model.errors import CheckpointError

MASTER = "local[2]"


def run_with_spark(options: argparse.Namespace, ended: EndSignal) -> None:
    """List the states of a checkpoint, or follow it until a signal."""
    settings = pairs("--conf", options.conf) | ({ANNOUNCE_SETTING: options.announce} if options.announce else {})
    tls = {"certFile": options.tls_cert_file, "keyFile": options.tls_key_file, "caCertFile": options.tls_ca_cert_file}
    settings |= {f"spark.sparkis.tls.{name}": file for name, file in tls.items() if file}
    with _session(settings, options.master or MASTER) as spark:
        ended.install()  # Spark has handled SIGINT
        open_folder = partial(SparkCheckpoint, spark)
        if options.list:
            list_all(options, open_folder, partial(_list, spark, options))
        else:
            follow(options, ended, partial(_attach, options), open_folder)


@contextmanager
def _session(settings: dict[str, str], master: str) -> Iterator[SparkSession]:
    spark = start_spark("sparkis attach", master, settings)
    spark.sparkContext.setLogLevel("OFF")  # errors are raised here as exceptions
    try:
        yield spark
    finally:
        spark.stop()


def _attach(options: argparse.Namespace, location: str, job: str) -> Attachment:
    return attach(
        checkpoint=location,
        states=states_of(options),
        job=job,
        log=log_of(options),
        on_mismatch=options.on_mismatch,
        catch_up_timeout=options.catch_up_timeout,
        reader="spark",
    )


def _list(spark: SparkSession, options: argparse.Namespace, location: str, job: str) -> None:
    session = reading_session(spark)
    checkpoint = SparkCheckpoint(session, location)
    batch = checkpoint.newest()
    if batch is None:
        raise CheckpointError(
            f"{checkpoint.location} has no committed micro-batch: is it a query's checkpoint, and has the query "
            "finished a micro-batch?"
        )
    bound = bind(session, checkpoint, batch, job, states_of(options))
    print(f"{checkpoint.location}: query {checkpoint.query_id()}, batch {batch}")
    for state in bound:
        for line in described(str(state.source), state.names, state.descriptor, job, state.hint):
            print(line)
