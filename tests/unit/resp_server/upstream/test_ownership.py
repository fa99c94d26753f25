"""The owners of keys: exact, sticky and persisted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resp_server.upstream.ownership import Ownership, OwnershipError, key_pattern
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
def test_a_key_is_owned_if_the_whole_key_fits_a_format(key: bytes, owner: str | None) -> None:
    assert owners().owner_of(key) == owner


column = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=4)


@given(
    st.lists(column, min_size=2, max_size=4).filter(lambda literals: all(literals[1:-1])),
    st.lists(st.binary(max_size=4), min_size=3, max_size=3),
)
def test_every_key_of_a_format_is_owned(literals: list[str], values: list[bytes]) -> None:
    text = "<c>".join(literals)
    owned = Ownership()
    owned.learn({"j": {"s": text}})
    columns = [*values[: len(literals) - 1], b""]
    key = b"".join(literal.encode() + value for literal, value in zip(literals, columns, strict=True))
    assert owned.owner_of(key) == "j:s"


def test_the_literals_between_columns_count() -> None:
    assert key_pattern(KeyFormat.parse("a/<x>/b/<y>")) == rb"a/.*/b/.*\Z"


def test_of_two_formats_the_one_with_the_longer_literal_start_names_the_owner() -> None:
    owned = Ownership()
    owned.learn({"wide": {"s": "a:<x>"}, "narrow": {"s": "a:b:<x>"}})
    assert [owned.owner_of(key) for key in (b"a:b:1", b"a:c")] == ["narrow:s", "wide:s"]


def test_formats_are_added_and_none_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    owned = owners(path)
    owned.learn({"job": {"speed": "v2:speed:<car>"}})
    owned.learn({})
    for each in (owned, Ownership(path)):
        assert each.owner_of(b"job:speed:1") == each.owner_of(b"v2:speed:1") == "job:speed"
        assert each.owner_of(b"total") == "other:total" and each.count == 4


def test_owners_are_known_from_a_file_or_when_all_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    owned = Ownership(path)
    assert not owned.is_known
    owned.learn(FORMATS)
    assert not owned.is_known
    owned.complete()
    assert owned.is_known and Ownership(path).is_known


def test_without_any_state_all_keys_are_the_upstreams_also_after_a_restart(tmp_path: Path) -> None:
    Ownership(tmp_path / "owners.json").complete()
    assert Ownership(tmp_path / "owners.json").is_known and Ownership(tmp_path / "owners.json").owner_of(b"a") is None


def test_a_wrong_format_changes_nothing(tmp_path: Path) -> None:
    owned = owners(tmp_path / "owners.json")
    with pytest.raises(SparkisError):
        owned.learn({"job": {"good": "g:<a>", "bad": "<a><b>"}})
    assert owned.owner_of(b"g:1") is None and Ownership(tmp_path / "owners.json").owner_of(b"g:1") is None


def test_a_file_that_cannot_be_written_is_told_and_keys_are_owned_all_the_same(tmp_path: Path) -> None:
    owned = owners(tmp_path / "missing" / "owners.json")
    assert owned.owner_of(b"total") == "other:total" and "missing" in owned.error


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "jobs": {"j": {"s": ["<a><b>"]}}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "owners.json").write_text(text)
    with pytest.raises(OwnershipError, match="is no file of key owners"):
        Ownership(tmp_path / "owners.json")


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "owners.json").write_text(json.dumps({"version": 2, "jobs": {}}))
    with pytest.raises(OwnershipError, match="is of version 2; this program reads version 1"):
        Ownership(tmp_path / "owners.json")
