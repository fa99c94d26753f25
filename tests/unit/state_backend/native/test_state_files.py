"""The compiled loops that read state files never read out of their buffers."""

from __future__ import annotations

import numpy as np
import pytest

from state_backend.native import state_files

pytestmark = pytest.mark.compiled

CONTENT = np.frombuffer(b"0123456789abcdef", np.uint8)


def numbers(*given: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(given, np.int64)


def test_words_are_bytes_at_their_positions():
    assert state_files.words(CONTENT, numbers(8, 0, 3), 8) == b"89abcdef012345673456789a"
    assert state_files.words(CONTENT, numbers(14, 2), 2) == b"ef23"
    assert state_files.words(CONTENT, numbers(), 4) == b""


@pytest.mark.parametrize(("start", "width"), [(-1, 8), (9, 8), (16, 1), (1 << 62, 8), (-(1 << 62), 8)])
def test_word_outside_of_buffer_is_refused(start: int, width: int):
    with pytest.raises(IndexError):
        state_files.words(CONTENT, numbers(0, start), width)


def test_pieces_are_gathered_with_their_offsets():
    chunks, offsets = state_files.gathered(CONTENT, numbers(10, 16, 0), numbers(3, 0, 2))
    assert chunks == b"abc01"
    assert np.frombuffer(offsets, np.int64).tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (15, 2), (0, -1), (0, 17), (1 << 62, 1 << 62)])
def test_chunk_outside_of_buffer_is_refused(start: int, size: int):
    with pytest.raises(IndexError):
        state_files.gathered(CONTENT, numbers(0, start), numbers(1, size))
