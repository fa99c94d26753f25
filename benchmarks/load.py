"""The load generator of the benchmarks: `python -m benchmarks.load`, run as a separate process by `reads.benchmark`.

It sends the same requests as redis-benchmark at less cost: its compiled loop (`native/load.pyx`) only counts replies.
Each connection has had a first reply before the clock starts, so connecting is not measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

# The placeholder and its number of digits, as in redis-benchmark.
NUMBER, DIGITS = "__rand_int__", 12
CONNECT_TIMEOUT_S = 60.0
REPLY_BYTES_MAX = 1 << 10
ERROR_CHARS_MAX = 500


class NotMeasuredError(Exception):
    """The load generator ended without a rate; the text has the reason."""


def rate(
    port: int,
    words: Sequence[str],
    *,
    clients: int,
    pipeline: int,
    requests: int,
    key_range: int,
    user: tuple[str, str] | None = None,
) -> float:
    """Run the load generator and return the requests per second. user: name and password.

    Each `__rand_int__` in the words becomes a random number below key_range.
    """
    command = [sys.executable, "-m", "benchmarks.load", "--port", str(port), "--clients", str(clients)]
    command += ["--pipeline", str(pipeline), "--requests", str(requests), "--key-range", str(key_range)]
    command += ["--user", *user] if user else []
    done = subprocess.run([*command, "--", *words], capture_output=True, text=True)
    if done.returncode:
        raise NotMeasuredError(done.stderr.strip()[-ERROR_CHARS_MAX:])
    return float(done.stdout)


def request_of(words: Sequence[str]) -> tuple[bytes, list[int]]:
    """Return an encoded request, and the offsets of its random numbers."""
    packed, numbers_at = _packed([word.replace(NUMBER, "0" * DIGITS) for word in words]), []
    at = packed.index(b"\r\n") + 2
    for word in words:
        size = len(word.replace(NUMBER, "0" * DIGITS).encode())
        at += len(b"$%d\r\n" % size)
        before = 0
        *parts, _ = word.split(NUMBER)
        for part in parts:
            before += len(part.encode())
            numbers_at.append(at + before)
            before += DIGITS
        at += size + 2
    return packed, numbers_at


def _packed(words: Sequence[str]) -> bytes:
    encoded = [word.encode() for word in words]
    return b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%s\r\n" % (len(each), each) for each in encoded)])


def _connected(port: int, greeting: bytes) -> socket.socket:
    """Connect, and wait for the first reply."""
    made = socket.create_connection(("127.0.0.1", port), CONNECT_TIMEOUT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.sendall(greeting)
    reply = b""
    while not reply.endswith(b"\r\n") and len(reply) < REPLY_BYTES_MAX and (some := made.recv(REPLY_BYTES_MAX)):
        reply += some
    if not reply.startswith(b"+"):
        raise NotMeasuredError(f"the server's reply to the first request of a connection is {reply!r}")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Send the load that the arguments describe, and print the requests per second."""
    parser = argparse.ArgumentParser("python -m benchmarks.load", description=rate.__doc__)
    for name in ("port", "clients", "pipeline", "requests", "key-range"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--user", nargs=2, metavar=("NAME", "PASSWORD"))
    parser.add_argument("words", nargs="+", metavar="WORD")
    options = parser.parse_args(arguments)
    try:
        from benchmarks.native import load
    except ImportError:
        sys.exit(
            "the load generator is not compiled: `make setup` compiles it where there is a C compiler (Linux only)"
        )
    # No cleanup is needed, and the compiled loop does not run Python's signal handlers.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request, numbers_at = request_of(options.words)
    greeting = _packed(["AUTH", *options.user] if options.user else ["PING"])
    with ExitStack() as stack:
        try:
            made = [stack.enter_context(_connected(options.port, greeting)) for _ in range(options.clients)]
            descriptors = [each.fileno() for each in made]
            seed = int.from_bytes(os.urandom(8))
            replied, took_s, _ = load.send_all(
                descriptors, request, numbers_at, options.pipeline, options.requests, options.key_range, seed
            )
        except (NotMeasuredError, OSError, load.LoadError) as error:
            sys.exit(str(error))
    print(replied / took_s)


if __name__ == "__main__":
    main()
