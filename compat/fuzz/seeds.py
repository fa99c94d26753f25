"""What fuzzing begins with beside the inputs that are kept: requests of each command, and conversations."""

from __future__ import annotations

from pathlib import Path

from compat.conformance.wire import request
from compat.fuzz.places import EPOCHS, NODE, PROXY, SAID, TWO, USER
from resp_server.commands import command_table

# One a line, their requests between bars: what an input has to have come to before the next change reaches anything.
CONVERSATIONS = Path(__file__).with_name("conversations.txt")


# What a proxy's servers may say to anything.
SAYINGS = (
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
    """Return the words of their requests."""
    return [[each.split() for each in line.split(b" | ")] for line in CONVERSATIONS.read_bytes().splitlines()]


def first_inputs() -> list[bytes]:
    """Return the inputs to begin with: most of them in line, where any change is a request too."""
    found = []
    for name in names():
        words = name.encode().replace(b"|", b" ")
        lines = [
            words + given for given in (b"", b" j:v:1", b" j:m:l f1", b" j:l:s 0 -1", b" j:s:l m1", b" j:z:l 0 -1")
        ]
        found.append(b"\0\0" + b"\r\n".join([*lines, b"HELLO 3", *lines]) + b"\r\n")
        found.append(b"\0\0" + request(*lines[2].split()))
    for requests in conversations():
        packed = b"".join(request(*words) for words in requests)
        found.append(b"\0\0" + b"".join(b" ".join(words) + b"\r\n" for words in requests))
        found += [bytes([options, 0]) + packed for options in (0, NODE, USER, PROXY, PROXY | NODE)]
        found.append(bytes([EPOCHS, 40]) + packed)
        found.append(bytes([EPOCHS | TWO, 200]) + b"".join(2 * request(*words) for words in requests))
        found.append(bytes([PROXY | EPOCHS | TWO, 200]) + b"".join(2 * request(*words) for words in requests))
    found += [
        bytes([options, 0, asked]) + each for options in (SAID, SAID | NODE) for asked in range(16) for each in SAYINGS
    ]
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
