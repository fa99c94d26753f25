"""Programs of redis-py."""
