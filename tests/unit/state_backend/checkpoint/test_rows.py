"""Arrow columns as values of JSON."""

from __future__ import annotations

import pyarrow as pa

from state_backend.checkpoint.rows import plain_values


def test_the_keys_of_a_map_are_texts_or_json() -> None:
    for kind, key, text in (
        (pa.string(), "a", "a"),
        (pa.bool_(), True, "true"),
        (pa.float64(), 1.0, "1.0"),
        (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}, '{"a": 1, "b": null}'),
    ):
        assert plain_values(pa.array([[(key, 1)]], pa.map_(kind, pa.int64()))) == [{text: 1}]
