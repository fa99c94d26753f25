"""Reads keys of a file, one GET after another; each input line makes it print the latencies since the last line."""

from __future__ import annotations

import json
import random
import select
import socket
import sys
from pathlib import Path
from time import perf_counter


def main(port: int, keys: list[bytes]) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took_ms: list[float] = []
    choose = random.Random(1).choice
    while True:
        for _ in range(100):
            key = choose(keys)
            started = perf_counter()
            connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
            reply = connection.recv(65536)
            took_ms.append((perf_counter() - started) * 1e3)
            if not reply.startswith(b"$") or reply.startswith(b"$-1"):
                raise SystemExit(f"{key!r} was answered by {reply!r}")
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            took_ms.sort()
            shown = {f"p{share}_ms": took_ms[int(len(took_ms) * share / 100)] for share in (50, 99)}
            print(json.dumps({"reads": len(took_ms), **shown, "longest_ms": took_ms[-1]}), flush=True)
            took_ms = []


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes().split(b"\n"))
