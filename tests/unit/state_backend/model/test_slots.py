"""A key's slot is the one that Redis Cluster gives it, and its position follows from the slot."""

from __future__ import annotations

from random import Random

import pytest
from redis.crc import key_slot

from state_backend.model.slots import (
    POSITION_BYTES,
    POSITIONS,
    SLOTS,
    field_hash_position,
    hash_position,
    slot_at,
    slot_of,
    store_key_of,
    store_keys_of,
)


def random_keys(count: int) -> list[bytes]:
    random = Random(7)
    alphabet = b"{}{}ab:\x00\xff"
    return [bytes(random.choices(alphabet, k=random.randrange(12))) for _ in range(count)]


@pytest.mark.parametrize(("key", "slot"), [(b"foo", 12182), (b"a{}b{c}", 7353), (b"", 0), (b"123456789", 0x31C3)])
def test_slot_equals_cluster_keyslot_of_redis(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_every_slot_is_one_that_redis_py_computes() -> None:
    for key in random_keys(20_000):
        assert slot_of(key) == key_slot(key), key


def test_only_first_hash_tag_that_is_not_empty_counts() -> None:
    assert slot_of(b"{user}1") == slot_of(b"x{user}2{other}") == slot_of(b"user")
    assert slot_of(b"{}user") != slot_of(b"user")
    assert slot_of(b"{user") != slot_of(b"user")


def test_positions_are_in_slot_order_and_fit_cursor_that_is_float() -> None:
    for key in random_keys(2_000):
        position = hash_position(key)
        assert slot_at(position) == slot_of(key) < SLOTS
        assert position < POSITIONS <= 2**53
        assert int(float(position)) == position


def test_place_is_position_in_big_endian_bytes() -> None:
    for key in random_keys(2_000):
        assert store_key_of(key) == hash_position(key).to_bytes(POSITION_BYTES, "big")


def test_field_position_fits_cursor() -> None:
    assert all(0 <= field_hash_position(key) < 2**48 for key in random_keys(1_000))


def test_places_of_many_keys_are_those_of_each() -> None:
    keys = list(random_keys(2_000))
    for some in (keys, [key for key in keys if b"{" not in key], []):
        assert list(store_keys_of(some)) == [store_key_of(key) for key in some]
