"""ACL LOG: equal denials are one entry for a minute, and the newest come first."""

from __future__ import annotations

from typing import Any

import pytest

from resp_server.acl.denial import Reason
from resp_server.acl.log import GROUPED_ENTRIES_MAX, GROUPING_MS_MAX, OBJECT_BYTES_MAX, DenialLog, merge_entries

NOW_MS = 1_700_000_000_000


def deny(log: DenialLog, now_ms: int = NOW_MS, **other: Any) -> None:
    denial: dict[str, Any] = {"is_queued": False, "object_name": b"get", "user": b"u", "client": "one"} | other
    log.add(denial.pop("reason", Reason.COMMAND), now_ms=now_ms, entries_max=denial.pop("entries_max", 128), **denial)


@pytest.mark.parametrize(
    ("reason", "text"),
    [(Reason.COMMAND, "command"), (Reason.KEY, "key"), (Reason.AUTH, "auth"), (Reason.CHANNEL, "channel")],
)
def test_entry_has_all_that_is_known_of_denial(reason: Reason, text: str) -> None:
    log = DenialLog()
    deny(log, reason=reason, is_queued=True, object_name=b"\xff" * 2000, user=b"\xfe" * 2000)
    assert log.to_json() == [
        {
            "reason": text,
            "context": "multi",
            "object": "\xff" * OBJECT_BYTES_MAX,
            "user": "\xfe" * OBJECT_BYTES_MAX,
            "client": "one",
            "entry_id": 0,
            "created_ms": NOW_MS,
            "updated_ms": NOW_MS,
            "count": 1,
        }
    ]


def test_equal_denial_within_a_minute_is_counted_and_comes_first_again() -> None:
    log = DenialLog()
    deny(log)
    deny(log, object_name=b"mget")
    deny(log, NOW_MS + GROUPING_MS_MAX, client="two")
    deny(log, NOW_MS + 2 * GROUPING_MS_MAX, client="three")
    first, second = log.entries
    assert (first.object, first.count, first.client, first.entry_id) == ("get", 3, "three", 0)
    assert (first.created_ms, first.updated_ms) == (NOW_MS, NOW_MS + 2 * GROUPING_MS_MAX)
    assert (second.object, second.count, second.context) == ("mget", 1, "toplevel")


@pytest.mark.parametrize(
    "other",
    [
        {"reason": Reason.KEY},
        {"is_queued": True},
        {"object_name": b"set"},
        {"user": b"v"},
        {"now_ms": NOW_MS + GROUPING_MS_MAX + 1},
        {"now_ms": NOW_MS - GROUPING_MS_MAX - 1},
    ],
)
def test_another_denial_is_another_entry(other: dict[str, Any]) -> None:
    log = DenialLog()
    deny(log)
    deny(log, **other)
    deny(log, object_name=b"a third one")
    assert [(each.entry_id, each.count) for each in log.entries] == [(2, 1), (1, 1), (0, 1)]


def test_only_newest_entries_are_compared() -> None:
    log = DenialLog()
    for number in range(GROUPED_ENTRIES_MAX + 1):
        deny(log, object_name=b"%d" % number)
    deny(log, object_name=b"1")
    deny(log, object_name=b"0")
    assert [each.count for each in log.entries if each.object == "1"] == [2]
    assert [each.count for each in log.entries if each.object == "0"] == [1, 1]


def test_oldest_entries_are_removed_above_limit_and_all_by_reset() -> None:
    log = DenialLog()
    for number in range(4):
        deny(log, object_name=b"%d" % number, entries_max=2)
    assert [each.object for each in log.entries] == ["3", "2"]
    log.reset()
    assert log.entries == []


def test_entries_of_several_processes_are_merged_by_their_time() -> None:
    logs = [DenialLog(), DenialLog()]
    for number in range(4):
        deny(logs[number % 2], NOW_MS + number, object_name=b"%d" % number)
    assert [each.object for each in merge_entries([each.to_json() for each in logs])] == ["3", "2", "1", "0"]
