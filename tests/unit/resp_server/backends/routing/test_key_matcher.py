"""The owners of keys, found by the first and last literals of formats."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.routing.format_patterns import covers, key_pattern
from resp_server.backends.routing.key_matcher import KeyMatcher, OwnedFormat
from resp_server.backends.routing.rules import Owner, Rule
from state_backend.model.descriptor import KeyFormat

texts = st.text("ab:", max_size=3)
formats = (
    st.builds("{}<x>{}".format, texts, texts) | st.builds("{}<x>:{}<y>{}".format, texts, texts, texts) | texts
).map(KeyFormat.parse)
keys = st.lists(st.sampled_from([b"a", b"b", b":", b"\xff"]), max_size=7).map(b"".join)


def fits(key_format: KeyFormat, key: bytes) -> bool:
    return re.match(key_pattern(key_format), key, re.DOTALL) is not None


@given(st.lists(formats, max_size=6), st.lists(formats, max_size=3), keys)
def test_first_rule_that_fits_decides_then_formats(ruled: list[KeyFormat], owned: list[KeyFormat], key: bytes) -> None:
    rules = [Rule(str(number), each, Owner.STATE) for number, each in enumerate(ruled)]
    made = KeyMatcher([OwnedFormat(each.text, "job:state") for each in owned], rules)
    expected = next((rule for rule in rules if fits(rule.keys, key)), None)
    found = made.decide(key)
    assert found.rule is expected
    if expected is None:
        assert found.owner is (Owner.STATE if any(fits(each, key) for each in owned) else Owner.UPSTREAM)


@given(formats, formats, keys)
def test_format_that_covers_another_one_fits_all_its_keys(wide: KeyFormat, narrow: KeyFormat, key: bytes) -> None:
    if covers(wide, narrow) and fits(narrow, key):
        assert fits(wide, key)
