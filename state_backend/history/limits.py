"""The limits of a key's history; apart, so that servers can check requests without loading Arrow."""

COUNT_DEFAULT = 10
COUNT_MAX = 1_000
# Older values are left out beyond this size of all values together (guess); the newest one never is.
VALUES_BYTES_MAX = 16 << 20
