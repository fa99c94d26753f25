"""What a user sees of a keyspace: jobs, states, keys and numbers of keys, and nothing of what it may not read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resp_server.acl.user import User
from resp_server.acl.visibility import RANDOM_TRIES, Coverage, Visibility
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import SlotSet
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore
from state_backend.store.slot_view import SlotView
from tests.builders import apply_epoch

NOW_MS = 1_700_000_000_000
JOBS = {
    "mine": [
        StateDescriptor("text", key="k", value="v"),
        StateDescriptor("list", key="k", value="v", kind="list"),
        StateDescriptor("part", value="v", key_format="part:<k>"),
        StateDescriptor("none", key="k", value="v"),
    ],
    "rival": [StateDescriptor("text", key="k", value="v")],
}
KEYS = {
    "mine": {"text": [b"mine:text:%d" % n for n in range(5)], "list": [b"mine:list:a"], "part": [b"part:a", b"part:b"]},
    "rival": {"text": [b"rival:text:%d" % n for n in range(700)]},
}
MINE = {key for keys in KEYS["mine"].values() for key in keys}
RIVALS = set(KEYS["rival"]["text"])


def job(name: str) -> Job:
    changes = [
        Change(state, Op.APPEND if state == "list" else Op.PUT, key, value=b"x")
        for state, keys in KEYS[name].items()
        for key in keys
    ]
    store = MemoryStore(name)
    apply_epoch(store, JOBS[name], changes, 4, clock_ms=NOW_MS)
    return Job(name, name, JOBS[name], store, committed_epoch=4, error=f"{name} is broken")


@pytest.fixture
def keyspace() -> Keyspace:
    found = Keyspace()
    for name in JOBS:
        found.put(job(name))
    return found


@pytest.fixture
def seen(keyspace: Keyspace) -> Callable[[str], Visibility]:
    """What a user with these rules sees of the jobs `mine` and `rival`."""

    def of(rules: str) -> Visibility:
        user = User(b"u")
        user.apply_all(rules.encode().split())
        return Visibility(user, keyspace.view(NOW_MS))

    return of


def scanned(visibility: Visibility, kinds: tuple[Kind, ...] | None = None) -> set[bytes]:
    cursor, found = visibility.scan(0, 100, kinds)
    while cursor:
        cursor, keys = visibility.scan(cursor, 100, kinds)
        found += keys
    assert len(found) == len(set(found))
    return set(found)


def test_user_with_all_keys_sees_all_jobs(seen: Callable[[str], Visibility]) -> None:
    for rules in ("~*", "%R~*", "%W~x %R~*"):
        everything = seen(rules)
        assert everything.sees_all
        assert scanned(everything) == MINE | RIVALS
        assert everything.key_count() == len(MINE | RIVALS)
        assert [(each.job.name, each.keys, each.countable_keys) for each in everything.jobs()] == [
            ("mine", 8, 8),
            ("rival", 700, 700),
        ]
        assert [[state.name for state in each.states] for each in everything.jobs()] == [
            ["text", "list", "part", "none"],
            ["text"],
        ]
        assert all(each.is_fully_visible and each.error == f"{each.job.name} is broken" for each in everything.jobs())
        assert everything.sees("mine") and everything.sees("rival")
        first = next(iter(everything.jobs()))
        assert [first.keys_of(name) for name in ("text", "list", "part", "none")] == [5, 1, 2, 0]
        assert first.bytes_of("text") is None, "there is no snapshot"
        first.job.state_bytes = {"text": 70}
        assert [first.bytes_of(name) for name in ("text", "none")] == [70, 0]
        first.job.state_bytes = None


def test_user_without_readable_keys_sees_nothing(seen: Callable[[str], Visibility]) -> None:
    for rules in ("", "%W~*", "~other:*"):
        nothing = seen(rules)
        assert not nothing.sees_all
        assert scanned(nothing) == set()
        assert nothing.key_count() == 0
        assert list(nothing.jobs()) == []
        assert not nothing.sees("mine") and not nothing.sees("rival")
        assert list(nothing.random_keys()) == []


def test_user_of_one_job_sees_that_job_and_no_other(seen: Callable[[str], Visibility]) -> None:
    own = seen("~mine:* ~part:*")
    assert own.sees("mine") and not own.sees("rival")
    assert scanned(own) == MINE
    assert own.key_count() == 8
    [visible] = own.jobs()
    assert visible.job.name == "mine"
    assert visible.is_fully_visible and visible.keys == visible.countable_keys == 8
    assert visible.error == "mine is broken"
    assert visible.applied.epoch == 4


def test_state_without_readable_keys_is_not_seen(seen: Callable[[str], Visibility]) -> None:
    [visible] = seen("~mine:*").jobs()
    assert [state.name for state in visible.states] == ["text", "list", "none"]
    assert not visible.is_fully_visible
    assert visible.keys == visible.countable_keys == 6
    assert visible.keys_of("part") is None
    assert visible.error == "see the server's log"
    visible.job.error = ""
    assert visible.error == ""


def test_keys_of_partly_visible_state_are_listed_and_have_to_be_counted(seen: Callable[[str], Visibility]) -> None:
    some = seen("~mine:* ~part:a")
    [visible] = some.jobs()
    assert [state.name for state in visible.states] == ["text", "list", "part", "none"]
    assert visible.coverage == {
        "text": Coverage.ALL,
        "list": Coverage.ALL,
        "none": Coverage.ALL,
        "part": Coverage.SOME,
    }
    assert (visible.keys, visible.countable_keys, visible.keys_of("part"), visible.keys_of("text")) == (
        None,
        6,
        None,
        5,
    )
    visible.job.state_bytes = {"text": 70, "part": 20}
    assert (visible.bytes_of("text"), visible.bytes_of("part")) == (70, None)
    assert scanned(some) == MINE - {b"part:b"}
    assert scanned(some, (Kind.LIST,)) == {b"mine:list:a"}
    assert some.key_count() is None
    assert sum(some.key_counts()) == 7


def test_counts_of_several_jobs_are_added_up(seen: Callable[[str], Visibility]) -> None:
    assert seen("~mine:* ~part:* ~rival:*").key_count() == len(MINE | RIVALS)
    assert seen("~mine:* ~rival:text:1*").key_count() is None


def test_view_of_some_slots_has_to_be_counted(keyspace: Keyspace) -> None:
    view = SlotView(keyspace, SlotSet.parse("0-8191"), NOW_MS)
    visibility = Visibility(User.default(), view)
    assert visibility.key_count() is None
    assert 0 < sum(visibility.key_counts()) < len(MINE | RIVALS)


def test_random_key_is_one_that_user_may_read(seen: Callable[[str], Visibility]) -> None:
    """One key of 708 is visible, so nearly all random tries miss, and a scan from a random position finds it."""
    only = seen("~rival:text:7")
    for _ in range(20):
        steps = list(only.random_keys())
        assert next(key for key in steps if key is not None) == b"rival:text:7"
    most = seen("~mine:* ~part:*")
    drawn = {next(key for key in most.random_keys() if key is not None) for _ in range(600)}
    assert drawn == MINE


def test_random_key_of_all_is_drawn_from_all_jobs(seen: Callable[[str], Visibility]) -> None:
    everything = seen("~*")
    drawn = {next(key for key in everything.random_keys() if key is not None) for _ in range(RANDOM_TRIES)}
    assert drawn <= MINE | RIVALS and len(drawn) > 1
