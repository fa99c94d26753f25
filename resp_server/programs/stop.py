"""`sparkis stop`: ends the server that `sparkis.serve(spark)` started for a log, which may outlive its driver."""

from __future__ import annotations

import argparse
import sys

from resp_server.programs.executor_supervisor import start_of
from resp_server.serving.server_file import ServerFile, folder_of
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import SparkisError

# More leases than a server has, so that it ends whatever their number.
LEASES_MAX = 1 << 30
DESCRIPTION = "End the server that a driver on this machine started for a log with sparkis.serve(spark)."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--log", required=True, metavar="PATH", help="the log root that the server serves")


def run(options: argparse.Namespace) -> int:
    """End the server; return the exit code."""
    try:
        record = running_server(options.log)
        with record.connect() as client:
            client.call("STOP", str(LEASES_MAX))
    except (SparkisError, OSError) as error:
        print(f"sparkis stop: {error}", file=sys.stderr)
        return 1
    print(f"the server of {record.log} at port {record.port} ends")
    return 0


def running_server(log: str) -> ServerFile:
    """Return the record of the server that a driver on this machine started for a log; SparkisError if none runs."""
    root = open_filesystem(log).root
    record = ServerFile.read(folder_of(root))
    if record is None or start_of(record.pid) != record.start:
        raise SparkisError(f"no driver of this user has a server for {root} on this machine")
    return record
