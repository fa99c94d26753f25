"""Names that a store keeps at one position: the hashes of all of them are equal."""

from __future__ import annotations

from state_backend.model.slots import field_hash_position

NAME_BYTES = 8


def names_at_one_position(count: int) -> list[bytes]:
    """Return names of equal length, which `hash_position` and `field_hash_position` cannot tell apart.

    Both hashes are linear: where the hash of a difference is that of no difference, both names have one hash. Such
    differences are found by elimination over the bits of a name.
    """
    nothing = field_hash_position(bytes(NAME_BYTES))
    rows: list[tuple[int, int]] = []  # a hash's difference, and the name's difference that makes it
    equal: list[int] = []
    for bit in range(8 * NAME_BYTES):
        name = 1 << bit
        found = field_hash_position(name.to_bytes(NAME_BYTES, "big")) ^ nothing
        for other, cause in rows:
            if found ^ other < found:
                found, name = found ^ other, name ^ cause
        if found:
            rows.append((found, name))
            rows.sort(reverse=True)
        else:
            equal.append(name)
    assert count < 1 << len(equal)
    names = []
    for number in range(1, count + 1):
        name = int.from_bytes(b"the name", "big")
        for bit, difference in enumerate(equal):
            if number >> bit & 1:
                name ^= difference
        names.append(name.to_bytes(NAME_BYTES, "big"))
    return names
