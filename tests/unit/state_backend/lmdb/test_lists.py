"""Long lists in an LMDB store: ranges, appended elements, and blocks that are removed with their elements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.codec import packed_list
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges

NEWS = StateDescriptor("news", key="k", value="v", kind="list").for_job("job")
LAST = StateDescriptor("last", key="k", value="v", kind="list", length_max=300).for_job("job")
STATES = (NEWS, LAST)


class Lists:
    """A store with lists."""

    def __init__(self, path: Path) -> None:
        self.store = LmdbStore(path, "g")

    def apply(self, *changes: Change, clock_ms: int = 1) -> int:
        runs = list(runs_of(changes, [state.name for state in STATES]))
        return self.store.apply(EpochChanges(self.store.applied.epoch + 1, 1, clock_ms, runs), STATES)

    def append(self, elements: list[bytes], state: str = "news", expire_at_ms: int | None = None) -> None:
        self.apply(*(Change(state, Op.APPEND, b"k", None, element, expire_at_ms) for element in elements))

    def read(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        with self.store.snapshot(1) as snapshot:
            stop = snapshot.list_size(b"k") if stop is None else stop
            found = list(snapshot.list_elements(b"k", start, stop))
            parts = b"".join(snapshot.list_bulk_strings(b"k", start, stop))
            assert parts == b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in found)
            return found

    @property
    def blocks(self) -> int:
        with self.store.begin() as txn:
            return int(txn.stat(self.store.tables.blocks)["entries"])


@pytest.fixture
def lists(tmp_path: Path) -> Iterator[Lists]:
    made = Lists(tmp_path / "store")
    yield made
    made.store.close()


def texts(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


@pytest.mark.parametrize("sizes", [(1000,), (1, 127, 1, 1, 127, 128, 300), (128, 129), (129, 128, 127)])
def test_elements_come_after_those_that_are_there(lists: Lists, sizes: tuple[int, ...]) -> None:
    end = 0
    for size in sizes:
        lists.append(texts(end, end + size))
        end += size
        assert lists.read() == texts(0, end)
    for start, stop in ((0, 1), (127, 129), (end - 1, end), (100, end - 20), (5, 5)):
        assert lists.read(start, stop) == texts(start, stop)
    # Full blocks, and one that is filled next time.
    assert lists.blocks == (-(-end // packed_list.ELEMENTS_MAX) if end > packed_list.ELEMENTS_MAX else 0)


def test_blocks_of_long_elements_have_fewer_of_them(lists: Lists) -> None:
    elements = [b"%03d" % number * 1000 for number in range(20)]
    lists.append(elements)
    assert lists.read() == elements
    assert lists.blocks == 7  # three of 3,000 bytes exceed a block's 8 KiB


def test_list_of_limited_length_keeps_last_elements(lists: Lists) -> None:
    for end in range(0, 2000, 70):
        lists.append(texts(end, end + 70), "last")
        assert lists.read() == texts(max(0, end - 230), end + 70)
        assert lists.blocks <= 300 // packed_list.ELEMENTS_MAX + 2
    lists.append(texts(0, 5000), "last")
    assert lists.read() == texts(4700, 5000)
    assert lists.blocks <= 300 // packed_list.ELEMENTS_MAX + 2


def test_blocks_of_another_list_stay(lists: Lists) -> None:
    other = [Change("last", Op.APPEND, b"other", None, text) for text in texts(0, 250)]
    lists.apply(*other)
    lists.append(texts(0, 2000), "last")
    lists.apply(*other)
    with lists.store.snapshot(1) as snapshot:
        assert list(snapshot.list_elements(b"other", 0, 300)) == [*texts(0, 250), *texts(0, 250)][-300:]
    assert lists.read() == texts(1700, 2000)


@pytest.mark.parametrize("size", [3, 500])
def test_replaced_deleted_or_expired_list_is_empty_before_next_row(lists: Lists, size: int) -> None:
    lists.append(texts(0, size))
    lists.apply(Change("news", Op.PUT, b"k", None, packed_list.pack([b"a", b"b"])))
    assert lists.read() == [b"a", b"b"]
    lists.append(texts(0, size))
    lists.apply(Change("news", Op.DELETE, b"k"), Change("news", Op.APPEND, b"k", None, b"x"))
    assert lists.read() == [b"x"]
    lists.append(texts(0, size))
    lists.apply(Change("news", Op.APPEND, b"k", None, b"old", 1), Change("news", Op.APPEND, b"k", None, b"y"))
    assert lists.read() == [b"y"]  # the first append had expired when it was made
    lists.append(texts(0, size))
    assert lists.apply(Change("news", Op.DELETE, b"k")) == 1
    assert lists.read() == []
    while lists.store.expire(1, 1000):
        pass
    assert lists.blocks == 0
    assert lists.apply(Change("news", Op.DELETE, b"k")) == 0


def test_append_that_is_put_counts_as_change(lists: Lists) -> None:
    assert lists.apply(*(Change("news", Op.APPEND, b"k", None, text) for text in texts(0, 500))) == 1
    assert lists.apply(Change("news", Op.APPEND, b"k", None, b"x")) == 1
    assert lists.apply(Change("news", Op.PUT, b"k", None, packed_list.pack([b"x"]))) == 1
    assert lists.apply(Change("news", Op.PUT, b"k", None, packed_list.pack([b"x"]))) == 0
