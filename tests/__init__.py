"""The tests. Helpers are imported as `tests.<folder>.<module>`; `tests/unit/` mirrors the source."""
