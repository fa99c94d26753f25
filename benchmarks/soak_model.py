"""The model of `make soak`: each epoch's changes, and the expected replies.

Both follow from the epoch's number, so every process can compute the complete state at any epoch.

    marker      the value of soak:marker:epoch is the epoch's number, so a reader knows which epoch it sees
    value       values, some of which expire
    session     maps that are replaced as a whole, some of which expire
    field       maps changed field by field, some with hundreds of fields, some of which expire
    feed        lists that grow at their end and keep their last elements
    batch       lists that are replaced as a whole, and expire

Keys with an expiry are only replaced, never changed in part. So it does not matter whether an expired key is already
removed when an epoch changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from state_backend.codec import packed_list, packed_map
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

JOB = "soak"
MARKER = f"{JOB}:marker:epoch".encode()
FEED_LENGTH = 300
SIZES = {"value": 5_000, "session": 500, "field": 100, "feed": 50, "batch": 200}
FIELDS = 400
STATES = (
    StateDescriptor("marker", key="key", value="value"),
    StateDescriptor("value", key="key", value="value"),
    StateDescriptor("session", key="key", value=("a", "b", "c")),
    StateDescriptor("field", key="key", field="field", value="value"),
    StateDescriptor("feed", key="key", value="value", kind="list", length_max=FEED_LENGTH, duplicates="any"),
    StateDescriptor("batch", key="key", value="value", kind="list", duplicates="any"),
)
MAPS, LISTS = ("session", "field"), ("feed", "batch")
# One epoch in so many replaces a full state; one in so many of these replaces all states.
REPLACED_EVERY = 40
ALL_REPLACED_EVERY = 5
EXPIRY_MS = (500, 60_000)


@dataclass(frozen=True)
class Plan:
    """The parameters from which all epochs are computed."""

    seed: int
    started_ms: int
    period_ms: int

    def clock_ms(self, epoch: int) -> int:
        """Return an epoch's scheduled time."""
        return self.started_ms + epoch * self.period_ms

    def epoch(self, number: int) -> Epoch:
        """Return an epoch by its number."""
        return _EpochMaker(self, number).epoch()


@dataclass(frozen=True)
class Epoch:
    """One epoch's changes, in their order, and the states that it replaces."""

    number: int
    changes: Sequence[Change]
    replaces: tuple[str, ...]


def key(state: str, number: int) -> bytes:
    """Return a key of a state."""
    return f"{JOB}:{state}:{number}".encode()


class _EpochMaker:
    """Computes one epoch."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._random = Random(plan.seed * 1_000_003 + number)
        self._clock_ms = plan.clock_ms(number)
        self._number = number

    def epoch(self) -> Epoch:
        random = self._random
        replaces: tuple[str, ...] = ()
        if self._number % REPLACED_EVERY == REPLACED_EVERY - 1:
            is_all = self._number // REPLACED_EVERY % ALL_REPLACED_EVERY == ALL_REPLACED_EVERY - 1
            replaces = tuple(SIZES) if is_all else (random.choice(list(SIZES)),)
        changes = [Change("marker", Op.PUT, MARKER, value=b"%d" % self._number)]
        for state, size in SIZES.items():
            share = random.choice((0.5, 0.9, 1.0)) if state in replaces else random.choice((0.0, 0.01, 0.03, 0.1))
            for each in random.sample(range(size), int(size * share)):
                changes += self._changes(state, key(state, each), is_new=state in replaces)
        return Epoch(self._number, changes, replaces)

    def _changes(self, state: str, name: bytes, *, is_new: bool) -> list[Change]:
        random = self._random
        if not is_new and random.random() < 0.1:
            return [Change(state, random.choice((Op.DELETE, Op.CLEAR)), name)]
        match state:
            case "value":
                return [Change(state, Op.PUT, name, value=self._text(), expire_at_ms=self._expiry(0.2))]
            case "session":
                packed = packed_map.pack((each, self._text()) for each in (b"a", b"b", b"c"))
                return [Change(state, Op.PUT, name, value=packed, expire_at_ms=self._expiry(0.3))]
            case "field":
                names = random.sample(range(FIELDS), random.choice((1, 3, 10, 100)))
                return [self._field(name, b"f%d" % each, is_new=is_new) for each in names]
            case "feed":
                return [Change(state, Op.APPEND, name, value=self._text()) for _ in range(random.choice((1, 5, 50)))]
            case _:
                packed = packed_list.pack(self._text() for _ in range(random.choice((1, 20, 200))))
                return [Change(state, Op.PUT, name, value=packed, expire_at_ms=self._expiry(1.0))]

    def _field(self, name: bytes, field_name: bytes, *, is_new: bool) -> Change:
        if not is_new and self._random.random() < 0.3:
            return Change("field", Op.DELETE, name, field_name)
        return Change("field", Op.PUT, name, field_name, self._text(), self._expiry(0.1))

    def _text(self) -> bytes:
        """Return a value that contains its epoch."""
        return b"%d %b" % (self._number, b"x" * self._random.choice((0, 5, 50, 500)))

    def _expiry(self, share: float) -> int | None:
        if self._random.random() >= share:
            return None
        return self._clock_ms + self._random.randint(*EXPIRY_MS)


@dataclass
class StoredValue:
    """The value of a key. Times are milliseconds since 1970; None: never."""

    state: str
    value: bytes | None = None
    fields: dict[bytes, tuple[bytes, int | None]] = field(default_factory=dict)
    elements: list[bytes] = field(default_factory=list)
    expire_at_ms: int | None = None

    def expected(self, now_ms: int) -> object:
        """Return the expected reply: bytes, a dict, a list, or None."""
        if self.expire_at_ms is not None and self.expire_at_ms <= now_ms:
            return None
        if self.value is not None:
            return self.value
        if self.state in LISTS:
            return self.elements
        live = {name: value for name, (value, at_ms) in self.fields.items() if at_ms is None or at_ms > now_ms}
        return live or None

    def is_certain(self, from_ms: int, to_ms: int) -> bool:
        """Return whether no part of the value expires between two times."""
        ends = [self.expire_at_ms, *(at_ms for _, at_ms in self.fields.values())]
        return not any(at_ms is not None and from_ms <= at_ms <= to_ms for at_ms in ends)


class Model:
    """The complete state at an epoch, in a dictionary."""

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan
        self.number = -1
        self.values: dict[bytes, StoredValue] = {}

    def advance(self, number: int) -> None:
        """Advance to an epoch."""
        assert self._plan is not None
        while self.number < number:
            self.apply_epoch(self._plan.epoch(self.number + 1))

    def apply_epoch(self, epoch: Epoch) -> None:
        """Apply one epoch."""
        for name in [name for name, stored in self.values.items() if stored.state in epoch.replaces]:
            del self.values[name]
        self.apply(epoch.changes)
        self.number = epoch.number

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes, one by one."""
        for change in changes:
            stored = self.values.get(change.key)
            if change.op == Op.CLEAR or (change.op == Op.DELETE and change.field is None):
                self.values.pop(change.key, None)
            elif change.field is not None:
                self._apply_to_field(change, stored or StoredValue(change.state))
            elif change.op == Op.APPEND:
                stored = stored or StoredValue(change.state)
                stored.elements = [*stored.elements, change.value or b""][-FEED_LENGTH:]
                stored.expire_at_ms = change.expire_at_ms
                self.values[change.key] = stored
            else:
                self.values[change.key] = _put(change)

    def _apply_to_field(self, change: Change, stored: StoredValue) -> None:
        assert change.field is not None
        if change.op == Op.DELETE:
            stored.fields.pop(change.field, None)
        else:
            stored.fields[change.field] = (change.value or b"", change.expire_at_ms)
        if stored.fields:
            self.values[change.key] = stored
        else:
            self.values.pop(change.key, None)


def _put(change: Change) -> StoredValue:
    content = change.value or b""
    if change.state in LISTS:
        return StoredValue(change.state, elements=packed_list.elements(content), expire_at_ms=change.expire_at_ms)
    if change.state in MAPS:
        fields: dict[bytes, tuple[bytes, int | None]] = {
            name: (value, None) for name, value in packed_map.pairs(content)
        }
        return StoredValue(change.state, fields=fields, expire_at_ms=change.expire_at_ms)
    return StoredValue(change.state, value=content, expire_at_ms=change.expire_at_ms)
