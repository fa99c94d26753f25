"""The corpus: inputs as Python bytes literals, one per line; and inputs that found a bug, one file each."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.txt"
FOUND = HERE / "found"


def stored() -> list[bytes]:
    """Return the corpus, which reaches all covered lines."""
    return _read(CORPUS) if CORPUS.exists() else []


def store(inputs: Iterable[bytes]) -> None:
    """Write the corpus."""
    _write(CORPUS, sorted(inputs, key=lambda each: (len(each), each)))


def findings() -> list[list[bytes]]:
    """Return the inputs that found bugs: sequences for one server, mostly of a single input."""
    return [_read(path) for path in sorted(FOUND.glob("*.txt"))]


def store_finding(inputs: Sequence[bytes]) -> Path:
    """Store a sequence whose last input found a bug, for the tests."""
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"{sha256(b''.join(inputs)).hexdigest()[:12]}.txt"
    _write(path, inputs)
    return path


def _read(path: Path) -> list[bytes]:
    return [ast.literal_eval(line) for line in path.read_text(encoding="ascii").splitlines()]


def _write(path: Path, inputs: Iterable[bytes]) -> None:
    path.write_text("".join(f"{each!r}\n" for each in inputs), encoding="ascii")
