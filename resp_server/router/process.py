"""A proxy process from end to end. `sparkis proxy` runs this: no log, no store, no state."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop

from resp_server.cluster.membership import TopologyFile
from resp_server.cluster.topology import Topology, TopologyError
from resp_server.listening import make_room_for
from resp_server.process import add_listening_options, config_of, until_told_to_end
from resp_server.router.dispatcher import ProxyDispatcher
from resp_server.router.slot_map import SlotMap
from resp_server.router.upstream import TIMEOUT_S, Upstreams
from resp_server.server import Server
from state_backend.errors import SparkisError
from state_backend.keyspace import Keyspace

logger = logging.getLogger("sparkis.proxy")

UPSTREAM_PASSWORD_VARIABLE = "SPARKIS_UPSTREAM_PASSWORD"
MS_PER_S = 1000
TIMEOUT_MS_MAX = 60_000

DESCRIPTION = "Answer plain Redis clients from several state servers, each for its slots."
EXAMPLES = """\
examples:
  sparkis proxy --cluster cluster.json
  SPARKIS_PASSWORD=secret sparkis proxy --cluster cluster.json --bind 0.0.0.0 --port 6379
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a proxy to a command."""
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="the servers' topology; read again when it changes"
    )
    parser.add_argument(
        "--upstream-timeout",
        type=_timeout_ms,
        default=int(TIMEOUT_S * MS_PER_S),
        metavar="MS",
        help="how long a server may take to answer (default %(default)s)",
    )
    add_listening_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(role="master")


def _timeout_ms(text: str) -> int:
    given = int(text) if text.isdecimal() else 0
    if not 1 <= given <= TIMEOUT_MS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 1 to {TIMEOUT_MS_MAX}")
    return given


def run(options: argparse.Namespace) -> int:
    """Answer clients until a signal; return the exit code."""
    logging.basicConfig(
        level=options.loglevel.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        uvloop.run(_serve(options))
    except (SparkisError, ValueError, OSError) as error:
        print(f"sparkis proxy: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass
class Follower:
    """Takes what the file says."""

    upstreams: Upstreams

    def take(self, topology: Topology, name: str) -> None:
        """Learn a topology; TopologyError if what is known is newer."""
        slots = self.upstreams.slots
        if slots.take(topology):
            self.upstreams.changed()
            logger.info("version %d of the topology: %d servers", topology.version, len(slots.counts))
        elif topology.version < slots.version:
            raise TopologyError(
                f"version {topology.version} of the topology is older than the servers' {slots.version}"
            )


async def _serve(options: argparse.Namespace) -> None:
    config = config_of(options)
    make_room_for(config.clients_max)
    password = os.environ.get(UPSTREAM_PASSWORD_VARIABLE) or config.password
    upstreams = Upstreams(SlotMap(), password, options.upstream_timeout / MS_PER_S)
    server = Server(Keyspace(), config, dispatcher=lambda instance: ProxyDispatcher(instance, upstreams))
    server.instance.upstreams = upstreams.facts
    upstreams.start()
    file = TopologyFile(Path(options.cluster), "", Follower(upstreams))
    following: asyncio.Task[None] | None = None
    try:
        file.read()
        following = asyncio.create_task(file.follow())
        await server.start()
        for host in config.hosts:
            logger.info("started @ %s:%d", host, server.port)
        if options.child:
            print(json.dumps({"port": server.port}), flush=True)
        await until_told_to_end(watches_input=options.child)
    finally:
        if following is not None:
            following.cancel()
        await server.stop()
        upstreams.stop()
        logger.info("ended")


def main(arguments: list[str] | None = None) -> int:
    """Run a proxy from a command line."""
    parser = argparse.ArgumentParser(
        prog="sparkis proxy",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
