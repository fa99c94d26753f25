"""Names of keys that clients know by another name than the state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.routing.key_aliases import KeyAlias, StateKey
from resp_server.backends.routing.rules import RulesError, parse_rules
from state_backend.model.descriptor import KeyFormat


def alias(keys: str, state_key: str, field: str | None = None) -> KeyAlias:
    return KeyAlias(KeyFormat.parse(keys), KeyFormat.parse(state_key), (field and KeyFormat.parse(field)) or None)


@pytest.mark.parametrize(
    ("made", "key", "name"),
    [
        (alias("dash/<a>/apdex", "golden:<a>"), b"dash/7/apdex", StateKey(b"golden:7", None)),
        (alias("dash/<a>/<b>", "golden:<b>", "<a>"), b"dash/7/apdex", StateKey(b"golden:apdex", b"7")),
        (alias("dash/<a>/<b>", "golden:<b>:<a>"), b"dash/7/8/9", StateKey(b"golden:8/9:7", None)),
        (alias("one", "golden:all", "f"), b"one", StateKey(b"golden:all", b"f")),
        (alias("a<x>b", "<x>"), b"a\xff\nb", StateKey(b"\xff\n", None)),
    ],
)
def test_states_name_has_values_of_clients_name(made: KeyAlias, key: bytes, name: StateKey) -> None:
    assert made.state_key_of(key) == name
    assert made.key_of(name) == key


def test_states_key_that_no_clients_key_means_has_no_other_name() -> None:
    made = alias("<a>/<b>", "golden:<a>:<b>")
    assert made.key_of(StateKey(b"other:1:2", None)) is None
    assert made.key_of(StateKey(b"golden:1:2", None)) == b"1/2"
    assert made.key_of(StateKey(b"golden:1:2", b"f")) is None
    assert made.key_of(StateKey(b"golden:1/2:3", None)) is None  # 1/2/3 means golden:1:2/3


def test_field_that_no_clients_key_means_has_no_name() -> None:
    made = alias("<a>/<b>", "golden:<a>", "f:<b>")
    assert made.key_of(StateKey(b"golden:1", b"f:2")) == b"1/2"
    assert made.key_of(StateKey(b"golden:1", b"2")) is None and made.key_of(StateKey(b"golden:1", None)) is None
    assert made.key_of(StateKey(b"golden:1/2", b"f:3")) is None  # 1/2/3 means f:2/3 of golden:1
    assert made.only_field is None and alias("<a>", "golden:<a>", "f").only_field == b"f"


@pytest.mark.parametrize(
    ("made", "start"),
    [
        (alias("d/<a>/<b>", "golden:<a>", "<b>"), b"d/7/"),
        (alias("d/<b>/<a>", "golden:<a>", "<b>"), b"d/"),
        (alias("<a>/apdex", "golden:<a>", "apdex"), b"7/apdex"),
    ],
)
def test_aliases_of_hash_fields_begin_with_key(made: KeyAlias, start: bytes) -> None:
    assert made.alias_prefix(b"golden:7") == start and made.alias_prefix(b"other:7") is None


@given(st.sampled_from([b"1", b"1/2", b"\xff"]), st.sampled_from([b"f", b"f/g", b""]))
def test_each_name_of_field_begins_so_and_means_field(account: bytes, field: bytes) -> None:
    made = alias("d/<a>/<b>", "golden:<a>", "<b>")
    hash_ = b"golden:" + account
    name = made.key_of(StateKey(hash_, field))
    start = made.alias_prefix(hash_)
    assert name is None or (start is not None and name.startswith(start))
    assert name is None or made.state_key_of(name) == (hash_, field)


texts = st.lists(st.sampled_from([b"a", b"/", b":", b"\xff"]), max_size=6).map(b"".join)


@given(texts, texts)
def test_each_listed_name_means_its_key(first: bytes, second: bytes) -> None:
    made = alias("<a>/<b>", "golden:<b>:<a>")
    state_key = b"golden:%b:%b" % (first, second)
    name = made.key_of(StateKey(state_key, None))
    assert name is None or made.state_key_of(name).key == state_key


def test_time_is_proportional_to_key() -> None:
    made = alias("<a>:<b>:<c>:<d>:end", "s:<a>:<b>:<c>:<d>")
    assert made.state_key_of(b":" * 100_000 + b":end").key.startswith(b"s:")
    assert made.key_of(StateKey(b":" * 100_000, None)) is None


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ('keys = "a<x>"\nstate_key = "b"', "the placeholder <x> of 'keys' is in no name of the state"),
        ('keys = "a"\nstate_key = "b<y>"', "the placeholder <y> is not in 'keys'"),
        ('keys = "a<x>b<x>"\nstate_key = "b<x>"', "the placeholder <x> stands twice in 'keys'"),
        (
            'keys = "a<x>"\nstate_key = "b<x>"\nfield = "<x>"',
            "the placeholder <x> stands twice in 'state_key' and 'field'",
        ),
        ('keys = "a"\nfield = "x"', "it has a 'field', but no 'state_key'"),
        ('keys = "a"\nstate_key = "b*"', "state_key 'b*' has a '*': write a placeholder, such as 'b<any>'"),
    ],
)
def test_names_that_do_not_fit_are_mistakes(settings: str, mistake: str) -> None:
    with pytest.raises(RulesError) as caught:
        parse_rules(f'[[rule]]\n{settings}\nowner = "state"\n', "rules")
    assert [each.partition(": ")[2] for each in caught.value.mistakes] == [mistake]


def test_only_states_keys_have_other_names() -> None:
    with pytest.raises(RulesError, match="'state_key' is not for owner = \"upstream\""):
        parse_rules('[[rule]]\nkeys = "a"\nowner = "upstream"\nstate_key = "b"\n', "rules")
