"""The owners of keys: exact, sticky and persisted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.routing.format_patterns import glob_of, key_pattern
from resp_server.backends.routing.ownership import (
    JobOwnership,
    NewFormat,
    Ownership,
    OwnershipChange,
    OwnershipError,
    UnknownJobError,
)
from resp_server.backends.routing.rules import Rules, parse_rules
from resp_server.protocol.glob import matcher
from state_backend.model.descriptor import KeyFormat
from state_backend.model.errors import SparkisError

FORMATS = {"job": {"speed": "job:speed:<car>", "apdex": "dash/<account>/apdex"}, "other": {"total": "total"}}


def owners(path: Path | None = None) -> Ownership:
    made = Ownership(path)
    made.learn(FORMATS)
    return made


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        (b"job:speed:1", "job:speed"),
        (b"job:speed:", "job:speed"),
        (b"job:speed:\xff\n:x", "job:speed"),
        (b"dash/1/apdex", "job:apdex"),
        (b"dash//apdex", "job:apdex"),
        (b"dash/a/b/apdex", "job:apdex"),
        (b"total", "other:total"),
        *((key, None) for key in (b"", b"job:speed", b"job:other:1", b"dash/1", b"dash/1/apdex/", b"dash/1/apdex\n")),
        *((key, None) for key in (b"xdash/1/apdex", b"total\n", b"totals", b"Total", b"dash/apdex")),
    ],
)
def test_key_is_owned_if_whole_key_fits_format(key: bytes, owner: str | None) -> None:
    assert owners().owner_of(key) == owner


column = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=4)


@given(
    st.lists(column, min_size=2, max_size=4).filter(lambda literals: all(literals[1:-1])),
    st.lists(st.binary(max_size=4), min_size=3, max_size=3),
)
def test_every_key_of_format_is_owned(literals: list[str], values: list[bytes]) -> None:
    text = "<c>".join(literals)
    owned = Ownership()
    owned.learn({"j": {"s": text}})
    columns = [*values[: len(literals) - 1], b""]
    key = b"".join(literal.encode() + value for literal, value in zip(literals, columns, strict=True))
    assert owned.owner_of(key) == "j:s"


def test_literals_between_columns_count() -> None:
    assert key_pattern(KeyFormat.parse("a/<x>/b/<y>")) == rb"a/(?>.*?/b/).*\Z"


def test_key_is_matched_in_a_time_proportional_to_its_length() -> None:
    owned = Ownership()
    owned.learn({"job": {"s": ":".join(f"<c{number}>" for number in range(8)) + ":end"}})
    assert owned.owner_of(b":" * 100_000) is None and owned.owner_of(b":" * 100_000 + b"end") == "job:s"


def test_format_with_longer_literal_start_names_owner() -> None:
    owned = Ownership()
    owned.learn({"wide": {"s": "a:<x>"}, "narrow": {"s": "a:b:<x>"}})
    assert [owned.owner_of(key) for key in (b"a:b:1", b"a:c")] == ["narrow:s", "wide:s"]


def test_formats_are_added_and_none_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    owned = owners(path)
    owned.learn({"job": {"speed": "v2:speed:<car>"}})
    owned.learn({})
    owned.complete()
    for each in (owned, Ownership(path)):
        assert each.owner_of(b"job:speed:1") == each.owner_of(b"v2:speed:1") == "job:speed"
        assert each.owner_of(b"total") == "other:total" and each.count == 4


def test_owners_are_known_from_file_or_when_all_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    owned = Ownership(path)
    assert not owned.is_known
    owned.learn(FORMATS)
    assert not owned.is_known and not Ownership(path).is_known  # another server may have more
    owned.complete()
    assert owned.is_known and Ownership(path).is_known


def test_all_keys_are_upstreams_without_states_also_after_restart(tmp_path: Path) -> None:
    Ownership(tmp_path / "owners.json").complete()
    assert Ownership(tmp_path / "owners.json").is_known and Ownership(tmp_path / "owners.json").owner_of(b"a") is None


def test_wrong_format_changes_nothing(tmp_path: Path) -> None:
    owned = owners(tmp_path / "owners.json")
    with pytest.raises(SparkisError):
        owned.learn({"job": {"good": "g:<a>", "bad": "<a><b>"}})
    assert owned.owner_of(b"g:1") is None and Ownership(tmp_path / "owners.json").owner_of(b"g:1") is None


def test_unwritable_file_of_owners_is_reported_and_keys_are_owned(tmp_path: Path) -> None:
    owned = owners(tmp_path / "missing" / "owners.json")
    owned.complete()
    assert owned.owner_of(b"total") == "other:total" and "missing" in owned.error


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"format": 1}', '{"format": 1, "jobs": {}}'),
        '{"format": 1, "jobs": {"j": {"s": ["<a><b>"]}}, "released": []}',
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "owners.json").write_text(text)
    with pytest.raises(OwnershipError, match="is no file of key owners"):
        Ownership(tmp_path / "owners.json")


def test_file_of_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "owners.json").write_text(json.dumps({"format": 2, "sparkis": "0.7.0", "jobs": {}}))
    with pytest.raises(
        OwnershipError, match=r"has format 2, which sparkis 0.7.0 wrote; .* reads up to format 1: upgrade"
    ):
        Ownership(tmp_path / "owners.json")


NEW = {"new": {"total": "sum:<day>", "mean": "mean/<day>"}}
TOTAL, MEAN = NewFormat("new", "total", "sum:<day>"), NewFormat("new", "mean", "mean/<day>")


def known(path: Path | None = None) -> tuple[Ownership, list[NewFormat], list[OwnershipChange]]:
    """Return complete owners, the formats to check, and the changes of owners."""
    made, new, changes = owners(path), [], []  # type: ignore[var-annotated]
    made.complete()
    made.on_new = new.extend
    made.on_changed = changes.append
    return made, new, changes


def test_new_format_is_checked_before_it_is_owned() -> None:
    owned, new, changes = known()
    owned.learn(FORMATS | NEW)
    owned.learn(NEW)  # it is checked once
    assert new == [TOTAL, MEAN] and owned.owner_of(b"sum:1") is None and not changes
    assert owned.jobs()[-1] == JobOwnership("other", "owned", ["total"])
    assert owned.info_fields()["ownership_checking"] == "new"
    owned.settle(TOTAL, [])
    assert owned.owner_of(b"sum:1") == "new:total" and owned.owner_of(b"mean/1") is None
    assert [(each.affects(b"sum:1"), each.affects(b"total")) for each in changes] == [(True, False)]


def test_new_format_of_upstreams_keys_waits_for_confirmation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    owned, _, changes = known(tmp_path / "owners.json")
    owned.learn(NEW)
    owned.settle(TOTAL, [b"sum:1", b"sum:2"])
    owned.settle(MEAN, [])
    assert owned.owner_of(b"sum:1") is None and owned.owner_of(b"mean/1") == "new:mean"
    assert JobOwnership("new", "waiting", ["sum:<day>"], [b"sum:1", b"sum:2"]) in owned.jobs()
    assert owned.info_fields()["ownership_waiting"] == "new"
    (line,) = [each.getMessage() for each in caplog.records if "stay the upstream's" in each.getMessage()]
    assert "sum:<day>" in line and "'sum:1', 'sum:2'" in line and "sparkis confirm new" in line
    assert owned.confirm("new") == ["mean/<day>", "sum:<day>"]
    assert owned.owner_of(b"sum:1") == Ownership(tmp_path / "owners.json").owner_of(b"sum:1") == "new:total"
    assert changes[-1].affects(b"sum:1") and owned.info_fields()["ownership_waiting"] == ""


def test_waiting_format_is_checked_again_after_restart(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    owned, new, _ = known(path)
    owned.learn(NEW)
    owned.settle(TOTAL, [b"sum:1"])
    again = Ownership(path)
    again.on_new = new.extend
    again.learn(FORMATS | NEW)
    assert new == [TOTAL, MEAN, TOTAL, MEAN] and again.owner_of(b"sum:1") is None


def test_new_formats_are_taken_at_once_by_choice_or_at_first() -> None:
    for owned in (Ownership(checks_new=False), Ownership()):
        if not owned._checks_new:
            owned.complete()
        owned.learn(NEW)
        assert owned.owner_of(b"sum:1") == "new:total"


def test_released_jobs_keys_are_upstreams_until_it_is_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    owned, new, changes = known(path)
    assert owned.release("job") == ["dash/<account>/apdex", "job:speed:<car>"]
    owned.learn(FORMATS)  # the job still runs
    owned.learn({"job": {"speed": "v2:speed:<car>"}})
    for each in (owned, Ownership(path)):
        assert [each.owner_of(key) for key in (b"job:speed:1", b"v2:speed:1", b"total")] == [None, None, "other:total"]
        assert each.info_fields()["ownership_released"] == "job"
    assert changes[-1].affects(b"dash/1/apdex") and not changes[-1].affects(b"total") and not new
    owned.confirm("job")
    for each in (owned, Ownership(path)):
        assert each.owner_of(b"v2:speed:1") == each.owner_of(b"job:speed:1") == "job:speed"


def test_released_waiting_job_ignores_late_check() -> None:
    owned, _, _ = known()
    owned.learn(NEW)
    owned.release("new")
    owned.settle(TOTAL, [])
    assert owned.owner_of(b"sum:1") is None and owned.info_fields()["ownership_checking"] == ""
    owned.confirm("new")
    assert owned.owner_of(b"sum:1") == "new:total"


@pytest.mark.parametrize("change", [Ownership.confirm, Ownership.release])
def test_unknown_job_is_error_that_names_known_ones(change: Callable[[Ownership, str], object]) -> None:
    with pytest.raises(UnknownJobError, match="no such job 'nope'; jobs: job, other"):
        change(owners(), "nope")


def test_unowned_key_that_fits_new_format_is_conflict() -> None:
    owned, _, _ = known()
    is_in_question = owned.is_in_question(NewFormat("new", "s", "job:<x>"))
    assert [is_in_question(key) for key in (b"job:1", b"job:speed:1", b"xjob:1")] == [True, False, False]


@given(st.lists(column, min_size=2, max_size=3).filter(lambda literals: all(literals[1:-1])), st.binary(max_size=4))
def test_glob_of_format_matches_its_keys(literals: list[str], value: bytes) -> None:
    key_format = KeyFormat.parse("<c>".join(literals))
    assert matcher(glob_of(key_format))(value.join(literal.encode() for literal in key_format.literals))


def ruled(text: str) -> Rules:
    """Return rules, given as lines of keys and owner."""
    rows = [line.split(" ") for line in text.splitlines()]
    return parse_rules("".join(f'[[rule]]\nkeys = "{keys}"\nowner = "{owner}"\n' for keys, owner in rows), "rules")


def test_rules_precede_key_formats_and_each_change_of_owners_is_announced() -> None:
    owned, _, changes = known()
    owned.take_rules(ruled("job:speed:<car> upstream\nmine:<x> state"))
    assert [owned.owner_of(key) for key in (b"job:speed:1", b"mine:1", b"total")] == [None, "", "other:total"]
    assert [changes[-1].affects(key) for key in (b"job:speed:1", b"mine:1", b"total", b"x")] == [
        True,
        True,
        False,
        False,
    ]
    owned.take_rules([])
    assert [owned.owner_of(key) for key in (b"job:speed:1", b"mine:1")] == ["job:speed", None]
    assert len(changes) == 2 and changes[-1].affects(b"mine:1")


def test_rule_that_covers_new_format_settles_it(tmp_path: Path) -> None:
    owned, new, _ = known(tmp_path / "owners.json")
    owned.take_rules(ruled("sum:<x> state\nmean/<x> upstream"))
    owned.learn(NEW)
    assert new == [] and owned.info_fields()["ownership_waiting"] == owned.info_fields()["ownership_checking"] == ""
    assert JobOwnership("new", "owned", ["sum:<day>"]) in owned.jobs()
    assert JobOwnership("new", "ruled", ["mean/<day>"]) in owned.jobs()
    owned.take_rules([])
    assert owned.owner_of(b"sum:1") == Ownership(tmp_path / "owners.json").owner_of(b"sum:1") == "new:total"
    assert new == [MEAN] and owned.owner_of(b"mean/1") is None  # nothing decides about it any more, so it is checked


def test_rule_settles_format_that_waits_and_one_that_is_being_checked() -> None:
    owned, new, _ = known()
    owned.learn(NEW)
    owned.settle(TOTAL, [b"sum:1"])
    owned.take_rules(ruled("sum:<x> state\nmean/<x> upstream"))
    assert owned.owner_of(b"sum:1") == "new:total" and owned.info_fields()["ownership_waiting"] == ""
    owned.settle(MEAN, [])
    assert owned.owner_of(b"mean/1") is None and JobOwnership("new", "ruled", ["mean/<day>"]) in owned.jobs()
    owned.take_rules([])
    owned.settle(MEAN, [])
    assert new == [TOTAL, MEAN, MEAN] and owned.owner_of(b"mean/1") == "new:mean"


def test_rule_for_some_keys_of_new_format_settles_only_these() -> None:
    owned, new, _ = known()
    owned.take_rules(ruled("sum:9<x> upstream"))
    owned.learn(NEW)
    assert new == [TOTAL, MEAN]
    assert [owned.is_in_question(TOTAL)(key) for key in (b"sum:1", b"sum:91")] == [True, False]
