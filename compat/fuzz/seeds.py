"""The first inputs of fuzzing in addition to the corpus: requests of each command, and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from compat.conformance.wire import request
from compat.fuzz.subject import REQUESTS
from compat.fuzz.swap_target import BOTH_SCRIPTED, OF_MANY, RULES, SENTINEL, UPSTREAM_REQUESTS
from compat.fuzz.targets import EPOCHS, NODE, PROXY, SCRIPTED, TWO, USER
from resp_server.commands import command_table

# One conversation per line, its requests separated by bars: sequences that random changes would hardly find.
CONVERSATIONS = Path(__file__).with_name("conversations.txt")
# Options, chunks, and how often each request is sent, alternating between two connections.
VARIANTS = (
    (bytes([NODE, 0]), 1),
    (bytes([PROXY | EPOCHS | TWO, 200]), 2),
    (bytes([USER, 0]), 1),
    (bytes([PROXY | NODE, 0]), 1),
    (bytes([EPOCHS, 40]), 1),
    (bytes([PROXY, 0]), 1),
    (bytes([EPOCHS | TWO, 200]), 2),
)

# The kinds of proxies with an upstream, and how often each script is sent to one of them.
OF_SWAPS = (0, RULES, BOTH_SCRIPTED, RULES | BOTH_SCRIPTED, OF_MANY, OF_MANY | RULES, SENTINEL, SENTINEL | RULES)
SWAP_VARIANTS = 3
# Scripted replies of a proxy's servers or upstream, whatever the request.
SCRIPTS = (
    b":7\r\n+OK\r\n>2\r\n$10\r\ninvalidate\r\n*1\r\n$3\r\nu:1\r\n$1\r\na\r\n>2\r\n$10\r\ninvalidate\r\n_\r\n" * 3,
    b":7\r\n>3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n>3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n+OK\r\n",
    b':7\r\n+OK\r\n+1700000000.000000 [0 1:1] "GET"\r\n$1\r\na\r\n',
    b"$1\r\n1\r\n" * 9,
    b"*2\r\n$1\r\na\r\n$-1\r\n" * 9,
    b":1\r\n+OK\r\n" * 5,
    b"-MOVED 7 10.0.0.9:7379\r\n" * 9,
    b"-TRYAGAIN x\r\n$1\r\n1\r\n" * 5,
    b">4\r\n$5\r\nepoch\r\n$1\r\nj\r\n:1\r\n:9\r\n>2\r\n$8\r\ntopology\r\n:9\r\n$1\r\n1\r\n",
    b">2\r\n$7\r\nchanged\r\n$21\r\n*1\r\n$5\r\nj:v:1\r\n\r\n*4\r\n:1\r\n_\r\n#t\r\n%1\r\n$1\r\na\r\n,1\r\n",
    b"$9999999\r\n",
)


def conversations() -> list[list[list[bytes]]]:
    """Return the conversations: for each one, the words of its requests."""
    return [[each.split() for each in line.split(b" | ")] for line in CONVERSATIONS.read_bytes().splitlines()]


def first_inputs(stored: Sequence[bytes]) -> list[bytes]:
    """Return the first inputs in addition to the corpus (`stored`): only a few, so that there is time for new ones.

    They are the commands that no input of the corpus contains; each conversation with one of VARIANTS; and each of
    SCRIPTS for two of REQUESTS. libFuzzer varies the bytes that choose among these.
    """
    covered = b"\n".join(stored).lower()
    found = []
    for name in names():
        words = name.encode().replace(b"|", b" ")
        if words not in covered:
            given = (b"", b" j:v:1", b" j:m:l f1", b" j:l:s 0 -1", b" j:s:l m1", b" j:z:l 0 -1")
            found.append(b"\0\0" + b"\r\n".join([*(words + each for each in given), b""]))
    for requests, (header, times) in zip(conversations(), cycle(VARIANTS), strict=False):
        found.append(header + b"".join(times * request(*words) for words in requests))
    for at, script in enumerate(2 * SCRIPTS):
        found.append(bytes([SCRIPTED | (at % 2 * NODE), 0, at % len(REQUESTS)]) + script)
    for at, script in enumerate(SWAP_VARIANTS * SCRIPTS):
        options = SCRIPTED | PROXY | OF_SWAPS[at % len(OF_SWAPS)]
        found.append(bytes([options, 0, at * 5 % len(UPSTREAM_REQUESTS)]) + script)
    return found


def names() -> list[str]:
    """Return the full names of all commands."""
    found = []
    waiting = list(command_table())
    while waiting:
        command = waiting.pop()
        found.append(command.name)
        waiting += command.subcommands.values()
    return found
