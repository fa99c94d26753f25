"""The keys that an epoch changed, each once; too many are not kept at all."""

from __future__ import annotations

import pytest

from state_backend.store import changed_keys
from state_backend.store.changed_keys import KEY_OVERHEAD_BYTES, UNKNOWN, ChangedKeys, unpack, unpack_all


def packed(*keys: bytes) -> bytes:
    changed = ChangedKeys()
    for key in keys:
        changed.add(key)
    return changed.pack()


@pytest.mark.parametrize("keys", [[], [b""], [b"a"], [b"a", b"", b"\0\xff" * 300, b"b"]])
def test_keys_come_back_in_their_order(keys: list[bytes]) -> None:
    assert unpack(packed(*keys)) == keys


def test_key_that_changed_twice_is_listed_once() -> None:
    assert unpack(packed(b"a", b"b", b"a")) == [b"a", b"b"]


def test_too_many_keys_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_keys, "KEYS_BYTES_MAX", 3 * (KEY_OVERHEAD_BYTES + 1))
    assert unpack(packed(b"a", b"b", b"c")) == [b"a", b"b", b"c"]
    assert packed(b"a", b"b", b"c", b"d") == UNKNOWN
    assert packed(b"a", b"b", b"cc") == UNKNOWN


def test_several_epochs_are_one_difference_if_all_are_known() -> None:
    assert unpack_all([packed(b"a"), packed(), packed(b"b")]) == [b"a", b"b"]
    assert unpack_all([]) == []
    assert unpack_all([packed(b"a"), None]) is None
    assert unpack_all([packed(b"a"), UNKNOWN]) is None


def test_several_epochs_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = packed(b"a" * 100)
    monkeypatch.setattr(changed_keys, "KEYS_BYTES_MAX", 2 * len(one))
    assert unpack_all([one, one]) is not None
    assert unpack_all([one, one, one]) is None
