"""Divides a job's full state among change files of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar

from state_backend.log.change_files import STATE_FILE_BYTES_MAX

Item = TypeVar("Item")


def split_into_files(
    items: Iterable[Item], size_of: Callable[[Item], int], ends_of: Callable[[Item], tuple[object, object]]
) -> Iterator[Iterator[Item]]:
    """Divide items among files; iterate over the items of each file.

    The caller consumes the items of a file before it takes the next file.

    Args:
        ends_of: The first and the last slot, or key, of an item. A file ends after `STATE_FILE_BYTES_MAX` bytes, but
            not between two items that share a slot or key.
    """
    number = size = 0
    last: object = None

    def file_of(item: Item) -> int:
        nonlocal number, size, last
        first, last_of_item = ends_of(item)
        if size > STATE_FILE_BYTES_MAX and first != last:
            number, size = number + 1, 0
        size, last = size + size_of(item), last_of_item
        return number

    return (items_of_file for _, items_of_file in groupby(items, file_of))
