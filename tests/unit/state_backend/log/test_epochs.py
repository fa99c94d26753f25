"""The file of an epoch round-trips; a damaged or newer one is an error."""

from __future__ import annotations

import json

import pytest

from state_backend.log.checked_json import with_checksum
from state_backend.log.epochs import (
    ChangeFile,
    Epoch,
    EpochRef,
    rows_of_slots,
    runs_in,
    slots_of_run,
    to_stream,
)
from state_backend.model.errors import LogCorruptError, NewerFormatError
from state_backend.model.records import Change, Op, changes_in, runs_of
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import slot_of

EPOCH = Epoch(
    epoch=7,
    term=3,
    previous=EpochRef(6, 2),
    clock_ms=1_700_000_000_000,
    rows=5,
    digest=2**64 - 1,
    replaces=("temp",),
    description=2,
    files=(ChangeFile("7-ab.arrow", 1000, 12345, 4, ((0, 10, 3), (10, 16383, 1))),),
    inline=(b"\x00\xff", b""),
    origin=4,
    format=2,
    log_bytes=5000,
    slots=SlotSet.of([(0, 99)]),
    offsets=('{"0": 7}', "9"),
    state_bytes={"temp": 70, "none": 0},
)


@pytest.mark.parametrize("epoch", [EPOCH, Epoch(epoch=0, term=1, previous=None, clock_ms=1)])
def test_epoch_round_trips(epoch: Epoch) -> None:
    assert Epoch.from_bytes(epoch.to_bytes(), "7.json") == epoch


@pytest.mark.parametrize("kept", [0, 1, 100, -2])
def test_truncated_file_is_reported_by_its_name(kept: int) -> None:
    with pytest.raises(LogCorruptError, match=r"log/7\.json"):
        Epoch.from_bytes(EPOCH.to_bytes()[:kept], "log/7.json")


def test_every_changed_value_breaks_checksum() -> None:
    content = json.loads(EPOCH.to_bytes())
    for name in content:
        changed = json.dumps(content | {name: "other"}).encode()
        with pytest.raises(LogCorruptError):
            Epoch.from_bytes(changed, "7.json")


@pytest.mark.parametrize("content", [b"[]", b"null", b"7", b"{}", b'{"checksum": 1}', b"\xff\xfe", b""])
def test_any_other_content_is_corrupt_and_nothing_else(content: bytes) -> None:
    with pytest.raises(LogCorruptError):
        Epoch.from_bytes(content, "7.json")


def test_epoch_of_newer_format_is_error_that_names_upgrade() -> None:
    newer = json.loads(EPOCH.to_bytes())
    newer["format"] = 5
    del newer["checksum"]
    with pytest.raises(
        NewerFormatError, match=r"7.json has format 5, which sparkis .* wrote; .* reads up to format 4: "
    ):
        Epoch.from_bytes(with_checksum(newer), "7.json")


def test_epoch_of_older_version_without_size_has_none() -> None:
    older = json.loads(EPOCH.to_bytes())
    del older["log_bytes"], older["checksum"]
    content = with_checksum(older)
    assert Epoch.from_bytes(content, "7.json").log_bytes == 0


def test_runs_come_back_from_stream() -> None:
    runs = list(runs_of([Change("temp", Op.PUT, b"%d" % number, None, b"v") for number in range(10)], ["temp"]))
    assert list(runs_in(to_stream(runs * 2))) == runs * 2


def test_run_has_its_first_and_last_slot() -> None:
    keys = [b"%d" % number for number in range(10)]
    (run,) = runs_of([Change("temp", Op.PUT, key, None, b"v") for key in keys], ["temp"])
    slots = sorted(map(slot_of, keys))
    assert slots_of_run(run) == (slots[0], slots[-1], 10)


def test_rows_of_slots_are_those_of_their_keys_in_runs_order() -> None:
    keys = [b"%d" % number for number in range(50)]
    (run,) = runs_of([Change("temp", Op.PUT, key, None, b"v") for key in keys], ["temp"])
    slots = sorted(map(slot_of, keys))
    ranges = [(slots[3], slots[3]), (slots[10], slots[20]), (slots[-1], 16383)]
    rows = rows_of_slots(run, SlotSet.of(ranges))
    inside = [key for key in keys if any(first <= slot_of(key) <= last for first, last in ranges)]
    assert [each.key for each in changes_in(rows)] == sorted(inside, key=slot_of)
    assert rows_of_slots(run, SlotSet.of([(0, 16383)])) is run
