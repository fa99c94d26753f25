"""A registry process from end to end. `sparkis registry` runs this: no state, and no client ever waits for it."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
from ipaddress import ip_address

import uvloop

from resp_server.cluster.topology import NODES_MAX
from resp_server.process import until_told_to_end
from resp_server.registry.record import FencedError, Place
from resp_server.registry.service import Registry
from resp_server.tls import Certificates, add_tls_options, certificates_of, shown_files_of
from resp_server.token import add_token_option, token_of
from state_backend.errors import SparkisError
from state_backend.filesystems import open_filesystem

logger = logging.getLogger("sparkis.registry")

DEFAULT_PORT = 7377
# How a registry ends when another one has taken its place: whoever keeps it running must not take that back.
FENCED_CODE = 3

DESCRIPTION = (
    "Assign the slots of a change log's keys to state servers, and notice when these come and go. It writes where it "
    "is to registry.json under the log's root. Servers answer on without it; one that is started again goes on."
)
EXAMPLES = """\
examples:
  SPARKIS_CONTROL_TOKEN=secret sparkis registry --log /data/log
  sparkis registry --log /data/log --token-file token --bind 10.0.0.1 --replicas 1
  sparkis registry --log /data/log --tls-cert-file a.crt --tls-key-file a.key --tls-ca-cert-file ca.crt
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a registry to a command."""
    parser.add_argument("--log", required=True, metavar="PATH", help="the log root; registry.json is written there")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="TCP port (default %(default)s; 0: a free one)")
    parser.add_argument(
        "--bind", default="127.0.0.1", metavar="ADDRESS", help="the address to listen on (default %(default)s)"
    )
    parser.add_argument(
        "--advertise", metavar="HOST", help="where state servers find this machine (default: the --bind address)"
    )
    parser.add_argument(
        "--replicas",
        type=_replica_count,
        default=0,
        metavar="N",
        help="further servers that hold each slot, where there are enough (default %(default)s)",
    )
    add_token_option(parser)
    add_tls_options(parser)
    parser.add_argument("--loglevel", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def _replica_count(text: str) -> int:
    count = int(text) if text.isdecimal() else NODES_MAX
    if count >= NODES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of replicas from 0 to {NODES_MAX - 1}")
    return count


def run(options: argparse.Namespace) -> int:
    """Assign until a signal, or for a child until its standard input ends; return the exit code."""
    logging.basicConfig(
        level=options.loglevel.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        uvloop.run(_run(options, token_of(options), certificates_of(shown_files_of(options))))
    except FencedError as error:
        logger.error("%s; this one ends", error)
        return FENCED_CODE
    except (SparkisError, ValueError, OSError) as error:
        print(f"sparkis registry: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(options: argparse.Namespace, token: str, certificates: Certificates | None) -> None:
    host = _advertised(options)
    listener = socket.create_server(
        (options.bind, options.port), family=socket.AF_INET6 if ":" in options.bind else socket.AF_INET
    )
    port = listener.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    filesystem = open_filesystem(options.log)
    filesystem.make_folder("")
    registry = Registry(Place.take(filesystem, address, options.replicas), token, certificates)
    await registry.start(listener)
    deciding = asyncio.create_task(registry.run())
    told = asyncio.create_task(until_told_to_end(watches_input=options.child))
    try:
        await asyncio.sleep(0)  # so that signals are waited for when somebody reads that it is there
        logger.info("started registry @ %s, term %d", address, registry.term)
        if options.child:
            print(json.dumps({"host": host, "port": port}), flush=True)
        await asyncio.wait([deciding, told], return_when=asyncio.FIRST_COMPLETED)
        if deciding.done():
            deciding.result()
    finally:
        deciding.cancel()
        told.cancel()
        await registry.stop()
        logger.info("ended")


def _advertised(options: argparse.Namespace) -> str:
    host: str = options.advertise or options.bind
    try:
        is_any = ip_address(host).is_unspecified
    except ValueError:
        is_any = not host
    if is_any:
        raise ValueError(f"--bind {options.bind}: say with --advertise HOST where state servers find this machine")
    return host


def main(arguments: list[str] | None = None) -> int:
    """Run a registry from a command line."""
    parser = argparse.ArgumentParser(
        prog="sparkis registry",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
