"""LCS: the longest common subsequence of two strings.

Redis fills a table with a row for each byte of the first string; a cell is the length of the longest common subsequence
of the two prefixes. Neighbouring cells differ by at most one, so a row is one integer here: bit j is 0 where the row
grows from column j to j + 1. Five operations on such integers make the next row (H. Hyyrö, "Bit-parallel LCS-length
computation revisited", 2004); backtracking reads single bits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from resp_server.command.handler import command, integer
from resp_server.commands.sliced_reply import size_of
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, syntax_error
from resp_server.protocol.replies import FirstOf, LongItems, Reply, Sliced
from state_backend.model.errors import WrongKindError
from state_backend.store.store import Value, as_bytes

# Redis' limit for its table, at four bytes a cell: the maximum size of a string.
TABLE_BYTES_MAX = 512 << 20
# One operation on a row of more bits would take too long.
STRING_BYTES_MAX = 1 << 20
# Cells of one step, and rows or backtracking moves of one step (guess: half a millisecond).
STEP_CELLS = 1 << 21
STEP_ROWS = 512

# Binary digits for a byte that differs from, or equals, the byte of a row.
MISMATCH, MATCH = b"0", b"1"


@dataclass
class LcsOptions:
    """The options of LCS."""

    has_length: bool = False
    has_matches: bool = False
    has_match_lengths: bool = False
    length_min: int = 0

    @classmethod
    def parse(cls, arguments: Sequence[bytes]) -> LcsOptions:
        """Parse the options in Redis' order of checks."""
        options = cls()
        at = 0
        while at < len(arguments):
            match arguments[at].upper():
                case b"IDX":
                    options.has_matches = True
                case b"LEN":
                    options.has_length = True
                case b"WITHMATCHLEN":
                    options.has_match_lengths = True
                case b"MINMATCHLEN" if at + 1 < len(arguments):
                    at += 1
                    options.length_min = max(0, integer(arguments[at]))
                case _:
                    raise syntax_error()
            at += 1
        if options.has_matches and options.has_length:
            raise GenericError("If you want both the length and indexes, please just use IDX.")
        return options


@command("lcs")
def lcs(context: ReadContext, key: bytes, other: bytes, *arguments: bytes) -> Reply:
    """Finds the longest common substring."""
    texts = [_text(context, each) for each in (key, other)]
    options = LcsOptions.parse(arguments)
    sizes = [size_of(text) for text in texts]
    if max(sizes) > STRING_BYTES_MAX:
        raise GenericError("String too long for LCS")
    if 4 * (sizes[0] + 1) * (sizes[1] + 1) > TABLE_BYTES_MAX:
        raise GenericError("Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len")
    first, second = (b"" if text is None else as_bytes(text) for text in texts)
    steps = _reply_after_steps(first, second, options)
    if sizes[0] <= STEP_ROWS and sizes[0] * sizes[1] <= STEP_CELLS:
        return next(reply for reply in steps if reply is not None)
    if options.has_matches:
        return Sliced(map(_reply_chunk, steps), lambda: None, dict, 2)
    return Sliced(([] if reply is None else [reply] for reply in steps), lambda: None, FirstOf)


def _text(context: ReadContext, key: bytes) -> Value | None:
    try:
        return context.counted(context.at(key).lazy_value(key))
    except WrongKindError:
        raise GenericError("The specified keys must contain string values") from None


def _reply_chunk(reply: dict[bytes, Any] | None) -> Sequence[Reply]:
    """Return the two pairs of IDX's reply; the matches are sent in steps."""
    return [] if reply is None else LongItems([b"matches", LongItems(reply[b"matches"]), b"len", reply[b"len"]])


def _reply_after_steps(first: bytes, second: bytes, options: LcsOptions) -> Iterator[Any]:
    """Yield None after each step, and the reply at the end."""
    rows, length = yield from _rows(first, second, are_kept=not options.has_length)
    if options.has_length:
        yield length
        return
    backtrack = Backtrack(first, second, options)
    yield from backtrack.walk(rows)
    yield {b"matches": backtrack.matches, b"len": length} if options.has_matches else bytes(reversed(backtrack.common))


def _rows(first: bytes, second: bytes, *, are_kept: bool) -> Generator[None, None, tuple[list[bytes], int]]:
    """Yield after each step; return the rows, if they are kept, and the length of the common subsequence."""
    size = len(second)
    row = full = (1 << size) - 1
    row_bytes = size // 8 + 1
    masks: dict[int, int] = {}
    rows: list[bytes] = []
    done = 0
    for byte in first:
        if byte not in masks:
            table = bytearray(MISMATCH * 256)
            table[byte] = MATCH[0]
            masks[byte] = int(second.translate(table)[::-1] or b"0", 2)
            yield
        common = row & masks[byte]
        row = ((row + common) | (row - common)) & full
        if are_kept:
            rows.append(row.to_bytes(row_bytes, "little"))
        done += 1
        if done * size >= STEP_CELLS or done >= STEP_ROWS:
            done = 0
            yield
    return rows, size - row.bit_count()


class Backtrack:
    """Backtracking through the table, from the end of both strings to their beginning, and its result."""

    def __init__(self, first: bytes, second: bytes, options: LcsOptions) -> None:
        self._first = first
        self._second = second
        self._options = options
        self.common = bytearray()
        self.matches: list[Reply] = []

    def walk(self, rows: Sequence[bytes]) -> Iterator[None]:
        """Move through the table as Redis does; yield after some moves."""
        first, second, common = self._first, self._second, self.common
        at, other_at = len(first), len(second)
        run = 0  # length of the current match
        while at and other_at:
            for _ in range(STEP_ROWS):
                if first[at - 1] == second[other_at - 1]:
                    common.append(first[at - 1])
                    run += 1
                    at, other_at = at - 1, other_at - 1
                else:
                    if run:
                        self._end_match(at, other_at, run)
                        run = 0
                    if rows[at - 1][(other_at - 1) >> 3] >> ((other_at - 1) & 7) & 1:
                        other_at -= 1
                    else:
                        at -= 1
                if not at or not other_at:
                    break
            yield
        self._end_match(at, other_at, run)

    def _end_match(self, at: int, other_at: int, run: int) -> None:
        """Record a match of `run` bytes that has ended."""
        if run and run >= self._options.length_min:
            lengths = [run] if self._options.has_match_lengths else []
            self.matches.append([[at, at + run - 1], [other_at, other_at + run - 1], *lengths])
