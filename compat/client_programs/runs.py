"""One run of a program at one address: its steps, and what it asks for meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Timer
from typing import Protocol

from compat.swap_programs.outcomes import Outcomes

# The time limit of a run; longer than any takes on a busy machine. It ends a hang.
RUN_S_MAX = 300.0
LOG_CHARS_MAX = 4_000
REQUEST = "! "
# The step of a program that does not end well.
END = "the program's end"


class Place(Protocol):
    """An address where programs run."""

    @property
    def name(self) -> str:
        """Its name in limits.toml."""

    def environment(self) -> dict[str, str]:
        """Return the variables that tell a program the address."""

    def put(self, key: str, value: str) -> None:
        """Set a state's key, and wait until clients can read it."""

    def delete(self, key: str) -> None:
        """Delete a state's key, and wait until clients do not find it."""

    def kill(self, key: str) -> None:
        """Kill the server that has a key."""


def run(command: Sequence[str], place: Place) -> Outcomes:
    """Return the results of a program's steps. What it has put is deleted after it."""
    outcomes: Outcomes = {}
    put: set[str] = set()
    with (
        TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **place.environment()},
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        limit = Timer(RUN_S_MAX, process.kill)
        limit.start()
        try:
            for line in process.stdout:
                if line.startswith(REQUEST):
                    _do(line.removeprefix(REQUEST).split(), place, put)
                    process.stdin.write("done\n")
                    process.stdin.flush()
                elif ": " in line:
                    step, _, result = line.rstrip("\n").partition(": ")
                    outcomes[step] = result
            process.wait()
        except BrokenPipeError:
            process.wait()  # it has ended before it got an answer
        finally:
            limit.cancel()
            process.kill()
            with suppress(BrokenPipeError):  # an answer that the program did not read
                process.stdin.close()
        if process.returncode:
            errors.seek(0)
            outcomes[END] = f"exit code {process.returncode}"
            print(errors.read().decode("utf-8", "replace")[-LOG_CHARS_MAX:], flush=True)
    for key in put:
        place.delete(key)
    return outcomes


def _do(words: Sequence[str], place: Place, put: set[str]) -> None:
    match words:
        case ["put", key, value]:
            put.add(key)
            place.put(key, value)
        case ["delete", key]:
            put.discard(key)
            place.delete(key)
        case ["kill", key]:
            place.kill(key)
        case _:
            raise ValueError(f"a program asks for {' '.join(words)!r}: it is put, delete or kill")
