"""The compiled loops that encode changes refuse columns whose offsets lead out of their content."""

from __future__ import annotations

import numpy as np
import pytest

from state_backend.native import change_records

pytestmark = pytest.mark.compiled

CONTENT = np.frombuffer(b"abcdef", np.uint8)


@pytest.mark.parametrize("offsets", [[], [-1, 3], [0, 7], [0, 4, 2], [3, 2, 6]])
def test_offsets_out_of_content_are_refused(offsets: list[int]):
    given = np.array(offsets, np.int32)
    with pytest.raises(ValueError, match="offset"):
        change_records.positions(given, CONTENT, 0)
    with pytest.raises(ValueError, match=r"offset|rows"):
        change_records.packed_maps([b"$1\r\na\r\n$"], [(given, CONTENT, None)], max(0, len(offsets) - 1))
    with pytest.raises(ValueError, match=r"offset|rows"):
        change_records.joined([b"a", (given, CONTENT)], max(0, len(offsets) - 1))


def test_key_that_is_shorter_than_prefix_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        change_records.positions(np.array([0, 4, 6], np.int32), CONTENT, 3)


@pytest.mark.parametrize(("rows", "validity"), [(1, None), (2, np.zeros(1, np.uint8))])
def test_columns_of_other_lengths_are_refused(rows: int, validity: object):
    with pytest.raises(ValueError, match="another number of rows"):
        change_records.packed_maps([b""], [(np.array([0, 4, 6], np.int32), CONTENT, validity)], rows)
    if validity is None:
        with pytest.raises(ValueError, match="another number of rows"):
            change_records.joined([(np.array([0, 4, 6], np.int32), CONTENT)], rows)
    else:
        with pytest.raises(ValueError, match="another number of rows"):
            change_records.integer_texts(np.zeros(rows, np.int64), validity)


def test_run_with_more_rows_than_16_bits_can_number_is_refused():
    with pytest.raises(ValueError, match="16 bits"):
        change_records.order_of(np.zeros((1 << 16) + 1, np.uint64))
