"""The limits of a key's history, in a module of their own: servers check requests without loading Arrow."""

COUNT_DEFAULT = 10
COUNT_MAX = 1_000
# Older values are left out if all values together exceed this size (guess). The newest value is always returned.
VALUES_BYTES_MAX = 16 << 20
