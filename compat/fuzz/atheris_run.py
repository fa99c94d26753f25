"""The fuzzing process: libFuzzer's loop (atheris) around `Subject.run`. Takes libFuzzer's arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import atheris

from compat.fuzz import corpus

with atheris.instrument_imports(include=["resp_server", "state_backend.store.keyspace"], enable_loader_override=False):
    from compat.fuzz.subject import INPUTS_PER_SERVER, FoundError, Subject


def first_to_fail(history: Sequence[bytes]) -> Sequence[bytes]:
    """Return the last input if it fails alone, else all inputs of its server."""
    try:
        Subject().run(history[-1])
    except FoundError:
        return history[-1:]
    return history


if __name__ == "__main__":
    subject = Subject(INPUTS_PER_SERVER)

    def run_one(data: bytes) -> None:
        try:
            subject.run(data)
        except FoundError:
            print(f"found: {corpus.store_finding(first_to_fail(subject.history(data)))}", flush=True)
            raise

    atheris.Setup(sys.argv, run_one)
    atheris.Fuzz()
