"""A descriptor says how keys are made; one that cannot work is refused with the name of the thing and a way out."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest

from state_backend.model.descriptor import Encoding, KeyFormat, Kind, StateDescriptor, check_name, check_states
from state_backend.model.errors import DescriptorError


def test_one_value_column_makes_value_and_several_map() -> None:
    assert StateDescriptor("s", "k", "v").kind is Kind.VALUE
    assert StateDescriptor("s", "k", ("a", "b")).kind is Kind.MAP
    assert StateDescriptor("s", "k", "v", field="f").kind is Kind.MAP
    assert StateDescriptor("s", "k", ("a", "b"), kind="value", encoding="json").kind is Kind.VALUE


def test_member_makes_set_and_score_sorted_one() -> None:
    assert StateDescriptor("s", "k", member="m").kind is Kind.SET
    assert StateDescriptor("s", "k", member="m", score="n").kind is Kind.SORTED_SET
    assert StateDescriptor("s", key_format="all", member="m").format_for("j").columns == ()


def test_key_is_made_of_job_state_and_columns() -> None:
    assert StateDescriptor("s", ("a", "b"), "v").format_for("j").text == "j:s:<a>:<b>"
    assert StateDescriptor("s", ("a", "b"), "v", separator="/").format_for("j").text == "j:s:<a>/<b>"
    assert StateDescriptor("s", key_format="plane/<tail>", value="v").format_for("j").text == "plane/<tail>"


def test_key_format_is_completed_once_for_its_job() -> None:
    state = StateDescriptor("s", ("a", "b"), "v", ttl=5).for_job("j")
    assert (state.key, state.key_format, state.ttl_ms) == ((), "j:s:<a>:<b>", 5000)
    assert state.for_job("other") == state


@pytest.mark.parametrize(
    "state",
    [
        StateDescriptor("s", "k", "v"),
        StateDescriptor("s", ("a", "b"), "v", field="f", ttl=timedelta(days=2), deletion="gone", order_by=("t", "n")),
        StateDescriptor("ß", key_format="{<a>}x", value=("a", "b"), encoding="json", duplicates="any", where="a > 1"),
        StateDescriptor("s", "k", "v", reduce="max", columns={"v": "int"}),
        StateDescriptor("s", "k", member="m", deletion="d", ttl=5),
        StateDescriptor("s", "k", member="m", score="n", order_by="t"),
        StateDescriptor("s", "k", "v", kind="list", last_by=("t", "n"), length_max=5, late="drop", time_format="HH"),
        StateDescriptor("s", "k", "v", encoding=Encoding.BINARY, columns={"k": "string", "v": "binary"}).for_job("j"),
    ],
)
def test_descriptor_round_trips_through_json(state: StateDescriptor) -> None:
    assert StateDescriptor.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_name_that_newer_version_added_to_json_is_left_out() -> None:
    state = StateDescriptor("s", "k", "v")
    assert StateDescriptor.from_json(state.to_json() | {"invented_later": 1}) == state


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "state name"),
        ({"name": "a:b"}, "'a:b'"),
        ({"name": "a b"}, "'a b'"),
        ({"name": ".a"}, "'.a'"),
        ({"name": "a\x00b"}, "state name"),
        ({"name": "é" * 101}, "202 bytes"),
        ({"name": 5}, "5"),
        ({"key": ()}, "key= or key_format="),
        ({"key_format": "x<k>"}, "not both"),
        ({"key": 5}, "key= takes column names"),
        ({"key": (), "key_format": "nothing"}, "'nothing'"),
        ({"key": (), "key_format": "<a><b>"}, "separator between them"),
        ({"key": (), "key_format": 5}, "key_format="),
        ({"key": ("a", "b"), "separator": ""}, "separator between them"),
        ({"key": ("a", "b"), "separator": 5}, "separator="),
        ({"key": ("a<b", "c")}, "rename the column"),
        ({"value": ()}, "value="),
        ({"value": ("a", "a")}, "twice"),
        ({"value": None}, "value="),
        ({"value": ("a", "b"), "field": "f", "encoding": "text"}, "one JSON object; leave out encoding='text'"),
        ({"value": ("a", "b"), "kind": "value", "encoding": "text"}, "a JSON object; leave out encoding='text'"),
        ({"field": "f", "kind": "value"}, "leave out kind='value'"),
        ({"field": 5}, "field="),
        ({"kind": "tree"}, "'value', 'map'"),
        ({"encoding": "xml"}, "'text', 'json', 'binary'"),
        ({"duplicates": "first"}, "'error' or 'any'"),
        ({"ttl": 0}, "at least a millisecond"),
        ({"ttl": float("nan")}, "ttl="),
        ({"ttl": float("inf")}, "ttl="),
        ({"ttl": 5, "expire_at": "t"}, "either ttl= or expire_at="),
        ({"expire_at": ""}, "expire_at="),
        ({"resets": "r"}, "resets= is for a state with kind='list'"),
        ({"ttl": "1h"}, "ttl="),
        ({"ttl": True}, "ttl="),
        ({"order_by": ("",)}, "order_by="),
        ({"where": 1}, "where="),
        ({"deletion": ""}, "deletion="),
        ({"reduce": "mean"}, "'sum', 'min', 'max', 'count', 'last'"),
        ({"reduce": "sum", "kind": "list"}, "not for a list"),
        ({"reduce": "sum", "value": ("a", "b")}, "several StateDescriptors"),
        ({"reduce": "sum", "kind": "map"}, "only with field="),
        ({"reduce": "sum", "value": ()}, "value="),
        ({"reduce": "sum", "deletion": "d"}, "reduce='sum' and deletion="),
        ({"reduce": "last", "order_by": "t", "expire_at": "t"}, "reduce='last' and expire_at="),
        ({"reduce": "max", "order_by": "t"}, "leave out order_by= and duplicates="),
        ({"reduce": "count", "duplicates": "any"}, "leave out order_by= and duplicates="),
        ({"reduce": "last"}, "needs order_by="),
        ({"reduce": "sum", "encoding": "json"}, "encoding='text'"),
        ({"member": "m"}, "a set, which has no value"),
        ({"value": (), "member": "m", "field": "f"}, "a set, which has no field"),
        ({"value": (), "member": "m", "reduce": "count"}, "a set, which has no reduce"),
        ({"value": (), "score": "n"}, "score= needs member="),
        ({"kind": "set"}, "kind='set' needs member="),
        ({"value": (), "kind": "sorted-set"}, "kind='sorted-set' needs member="),
        ({"value": (), "member": "m", "kind": "sorted-set"}, "member= without score= makes a state of kind 'set'"),
        ({"value": (), "member": "m", "score": "n", "kind": "map"}, "makes a state of kind 'sorted-set'"),
        ({"value": (), "member": "m", "score": "m"}, "the same column 'm'"),
        ({"value": (), "member": "m", "encoding": "json"}, "leave out encoding="),
        ({"value": (), "member": "m", "length_max": 5}, "kind='list'"),
        ({"value": (), "member": "m", "resets": "r"}, "kind='list'"),
        ({"value": (), "member": ""}, "member="),
        ({"last_by": 5}, "last_by="),
        ({"last_by": "t", "max_by": "t"}, "last_by= and max_by= do not go together"),
        ({"value": (), "member": "m", "last_by": "t"}, "last_by= is not for a set"),
        ({"first_by": "t", "kind": "list"}, "give length_max=, at most 10000"),
        ({"first_by": "t", "kind": "list", "length_max": 10_001}, "give length_max=, at most 10000"),
        ({"last_by": "t", "order_by": "t"}, "leave out order_by="),
        ({"last_by": "t", "reduce": "max"}, "leave out reduce="),
        ({"last_by": "t", "deletion": "d"}, "leave out deletion="),
        ({"last_by": "t", "duplicates": "any"}, "leave out duplicates="),
        ({"last_by": "t", "late": "drop"}, "late='drop' is for a list"),
        ({"late": "never"}, "late= is one of 'insert', 'drop'"),
        ({"time_format": ""}, "time_format="),
    ],
)
def test_impossible_descriptor_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"name": "mine", "key": "k", "value": "v"} | arguments
    with pytest.raises(DescriptorError, match=re.escape(named)) as refused:
        StateDescriptor(**given)
    if "name" not in arguments and "format" not in str(refused.value) and "<" not in str(refused.value):
        assert "'mine'" in str(refused.value)


def test_job_name_is_refused_in_same_words() -> None:
    with pytest.raises(DescriptorError, match="job name 'a/b'"):
        check_name("job", "a/b")


@pytest.mark.parametrize(
    ("one", "other", "do_overlap"),
    [
        ("j:a:<k>", "j:b:<k>", False),
        ("j:a:<k>", "j:a:<x>:<y>", True),
        ("j:a:<k>", "j:<k>", True),
        ("<k>", "anything<x>", True),
        ("<k>:a", "<k>:b", False),
        ("<k>:a", "x<k>", True),
        ("x<k>1", "x<k>2", False),
        ("ab<k>", "a<k>", True),
        ("j:all", "j:all", True),
        ("j:all", "j:<k>", True),
        ("j:all", "j:s:<k>", False),
        ("j:all", "j:<k>:x", False),
        ("j:all", "j:all:<k>", False),
    ],
)
def test_formats_overlap_if_one_key_could_be_made_by_both(one: str, other: str, do_overlap: bool) -> None:
    mine, theirs = KeyFormat.parse(one), KeyFormat.parse(other)
    assert mine.overlaps(theirs) == theirs.overlaps(mine) == do_overlap


def test_state_with_fields_or_that_reduces_may_have_one_key() -> None:
    one = StateDescriptor("s", key_format="{j}:all", field="f", value="v").for_job("j")
    assert one.format_for("j").pattern() == rb"\{j\}:all\Z"
    assert StateDescriptor("n", key_format="total", reduce="count").value == ()


def test_pattern_matches_keys_of_its_format() -> None:
    pattern = re.compile(KeyFormat.parse("a.<x>-<y>.b").pattern(), re.DOTALL)
    assert pattern.match(b"a.1-2.b")
    assert pattern.match(b"a.\n\xff-\n.b")
    assert not pattern.match(b"aX1-2.b")
    assert not pattern.match(b"a.1-2.b\n")


def test_job_needs_state() -> None:
    with pytest.raises(DescriptorError, match="'j' declares no state"):
        check_states("j", [])


def test_two_states_of_job_differ_in_name() -> None:
    with pytest.raises(DescriptorError, match="'a' twice"):
        check_states("j", [StateDescriptor("a", "k", "v"), StateDescriptor("a", key_format="x<k>", value="v")])


def test_two_states_of_job_cannot_make_one_key() -> None:
    states = [StateDescriptor("a", "k", "v"), StateDescriptor("b", key_format="j:a:x<k>", value="v")]
    with pytest.raises(DescriptorError, match=re.escape("'j:a:<k>', 'j:a:x<k>'")):
        check_states("j", states)
    check_states("other", states)
