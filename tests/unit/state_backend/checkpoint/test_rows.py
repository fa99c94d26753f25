"""Arrow columns as values of JSON."""

from __future__ import annotations

import pyarrow as pa

from state_backend.checkpoint.rows import plain_values


def test_the_keys_of_a_map_are_texts_or_json() -> None:
    for kind, key, text in (
        (pa.string(), "a", "a"),
        (pa.bool_(), True, "true"),
        (pa.float64(), 1.0, "1"),
        (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}, '{"a": 1, "b": null}'),
    ):
        assert plain_values(pa.array([[(key, 1)]], pa.map_(kind, pa.int64()))) == [{text: 1}]


def test_times_are_their_texts_in_any_year() -> None:
    """Python's own times end with the year 9999."""
    times = pa.array([253402300800000000, 500000, None], pa.timestamp("us", "UTC"))
    assert plain_values(times) == ["+10000-01-01T00:00:00Z", "1970-01-01T00:00:00.5Z", None]
    assert plain_values(pa.array([2932897], pa.int32()).cast(pa.date32())) == ["+10000-01-01"]
    assert plain_values(pa.array([7.0, 0.5])) == [7, 0.5]
