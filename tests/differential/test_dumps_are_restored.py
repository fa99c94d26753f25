"""What DUMP gives, a real server restores: every key of the data set, compared as that server answers it."""

from __future__ import annotations

import pytest

from compat.conformance.dataset import Dataset
from compat.conformance.pair import Pair
from compat.conformance.wire import Connection

READS = {
    b"string": [b"GET"],
    b"hash": [b"HGETALL"],
    b"list": [b"LRANGE", b"0", b"-1"],
    b"set": [b"SMEMBERS"],
    b"zset": [b"ZRANGE", b"0", b"-1", b"WITHSCORES"],
}


def content(connection: Connection, key: bytes) -> tuple[bytes, object]:
    """Return what a real server has at a key: its type, and all of it."""
    kind = connection.call("TYPE", key).value
    name, *rest = READS[kind]
    found = connection.call(name, key, *rest).plain
    if kind == b"hash":
        return kind, dict(zip(found[::2], found[1::2], strict=True))
    return kind, set(found) if kind == b"set" else found


def test_every_key_reads_same_when_real_server_has_restored_it(pair: Pair, dataset: Dataset) -> None:
    with pair.redis.connect() as redis, pair.sparkis.connect() as sparkis:
        try:
            for key in dataset.keys:
                dumped = sparkis.call("DUMP", key).value
                expected = content(redis, key)
                redis.call("SELECT", 9)
                assert redis.call("RESTORE", b"copy", 0, dumped, "REPLACE").raw == b"+OK\r\n", key
                assert content(redis, b"copy") == expected, key
                redis.call("SELECT", 0)
        finally:
            redis.call("SELECT", 9)
            redis.call("FLUSHDB")


@pytest.mark.parametrize("key", [b"hash:large", b"list:long", b"big"])
def test_large_value_is_sent_whole_in_steps(pair: Pair, key: bytes) -> None:
    with pair.sparkis.connect() as sparkis:
        assert sparkis.call("DUMP", key).value == sparkis.call("DUMP", key).value
